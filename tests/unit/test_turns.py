"""Turns of offline rows alone, where rows cannot leave an iteration that has online requests in it."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.turns import gained, mixed_gain, mixed_limit_ms, offline_turn_ms
from conserve.engine.policy.view import Candidate, Slo, View
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.model import TIMELESS
from tests.policy_views import MS_PER_TOKEN, decodes, view_of

ONLINE = [Candidate(f"live-{n}", 1, 100, True, 7, answered=True) for n in range(4)]
ROWS = [Candidate(f"row-{n}", 400, 0, blocks=0) for n in range(8)]
SLO = Slo(ttft_ms=1000.0, tbt_ms=200.0)
LIMIT_MS = 100.0


def apart(**changes: Any) -> View:
    """A view of an engine whose rows leave together or not at all."""
    given: dict[str, Any] = {"online": ONLINE, "offline": ROWS, "slo": SLO, "rows_leave": True, **changes}
    return view_of(**given)


def test_turns_alternate() -> None:
    plan = Conserve().plan(apart())
    assert plan.tokens
    assert not plan.tokens.keys() & {request.name for request in ONLINE}
    turn = Conserve().plan(apart(online_waited_ms=plan.predicted_ms))
    assert turn.tokens.keys() >= {request.name for request in ONLINE}
    assert turn.predicted_ms <= PATIENCE * SLO.ttft_ms, "an arrival waits for its end"
    assert plan.predicted_ms + turn.predicted_ms <= SLO.tbt_ms, "both fit between two tokens"


def test_the_gap_after_a_turn_is_kept_where_rows_cannot_leave_any_more() -> None:
    waited = apart(rows_leave=False, slo=Slo(ttft_ms=1000.0, tbt_ms=100.0), online_waited_ms=70.0)
    assert Conserve().plan(waited).predicted_ms <= 30.0


def test_rows_that_go_on_where_they_left_need_no_turns() -> None:
    plan = Conserve().plan(apart(rows_join=True))
    assert plan.tokens.keys() > {request.name for request in ONLINE}
    plan = Conserve().plan(apart(rows_leave=False))
    assert plan.tokens.keys() > {request.name for request in ONLINE}


@pytest.mark.parametrize(
    "changes",
    [
        {"online": []},
        {"online": [*ONLINE, Candidate("prompt", 50, 0)]},
        {"waiting_online": [Candidate("new", 50, 0)]},
        {"queued_online": 1},
        {"online_waited_ms": 5.0},
        {"rows_join": True},
        {"slo": Slo()},  # without a promise all go together
        {"slo": Slo(ttft_ms=1000.0, tbt_ms=200.0, harm=0.5)},  # a turn adds more than any harm
    ],
    ids=lambda changes: ",".join(changes),
)
def test_there_is_no_turn(changes: dict[str, Any]) -> None:
    assert offline_turn_ms(apart(), LIMIT_MS) == LIMIT_MS
    limit_ms = inf if "slo" in changes else LIMIT_MS
    assert offline_turn_ms(apart(**changes), limit_ms) == 0


def test_turns_are_for_rows_that_leave_together_however_much_they_would_gain() -> None:
    many = decodes(50, "live")  # 60 ms of each iteration, beside rows too
    assert offline_turn_ms(apart(online=many), LIMIT_MS) == LIMIT_MS
    for together in ({"rows_leave": False}, {"rows_join": True}):
        view = apart(online=many, **together)
        assert gained(view, LIMIT_MS, 60.0) > mixed_gain(view, LIMIT_MS, 60.0)
        assert offline_turn_ms(view, LIMIT_MS) == 0


def test_without_online_requests_rows_run_as_long_as_an_arrival_can_wait() -> None:
    alone = Conserve().plan(apart(online=[], prompt_tokens=100, arrivals_per_s=1.0))
    assert alone.limit_ms == pytest.approx(110), "`PATIENCE` is for iterations that cannot be left"


def test_a_turn_that_evicts_rows_leaves_the_view_as_it_was() -> None:
    growing = [Candidate(f"row-{n}", 1, 64, True, 4) for n in range(3)]
    view = apart(offline=growing, free_blocks=0)
    plan = Conserve().plan(view)
    assert plan.evicted == ["row-2"]
    assert [*plan.tokens] == ["row-0", "row-1"]
    assert Conserve().plan(view) == plan


def test_an_arrival_loses_little_to_an_iteration_that_cannot_be_left() -> None:
    patient = Slo(ttft_ms=10_000.0, tbt_ms=40.0)  # a turn would be short, and 200 ms may be waited for
    plan = Conserve().plan(apart(slo=patient))
    assert plan.tokens.keys() > {request.name for request in ONLINE}
    assert plan.predicted_ms <= 40.0
    assert mixed_limit_ms(apart(slo=patient), 1e6) == PATIENCE * patient.ttft_ms
    assert mixed_limit_ms(apart(slo=patient, rows_leave=False), 1e6) == 1e6
    hasty = Conserve().plan(apart(slo=Slo(ttft_ms=500.0, tbt_ms=40.0), online_waited_ms=1.0))
    assert hasty.tokens.keys() == {request.name for request in ONLINE}


def test_the_rows_of_a_turn_leave_time_for_the_online_requests() -> None:
    view = apart()
    online_ms = MS_PER_TOKEN.predict(Conserve().plan(replace(view, offline=[], online_waited_ms=1.0)).batch)
    assert offline_turn_ms(view, 1e6) == pytest.approx(SLO.tbt_ms - online_ms)


def test_the_online_requests_time_is_that_of_decode_steps() -> None:
    chunks = ConServeModel.of(1, 0, 0, 0, 0, 7.0, 0, 10)  # a chunk of a prompt takes 7 ms more
    assert offline_turn_ms(apart(model=chunks), 1e6) == SLO.tbt_ms - 14


def test_a_turn_is_no_longer_than_planned() -> None:
    """A row whose next token takes longer than a turn waits; no least progress is made beside online requests."""
    long = [Candidate("long", 1, 30_000, True, 2000)]
    view = apart(
        offline=long,
        slo=Slo(ttft_ms=1000.0, tbt_ms=60.0),
        model=ConServeModel.of(1, 0, 0.01, 0.01, 0, 0, 0, 10),
    )
    plan = Conserve().plan(view)
    assert plan.predicted_ms <= 60.0
    assert plan.tokens.keys() == {request.name for request in ONLINE}


def test_gains_are_shares_of_the_time() -> None:
    view = apart(online=decodes(1))
    for turn_ms in (0.0, -5.0, 5.0):  # the smallest iteration takes 11 ms
        assert gained(view, turn_ms, 10.0) == 0
    assert gained(view, inf, 10.0) == 1
    assert 0 < gained(view, 50.0, 10.0) < gained(view, 500.0, 10.0) < 1
    assert mixed_gain(replace(view, slo=Slo()), inf, 10.0) == 1
    assert mixed_gain(view, 1e6, 10.0) == pytest.approx(0.5)  # PATIENCE of a second is 20 ms
    assert mixed_gain(view, 5.0, 10.0) == mixed_gain(view, 0.0, 10.0) == 0


def test_gains_of_very_fast_and_of_unknown_iterations() -> None:
    fast = apart(model=ConServeModel.of(0.001, 0, 0, 0, 0, 0, 0, 0.1))
    assert gained(fast, 0.5, 0.5) == pytest.approx(0.4, rel=0.01)
    assert mixed_gain(fast, 0.5, 0.3) == pytest.approx(0.4)
    unknown = apart(model=TIMELESS)
    assert gained(unknown, 0.0, 0.0) == mixed_gain(unknown, 0.0, 0.0) == 0
