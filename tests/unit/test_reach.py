"""Guards of properties: a guard is judged by the examples that come to it, once they are enough."""

from types import SimpleNamespace

import pytest

from tests import reach


@pytest.mark.parametrize(
    ("derandomised", "asked", "passed", "seldom"),
    [
        (True, 24, 0, False),
        (True, 25, 0, True),
        (True, 99, 1, False),
        (True, 100, 3, True),
        (True, 100, 4, False),
        (False, 99, 0, False),
        (False, 100, 0, True),
        (False, 100, 1, False),
    ],
)
def test_a_guard_that_lets_too_few_examples_through_is_named(
    derandomised: bool, asked: int, passed: int, seldom: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(default=SimpleNamespace(derandomize=derandomised))
    monkeypatch.setattr(reach, "hypothesis", SimpleNamespace(settings=settings))
    for number in range(asked):
        reach.reached("rows leave", number < passed)
    found = reach.seldom_reached()
    reach.begin()
    assert found == ([f"rows leave: {passed} of {asked} examples"] if seldom else [])
