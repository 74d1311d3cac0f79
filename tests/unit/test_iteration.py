"""The record of an iteration: whole in the scheduler, and its stamp alone in a worker's process."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.policy.plan import Plan
from conserve.engine.runtime.stopwatch import DeviceTime
from conserve.engine.vllm.iteration import (
    LONG_MS,
    Iteration,
    IterationOutcome,
    Stamp,
    device_time_of,
    iteration_of,
    outcome_of,
    put,
    put_device_time,
    stamp_of,
)
from conserve.profiles.batch import Batch

STAMP = Stamp(iteration=3, flag="psm_1", rows=["row1", "row0"], every=2)


class Output:
    """vLLM's, as far as a record travels on it."""


def recorded(**fields: Any) -> Any:
    output = Output()
    put(output, Iteration(**fields))
    return output


def test_a_worker_gets_the_stamp_and_nothing_else() -> None:
    tokens = {f"row{n}": 1 for n in range(500)}
    plan = Plan(tokens=tokens, batch=Batch(), admitted=list(tokens), predicted_ms=12.0)
    there = pickle.loads(pickle.dumps(recorded(started=1.0, plan=plan, tokens=tokens, stamp=STAMP)))
    assert stamp_of(there) == STAMP
    assert (iteration_of(there).plan, iteration_of(there).tokens) == (None, {})
    assert len(pickle.dumps(recorded(plan=plan, tokens=tokens))) < 200, "it travels with every iteration"


def test_an_output_of_another_scheduler_has_no_stamp() -> None:
    assert stamp_of(SimpleNamespace()) is None
    assert stamp_of(recorded()) is None
    assert outcome_of(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("stamp", "outcome", "left", "batch_ms"),
    [
        (None, None, set(), 20.0),
        (STAMP, None, set(), 20.0),
        (STAMP, IterationOutcome(), set(), 20.0),
        (STAMP, IterationOutcome(left=frozenset(["row1"])), {"row1"}, None),
        (STAMP, IterationOutcome(joined=1), set(), None),
        (None, IterationOutcome(joined=1), set(), None),  # rows join iterations that no row may leave
    ],
)
def test_an_iteration_takes_the_time_of_its_batch_if_no_row_left_or_joined(
    stamp: Stamp | None, outcome: IterationOutcome | None, left: set[str], batch_ms: float | None
) -> None:
    iteration = Iteration(stamp=stamp, outcome=outcome, took_s=0.02)
    assert (iteration.left, iteration.batch_ms) == (left, batch_ms)


def test_an_iteration_lasts_whatever_rows_left_or_joined() -> None:
    for outcome in (IterationOutcome(left=frozenset(["row1"])), IterationOutcome(joined=1)):
        assert Iteration(stamp=STAMP, outcome=outcome, took_s=0.02).lasted_ms == 20.0
    assert Iteration(overlapped=True, took_s=0.02).lasted_ms is None


def plan(predicted_ms: float) -> Plan:
    return Plan(tokens={}, batch=Batch(), predicted_ms=predicted_ms)


FIVE = DeviceTime(own_ms=4.0, since_last_ms=5.0)
LONG = DeviceTime(own_ms=LONG_MS, since_last_ms=900.0)


@pytest.mark.parametrize(
    ("clocks", "batch_ms"),
    [
        ({}, 20.0),
        ({"device": FIVE}, 20.0),  # the host's work before it is in an iteration's time where none overlap
        ({"follows": True}, 20.0),
        ({"follows": True, "device": FIVE}, 5.0),
        ({"follows": True, "device": DeviceTime(5.0, None)}, None),
        ({"follows": True, "overlapped": True}, None),
        ({"follows": True, "overlapped": True, "device": FIVE}, 5.0),
        ({"overlapped": True, "device": FIVE}, None),
        ({"cold": True}, None),
        ({"cold": True, "device": FIVE}, None),
        ({"cold": True, "device": DeviceTime(LONG_MS - 1, 900.0)}, None),
        ({"cold": True, "device": LONG}, LONG_MS),  # the idle time before it is not its own
        ({"cold": True, "device": LONG, "plan": plan(LONG_MS / 2)}, LONG_MS),
        ({"cold": True, "device": LONG, "plan": plan(LONG_MS / 3)}, None),  # it was held up
        ({"follows": True, "device": FIVE, "stamp": STAMP}, None),  # the device waits at safepoints
        ({"follows": True, "device": DeviceTime(4.0, LONG_MS), "stamp": STAMP}, LONG_MS),
    ],
)
def test_the_device_tells_the_time_of_an_iteration_behind_another(
    clocks: dict[str, Any], batch_ms: float | None
) -> None:
    assert Iteration(took_s=0.02, **clocks).batch_ms == batch_ms
    left = IterationOutcome(left=frozenset(["row1"]))
    assert Iteration(took_s=0.02, **{**clocks, "stamp": STAMP, "outcome": left}).batch_ms is None


def test_an_iteration_behind_another_ends_so_long_after_that_one_whenever_the_host_reads_it() -> None:
    assert Iteration(started=7.0, follows=True, device=FIVE).ended == 7.005
    assert Iteration(started=7.0, device=FIVE).ended is None
    assert Iteration(started=7.0, follows=True).ended is None
    assert Iteration(started=7.0, follows=True, device=DeviceTime(5.0, None)).ended is None


def test_a_worker_tells_a_time_beside_its_outcome_or_without_one() -> None:
    output = Output()
    assert device_time_of(output) is None
    put_device_time(output, FIVE)
    assert (device_time_of(output), outcome_of(output)) == (FIVE, None)
    put(output, IterationOutcome(joined=1))
    assert (device_time_of(output), outcome_of(output)) == (FIVE, IterationOutcome(joined=1))
    assert pickle.loads(pickle.dumps(FIVE)) == FIVE, "it may come from another process"


def test_only_a_plan_has_a_limit() -> None:
    assert Iteration().limit_ms is None
    assert Iteration(plan=Plan(tokens={}, batch=Batch(), limit_ms=40.0)).limit_ms == 40.0
