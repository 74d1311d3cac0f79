"""The tree of errors in their module's documentation is that of their classes; each has a cause and a next step."""

import inspect
import pickle
import re

import pytest

from conserve import errors
from conserve.errors import ConserveError, StoreDamaged, StoreForbidden, StoreUnreachable

LINE = re.compile(r"^(?P<branch>[│├└─ ]*)(?P<name>\w+)  +\S")


def test_the_tree_of_errors_names_each_under_its_parent() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    _, _, tree = (errors.__doc__ or "").partition("\n\n")
    for line in tree.partition("\n\n")[0].splitlines():
        found = LINE.match(line)
        assert found is not None, line
        del above[len(found["branch"]) // 4 :]
        drawn[found["name"]] = above[-1] if above else "Exception"
        above.append(found["name"])
    classes = [
        one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__
    ]
    there = {one.__name__: one.__base__ for one in classes if not issubclass(one, Warning)}
    assert drawn == {name: base.__name__ for name, base in there.items() if base}


@pytest.mark.parametrize(
    ("error", "said", "parts"),
    [
        (ConserveError("it is; so"), "it is; so", ("it is; so", None)),
        (StoreDamaged("it is", step="run: x", job_id="job-1"), "it is; run: x", ("it is", "run: x")),
        (StoreForbidden("it is", step="run: x", why="y"), "it is; run: x", ("it is", "run: x")),
        (StoreUnreachable("it is", step="see: x", joint=", "), "it is, see: x", ("it is", "see: x")),
    ],
)
def test_an_error_is_one_sentence_of_its_cause_and_the_next_step(
    error: ConserveError, said: str, parts: tuple[str, str | None]
) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (str(one), (one.cause, one.step)) == (said, parts)
        assert (one.without("run: x"), one.without("another")) == (said.removesuffix("; run: x"), said)
