"""Points measured in several processes: all of them once, each with its own, and none left behind."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from conserve.cli.side_by_side import side_by_side
from conserve.errors import ConserveError, SettingsError


def squares() -> Callable[[int], tuple[int, int]]:
    """Square a number; the process tells itself by its id."""
    return lambda number: (number * number, os.getpid())


def killed_at_two() -> Callable[[int], int]:
    def measure(number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return measure


def none() -> Callable[[int], int]:
    raise SettingsError("there is no engine here")


@pytest.fixture(autouse=True)
def all_end() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("processes", [1, 2])
def test_each_point_is_measured_once(processes: int) -> None:
    found = dict(side_by_side(range(6), squares, processes))
    assert {point: square for point, (square, _) in found.items()} == {n: n * n for n in range(6)}
    assert (os.getpid() in {pid for _, pid in found.values()}) is (processes == 1)


def test_what_was_measured_stays_when_a_process_is_killed() -> None:
    found = []
    with pytest.raises(ConserveError, match=r"was killed, perhaps for its memory; .* --processes 1 goes on"):
        found += [one for one, _ in side_by_side([0, 1, 2], killed_at_two, 2)]
    assert 2 not in found


def test_a_failure_to_begin_is_told_as_itself() -> None:
    with pytest.raises(SettingsError, match="there is no engine here"):
        list(side_by_side([0, 1, 2], none, 2))


def test_closing_drops_what_is_under_way() -> None:
    before = signal.getsignal(signal.SIGINT)
    with closing(side_by_side(range(100), squares, 2)) as found:
        point, (square, _) = next(found)
    assert square == point * point
    assert signal.getsignal(signal.SIGINT) is before
