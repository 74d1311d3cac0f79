"""The tree of errors in the documentation of their module is the tree of their classes."""

import inspect
import re

from conserve import errors

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
