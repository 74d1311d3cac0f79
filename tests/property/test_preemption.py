"""Requests that leave an iteration, whatever runs and whatever arrives."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.policy.preemption import (
    LEAVE_RULES,
    AllOffline,
    Arrivals,
    JustEnough,
    LeaveRule,
    Promptly,
    UnderWay,
    prompts_ms,
    remaining_ms,
)
from conserve.engine.runtime.safepoint import ALL_ROWS, IN_FLIGHT, REFUSED, LeaveFlag
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from tests.reach import reached

MODEL = ConServeModel.of(0.3, 1e-4, 2e-4, 1.5e-3, 0.15, 1.0, 1e-3, 15.0)

prompts = st.builds(Slice, st.integers(1, 2000), st.integers(0, 4000))
decodes = st.builds(Slice, st.just(1), st.integers(1, 4000), st.just(True))
milliseconds = st.floats(-1e4, 1e4)


@st.composite
def iterations(draw: st.DrawFn) -> UnderWay:
    rows = draw(st.lists(st.one_of(prompts, decodes), min_size=1, max_size=8))
    online = draw(st.lists(st.one_of(prompts, decodes), max_size=8))
    return UnderWay(
        batch=Batch.of([*rows, *online]),
        rows=rows,
        separable=draw(st.booleans()),
        elapsed_ms=draw(st.floats(0, 2000)),
    )


@st.composite
def comings(draw: st.DrawFn) -> Arrivals:
    return Arrivals(
        prompts=draw(st.lists(prompts, min_size=1, max_size=4)),
        slack_ms=draw(milliseconds),
        ttft_ms=draw(st.floats(1, 1e4)),
        spare_tokens=draw(st.one_of(st.just(inf), st.floats(-1e3, 1e4))),
    )


policies = st.sampled_from(sorted(LEAVE_RULES)).map(lambda name: LEAVE_RULES[name]())


@given(iterations(), comings(), policies)
def test_only_rows_of_the_iteration_leave(running: UnderWay, come: Arrivals, policy: LeaveRule) -> None:
    before = replace(running.batch)
    assert 0 <= policy.leaving(running, come, MODEL) <= len(running.rows)
    assert running.batch == before, "a decision changes nothing"


@given(iterations(), comings(), policies, st.floats(0, 1e4))
def test_with_more_slack_no_more_rows_leave(
    running: UnderWay, come: Arrivals, policy: LeaveRule, more_ms: float
) -> None:
    patient = replace(come, slack_ms=come.slack_ms + more_ms)
    leaving = policy.leaving(running, come, MODEL)
    if reached("rows leave", leaving):
        assert policy.leaving(running, patient, MODEL) <= leaving


@given(iterations(), comings())
def test_no_row_leaves_for_a_promise_that_is_kept_anyway(running: UnderWay, come: Arrivals) -> None:
    kept = remaining_ms(running, MODEL) + prompts_ms(come, MODEL) <= come.slack_ms
    if reached("a promise is kept anyway", kept):
        assert AllOffline().leaving(running, come, MODEL) == 0


@given(iterations(), comings(), st.one_of(st.none(), st.floats(0.0, 1.0)))
def test_just_enough_is_the_least_that_is_enough(
    running: UnderWay, come: Arrivals, share: float | None
) -> None:
    """`share`: of the time with all rows beside, what the arrivals can wait for; None: any time."""
    running = replace(running, separable=True)
    if share is not None:
        come = replace(come, slack_ms=share * (remaining_ms(running, MODEL) + prompts_ms(come, MODEL)))
    leaving = JustEnough().leaving(running, come, MODEL)

    def late(rows: int) -> bool:
        batch = replace(running.batch)
        for row in running.rows[:rows]:
            batch.remove(*row)
        left_ms = remaining_ms(running, MODEL, batch)
        for prompt in come.prompts:
            batch.add(*prompt)
        return left_ms + MODEL.predict(batch) > come.slack_ms

    if reached("rows leave", leaving):
        assert all(late(rows) for rows in range(leaving))
    if reached("rows stay", leaving < len(running.rows)):
        assert not late(leaving)


@given(iterations(), comings())
def test_comfort_never_keeps_a_row_that_a_promise_needs_to_leave(running: UnderWay, come: Arrivals) -> None:
    needed = AllOffline().leaving(running, come, MODEL)
    if reached("rows are to leave", needed):
        assert Promptly().leaving(running, come, MODEL) >= needed


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 24)), max_size=30))
def test_a_flag_says_what_was_said_last_to_each_iteration_in_flight(raised: list[tuple[int, int]]) -> None:
    said: dict[int, tuple[int, int]] = {}  # the word of an iteration's parity -> the last order in it
    with LeaveFlag.create() as flag:
        for iteration, rows in raised:
            flag.raise_for(iteration, rows)
            said[iteration % IN_FLIGHT] = (iteration, min(rows, ALL_ROWS))
            for other in (iteration - 1, iteration, iteration + 1):
                named, asked = said.get(other % IN_FLIGHT, (0, 0))
                expected = asked if named == other else 0
                assert flag.is_refused(other) == (expected == REFUSED)
                assert flag.rows_asked(other) == (0 if expected == REFUSED else expected)
