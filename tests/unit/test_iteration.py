"""The record of an iteration: whole in the scheduler, and its stamp alone in a worker's process."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.policy.plan import Plan
from conserve.engine.vllm.iteration import (
    Iteration,
    IterationOutcome,
    Stamp,
    iteration_of,
    outcome_of,
    put,
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
    ("stamp", "outcome", "left", "whole"),
    [
        (None, None, set(), True),
        (STAMP, None, set(), True),
        (STAMP, IterationOutcome(), set(), True),
        (STAMP, IterationOutcome(left=frozenset(["row1"])), {"row1"}, False),
        (STAMP, IterationOutcome(joined=1), set(), False),
        (None, IterationOutcome(joined=1), set(), False),  # rows join iterations that no row may leave
    ],
)
def test_an_iteration_is_whole_if_no_row_left_or_joined(
    stamp: Stamp | None, outcome: IterationOutcome | None, left: set[str], whole: bool
) -> None:
    iteration = Iteration(stamp=stamp, outcome=outcome)
    assert (iteration.left, iteration.whole) == (left, whole)


def test_only_a_plan_has_a_limit() -> None:
    assert Iteration().limit_ms is None
    assert Iteration(plan=Plan(tokens={}, batch=Batch(), limit_ms=40.0)).limit_ms == 40.0
