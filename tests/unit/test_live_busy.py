"""The share that live requests add to their iterations, and what it leaves of a harm."""

from random import Random

import pytest

from conserve.engine.policy.harm import without_queueing
from conserve.engine.runtime.live_busy import FADES_S, LiveBusy


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_it_is_the_share_from_the_first_iteration_on(share: float) -> None:
    busy = LiveBusy()
    for _ in range(500):
        busy.note(share * 0.02, 0.02)
        assert busy.share == pytest.approx(share)


def test_it_is_that_of_now_soon_and_time_without_live_requests_changes_nothing() -> None:
    busy = LiveBusy()
    for _ in range(200):
        busy.note(0.8, 1.0)
    before = busy.share
    busy.note(0.0, 0.0)
    assert busy.share == before == pytest.approx(0.8)
    for _ in range(round(3 * FADES_S)):
        busy.note(0.2, 1.0)
    assert busy.share == pytest.approx(0.2, abs=0.04)


def test_without_live_requests_it_is_nothing() -> None:
    assert LiveBusy().share == 0.0


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
