"""The share of the time that live requests take of the engine, and what it leaves of a harm."""

from random import Random

import pytest

from conserve.engine.policy.harm import without_queueing
from conserve.engine.runtime.live_busy import FADES_S, LiveBusy


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_it_is_the_share_from_the_first_minute_on(share: float) -> None:
    busy, now = LiveBusy(), 1000.0
    for second in range(300):
        now += 1.0
        busy.note(share, at=now)
        if second > 15:
            assert busy.share(now=now) == pytest.approx(share, rel=0.1)


def test_it_fades_while_no_live_request_comes_and_is_that_of_now_soon() -> None:
    busy = LiveBusy()
    for now in range(1, 200):
        busy.note(0.8, at=float(now))
    assert busy.share(now=199.0 + FADES_S) == pytest.approx(0.8 / 2.718, rel=0.02)
    for now in range(300, 420):
        busy.note(0.2, at=float(now))
    assert busy.share(now=420.0) == pytest.approx(0.2, rel=0.1)


def test_iterations_of_rows_count_nothing_and_nothing_is_no_share() -> None:
    busy = LiveBusy()
    busy.note(0.0, at=5.0)
    assert busy.share(now=6.0) == 0.0
    busy.note(1.0, at=7.0)
    assert busy.share(now=7.0) == pytest.approx(1.0, rel=0.02)
    assert busy.share(now=6.0) <= 1.0, "a clock that another thread read first"


@pytest.mark.parametrize("busy", [0.0, 0.3, 0.6, 0.8])
def test_latencies_of_a_shared_processor_grow_by_the_harm(busy: float) -> None:
    """Jobs share a processor that is busy so much; all work takes longer by what is left of the harm."""
    longer = without_queueing(0.1, busy)
    assert mean_time(busy * (1 + longer)) * (1 + longer) == pytest.approx(1.1 * mean_time(busy), rel=1e-9)
    assert 0 < longer <= 0.1


def mean_time(busy: float) -> float:
    """Mean time of a job that takes 1 alone."""
    return 1 / (1 - busy)


def test_the_formula_is_that_of_a_simulated_processor() -> None:
    alone = simulated(busy=0.6, work=1.0)
    assert alone == pytest.approx(mean_time(0.6), rel=0.1)
    assert simulated(busy=0.6, work=1 + without_queueing(0.1, 0.6)) == pytest.approx(1.1 * alone, rel=0.02)


def simulated(*, busy: float, work: float, jobs: int = 40_000) -> float:
    """Mean time of jobs that share a processor in equal parts; they arrive at random, equal jobs in all calls."""
    dice = Random(3)
    now = next_at = total = 0.0
    left: list[list[float]] = []  # work left, arrival
    arrived = done = 0
    while done < jobs:
        soonest = min(left)[0] * len(left) if left else float("inf")
        step = min(soonest, next_at - now if arrived < jobs else float("inf"))
        now += step
        for job in left:
            job[0] -= step / len(left)
        for job in [one for one in left if one[0] <= 1e-9]:
            left.remove(job)
            total += now - job[1]
            done += 1
        if arrived < jobs and now >= next_at - 1e-12:
            left.append([work * dice.expovariate(1.0), now])
            next_at = now + dice.expovariate(busy)
            arrived += 1
    return total / jobs
