"""Comparisons of large files beside the store's thread."""

from collections.abc import Callable
from threading import Event

import pytest

from conserve.errors import StoreError
from conserve.jobs.harvest.comparing import AT_ONCE_BYTES, Comparisons, StillCompared

LARGE = AT_ONCE_BYTES + 1


def outcome(comparisons: Comparisons, compare: Callable[[], str]) -> str:
    """Outcome of the comparison of a large file, once there is one."""
    while True:
        try:
            return comparisons.outcome("j", "inputs", LARGE, compare)
        except StillCompared:
            continue


def test_a_large_file_is_compared_beside_and_its_outcome_stays_until_it_is_forgotten() -> None:
    comparisons, may_end, calls = Comparisons(), Event(), list[str]()

    def compare() -> str:
        calls.append("j")
        may_end.wait()
        return "whole"

    for _ in range(3):
        with pytest.raises(StillCompared, match="files of job j"):
            comparisons.outcome("j", "inputs", LARGE, compare)
    assert comparisons.unfinished == {"j"}
    may_end.set()
    assert [outcome(comparisons, compare) for _ in range(2)] == ["whole", "whole"]
    assert (calls, comparisons.unfinished) == (["j"], set())
    comparisons.forget(["j"])
    assert outcome(comparisons, compare) == "whole"
    assert calls == ["j", "j"]


def test_storage_that_is_away_is_told_once_and_asked_again() -> None:
    comparisons, away = Comparisons(), [True]

    def compare() -> str:
        if away[0]:
            raise StoreError("out of reach")
        return "whole"

    with pytest.raises(StoreError, match="out of reach"):
        outcome(comparisons, compare)
    away[0] = False
    assert outcome(comparisons, compare) == "whole"


def test_a_small_file_is_compared_at_once() -> None:
    assert Comparisons().outcome("j", "inputs", AT_ONCE_BYTES, lambda: "whole") == "whole"
