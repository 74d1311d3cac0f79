"""Order in which a profiling session measures its points, on an engine whose times are sums in the head."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from conserve.profiles import points
from conserve.profiles.affordable import LEAST_FITTED
from conserve.profiles.batch import Slice
from conserve.profiles.itinerary import Itinerary, Stretch, other_points
from conserve.profiles.points import NOISE_EVERY, Point
from conserve.profiles.record import Header, Record, Visit

FIRST = [Point.parse(f"{'decode' if 'd' in slices else 'prefill'} {slices}") for slices in points.FIRST]
NOISE = Point("noise", (Slice(64, 0),))
LINEAR = 1.0  # ms of a token


def chunks(*tokens: int, kind: str = "mixed") -> list[Point]:
    return [Point(kind, (Slice(n, 0),)) for n in tokens]


def proportional(point: Point) -> float:
    return LINEAR * point.batch.tokens


class Session:
    """Visits what an itinerary yields: one iteration a visit, on a clock that only iterations move."""

    def __init__(
        self,
        plan: Sequence[Point],
        *,
        usable_s: float,
        visits: int = 1,
        record: Record | None = None,
    ) -> None:
        self.record = record if record is not None else Record.open(None, Header("key", "plan"))
        self.stretches: list[Stretch] = []
        self.itinerary = Itinerary(
            plan, self.record, usable_s=usable_s, visits=visits, on_stretch=self.stretches.append
        )
        self.visited: list[str] = []
        for point in self.itinerary:
            ms = proportional(point)
            self.record.add(Visit(str(point), [ms], ms / 1e3))
            self.visited.append(str(point))

    @property
    def unlike_noise(self) -> list[str]:
        return [name for name in self.visited if not name.startswith("noise")]


def names(points: Sequence[Point]) -> list[str]:
    return [str(point) for point in points]


def test_small_points_come_first_and_the_noise_point_between_every_dozen() -> None:
    others = chunks(*range(100, 140))
    found = Session([NOISE, *others, *FIRST], usable_s=1e6)
    assert found.visited[:9] == [*names(FIRST), str(NOISE)], "the noise before any other has been measured"
    assert found.unlike_noise == [*names(FIRST), *names(others)]
    places = [place for place, name in enumerate(found.visited) if name == str(NOISE)]
    assert [later - earlier for earlier, later in pairwise(places[1:])] == [NOISE_EVERY + 1] * 2
    assert found.unlike_noise.index(found.visited[places[1] + 1]) == NOISE_EVERY


def test_a_plan_without_noise_has_none() -> None:
    assert Session([*FIRST, *chunks(100)], usable_s=1e6, visits=2).unlike_noise == names(
        [*FIRST, *chunks(100)] * 2
    )


def test_what_an_earlier_session_measured_is_not_visited_again() -> None:
    record = Record.open(None, Header("key", "plan"))
    known, others = chunks(100, 101), chunks(102, 103)
    for point in (*FIRST, *known, *chunks(70)):
        record.add(Visit(str(point), [proportional(point)], 0.1))
    assert Session([*FIRST, *known, *others], usable_s=1e6, record=record).visited == names(others)


def test_noise_of_another_plan_is_no_point_of_this_one() -> None:
    record = Record.open(None, Header("key", "plan"))
    for point in (NOISE, *FIRST, *chunks(70)):
        record.add(Visit(str(point), [1.0], 0.1))
    assert other_points(record, names(FIRST)) == {str(point): point for point in chunks(70)}


def test_points_that_are_too_long_for_the_rest_of_the_budget_are_left_out() -> None:
    """Thirty of 100 ms and the first two are enough for a fit; ten of 60 s are not affordable."""
    short, long = chunks(*range(100, 140)), chunks(*range(60_000, 60_010))
    mingled = [point for pair in zip(short, long * 4, strict=True) for point in pair]
    found = Session([*FIRST, *dict.fromkeys(mingled)], usable_s=20.0)
    assert found.unlike_noise == names([*FIRST, *short])
    assert not found.stretches


def test_the_first_round_ends_once_nothing_within_reach_is_left() -> None:
    short = chunks(*range(100, 100 + LEAST_FITTED))
    found = Session([*FIRST, *chunks(900_000), *short], usable_s=60.0)
    assert found.unlike_noise == names([*FIRST, *short])
    assert found.record.seconds < 60.0


def test_a_budget_that_is_too_small_for_a_fit_is_stretched_once_and_for_the_shortest() -> None:
    found = Session([*FIRST, *chunks(*range(1040, 999, -1))], usable_s=5.0)
    assert len(found.visited) == LEAST_FITTED
    (stretch,) = found.stretches
    assert stretch.more_s == found.itinerary.more_s
    assert found.record.seconds == pytest.approx(5.0 + stretch.more_s, rel=0.05)
    assert stretch.batches == LEAST_FITTED - len(FIRST)
    longest = names(chunks(*range(1040, 1040 - len(FIRST), -1)))
    assert not set(longest) & set(found.visited)


def test_later_rounds_visit_each_point_again_while_there_is_time() -> None:
    plan = [*FIRST, *chunks(*range(100, 100 + LEAST_FITTED))]
    once = Session(plan, usable_s=1e6).record.seconds
    whole = Session(plan, usable_s=1e6, visits=3)
    assert whole.unlike_noise == names(plan * 3)
    cut = Session(plan, usable_s=1.5 * once, visits=2)
    measured = len({*cut.visited})
    assert LEAST_FITTED <= measured < len(plan), "a half of the time is for the first round"
    assert cut.visited == names(plan[:measured] * 2)[: len(cut.visited)]
    assert 1.5 * once <= cut.record.seconds < 1.5 * once + max(map(proportional, plan)) / 1e3


def test_noise_is_measured_in_later_rounds_too() -> None:
    plan = [NOISE, *FIRST, *chunks(*range(100, 100 + NOISE_EVERY))]
    later = Session(plan, usable_s=1e6, visits=2).visited[len(plan) + 1 :]
    assert [name == str(NOISE) for name in later].count(True) == 2
    assert later[0] == str(NOISE) == later[NOISE_EVERY + 1]
