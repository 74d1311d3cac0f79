"""Rows that push: what they may fill, what is counted, and what the operator is told."""

from math import inf
from typing import Any

import pytest

from conserve.cli import serve_notices, server_status
from conserve.engine.policy import conserve as policy
from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.offline import OVERTAKE_MS
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.plan_faults import fault_of
from conserve.engine.policy.recorded import VERSION, VERSION_OF_PUSHING, line_of, recorded, version_of
from conserve.engine.policy.view import Candidate, Image, Slo
from conserve.engine.runtime.pushing import Pushing
from conserve.engine.section import EngineSection
from tests.policy_views import decodes, plan_of, view_of
from tests.server_reports import report

TBT = Slo(tbt_ms=100.0)  # 90 tokens of 1 ms each beside the constant 10 ms
LIVE = decodes(1, "live")
LEAST_GAIN = policy.LEAST_GAIN


@pytest.fixture(autouse=True)
def any_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows push however little they gain, which has a test of its own."""
    monkeypatch.setattr(policy, "LEAST_GAIN", 0.0)


def test_a_prompt_cut_at_the_usual_limit_goes_on() -> None:
    rows = [Candidate("other", 50, 0), Candidate("urgent", 500, 0), Candidate("later", 500, 0)]
    view = view_of(online=LIVE, offline=rows, slo=TBT, pushed={"urgent"}, push_scale=1.5)
    plan = Conserve().plan(view)
    assert plan.tokens == {"live0": 1, "other": 50, "urgent": 39 + 50}
    assert (plan.pushed, plan.predicted_ms, plan.limit_ms) == ({"urgent": 50}, 150.0, 150.0)


def test_an_urgent_row_passes_one_that_waits_for_the_usual_limit() -> None:
    waiting = [Candidate("other", 500, 0), Candidate("urgent", 20, 0)]
    view = view_of(online=LIVE, waiting_offline=waiting, slo=TBT, pushed={"urgent"}, push_scale=1.5)
    plan = Conserve().plan(view)
    assert plan.tokens == {"live0": 1, "other": 89, "urgent": 20}
    assert list(plan.admitted) == ["other", "urgent"]


@pytest.mark.parametrize(("blocks", "pushed"), [(9, {}), (10, {"urgent": 50})])
def test_an_urgent_prompt_behind_one_that_was_cut_goes_on(blocks: int, pushed: dict[str, int]) -> None:
    rows = [Candidate("other", 500, 0), Candidate("urgent", 500, 0)]
    view = view_of(online=LIVE, offline=rows, slo=TBT, free_blocks=blocks, pushed={"urgent"}, push_scale=1.5)
    plan = Conserve().plan(view)
    assert (plan.tokens["other"], plan.pushed) == (89, pushed)


@pytest.mark.parametrize("room", [{}, {"free_blocks": 9, "reserved_blocks": 2}, {"free_slots": 0}])
def test_an_urgent_row_begins_where_there_is_room_beside_what_arrivals_will_want(
    room: dict[str, int],
) -> None:
    view = view_of(
        **{"online": LIVE, "offline": [Candidate("other", 500, 0)], "slo": TBT, **room},
        waiting_offline=[Candidate("urgent", 20, 0)],
        pushed={"urgent"},
        push_scale=1.5,
    )
    plan = Conserve().plan(view)
    assert list(plan.admitted) == ([] if room else ["urgent"])


@pytest.mark.parametrize(("blocks", "tokens"), [(6, 89), (7, 104)])
def test_a_prompt_goes_on_as_far_as_kv_blocks_are_free(blocks: int, tokens: int) -> None:
    rows = [Candidate("urgent", 104, 0)]
    view = view_of(online=LIVE, offline=rows, slo=TBT, free_blocks=blocks, pushed={"urgent"}, push_scale=1.5)
    assert Conserve().plan(view).tokens["urgent"] == tokens


def pushed(names: set[str], **changes: Any) -> Plan:
    """ConServe's plan where these rows push up to 150 ms, beside a live request that decodes."""
    return plan_of(**{"online": LIVE, "slo": TBT, **changes}, pushed=names, push_scale=1.5)


def test_urgent_decode_steps_for_which_time_ran_out_get_their_token() -> None:
    plan = pushed({"row3", "row94"}, offline=decodes(96, "row"))
    assert plan.tokens.keys() == {"live0", *(f"row{n}" for n in range(89)), "row94"}
    assert plan.pushed == {"row94": 1}


def test_an_urgent_row_that_was_admitted_goes_on_and_running_ones_go_before_it() -> None:
    waiting = [Candidate("urgent", 500, 0)]
    plan = pushed({"urgent"}, waiting_offline=waiting)
    assert (plan.tokens, plan.pushed) == ({"live0": 1, "urgent": 139}, {"urgent": 50})
    assert plan.admitted == ["urgent"]
    running = [Candidate("first", 20, 0), Candidate("cut", 500, 0), Candidate("third", 30, 0)]
    plan = pushed({"urgent", "third"}, offline=running, waiting_offline=waiting)
    assert plan.pushed == {"third": 30, "urgent": 20}


def test_each_urgent_row_goes_on_as_long_as_time_is_left() -> None:
    running = [Candidate("other", 500, 0), Candidate("one", 20, 0), Candidate("two", 20, 0)]
    plan = pushed({"one", "two", "three"}, offline=running, waiting_offline=[Candidate("three", 20, 0)])
    assert plan.pushed == {"one": 20, "two": 20, "three": 10}


@pytest.mark.parametrize("place", ["offline", "waiting_offline"])
def test_an_urgent_row_that_has_all_its_tokens_gets_none_twice(place: str) -> None:
    plan = pushed({"urgent"}, **{place: [Candidate("urgent", 20, 0), Candidate("other", 500, 0)]})
    assert (plan.tokens, plan.pushed) == ({"live0": 1, "urgent": 20, "other": 69}, {})
    assert (plan.predicted_ms, plan.limit_ms) == (100.0, 100.0)


def test_an_urgent_row_that_is_evicted_in_the_plan_stays_evicted() -> None:
    running = [Candidate("grows", 1, 16, True, 1), Candidate("urgent", 20, 28, blocks=3)]
    plan = pushed({"urgent"}, offline=running, free_blocks=0)
    assert (plan.tokens, plan.evicted) == ({"live0": 1, "grows": 1}, ["urgent"])
    running = [Candidate("first", 48, 0), Candidate("urgent", 20, 28, blocks=3)]
    plan = pushed({"urgent"}, offline=running, free_blocks=0)
    assert (plan.tokens, plan.evicted) == ({"live0": 1, "first": 48}, ["urgent"])


def test_an_urgent_row_is_not_computed_anew_while_its_kv_is_in_host_memory() -> None:
    waiting = [Candidate("urgent", 20, 0, restorable=19)]
    assert pushed({"urgent"}, waiting_offline=waiting).restored == ["urgent"]
    plan = pushed({"urgent"}, waiting_offline=waiting, unwritten_blocks=1000)
    assert (plan.tokens, plan.restored, plan.admitted) == ({"live0": 1}, [], [])


def test_no_row_is_restored_for_a_push() -> None:
    waiting = [Candidate("other", 500, 0), Candidate("urgent", 20, 0, restorable=19)]
    plan = pushed({"urgent"}, waiting_offline=waiting)
    assert (plan.tokens, plan.restored) == ({"live0": 1, "other": 89}, [])


@pytest.mark.parametrize(("others", "admitted"), [(31, ["other0", "urgent"]), (32, ["other0"])])
def test_urgent_rows_are_looked_for_among_the_first_that_wait(others: int, admitted: list[str]) -> None:
    waiting = [*(Candidate(f"other{n}", 500, 0) for n in range(others)), Candidate("urgent", 20, 0)]
    assert pushed({"urgent"}, waiting_offline=waiting).admitted == admitted


def test_an_iteration_of_a_live_prompt_is_as_long_as_ever() -> None:
    prompt = Candidate("prompt", 20, 0)
    view = view_of(
        online=[*LIVE, prompt],
        offline=[Candidate("urgent", 500, 0)],
        slo=TBT,
        pushed={"urgent"},
        push_scale=3.0,
    )
    plan = Conserve().plan(view)
    assert (plan.predicted_ms, plan.pushed) == (100.0, {})


@pytest.mark.parametrize(
    ("tbt_ms", "expected"), [(47.0, {"urgent": 23}), (48.0, {}), (11.0, {"urgent": 5}), (7.0, {})]
)
def test_live_requests_wait_for_no_push_that_gains_rows_less_than_a_tenth(
    tbt_ms: float, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LEAST_GAIN", LEAST_GAIN)
    assert (
        pushed({"urgent"}, offline=[Candidate("urgent", 500, 0)], slo=Slo(tbt_ms=tbt_ms)).pushed == expected
    )


def test_a_limit_of_nothing_has_no_share_that_a_push_could_fall_short_of() -> None:
    assert policy.worth_ms(0.0, 20.0, 15.0) == 20.0
    assert policy.worth_ms(10.0, 10.0, 10.0) == 0.0, "it leaves rows no time"
    assert policy.worth_ms(50.0, 45.0, 10.0) == 0.0, "it is shorter"
    assert policy.worth_ms(inf, 50.0, 10.0) == 0.0


def test_urgent_rows_push_in_a_turn_of_rows_alone() -> None:
    """Rows cannot leave an iteration beside live requests here, so these wait for one of rows alone."""
    live = [Candidate("live", 1, 100, True, 7, answered=True)]
    rows = [Candidate("other", 4000, 0), Candidate("urgent", 4000, 0)]
    slo = Slo(ttft_ms=1000.0, tbt_ms=200.0)
    engine = {"online": live, "offline": rows, "slo": slo, "rows_leave": True, "max_tokens": 9000}
    usual, longer = plan_of(**engine), plan_of(**engine, pushed={"urgent"}, push_scale=1.5)
    assert usual.tokens.keys() == {"other"}
    assert longer.tokens["other"] == usual.tokens["other"]
    assert longer.pushed == {"urgent": longer.tokens["urgent"]}
    assert longer.predicted_ms == pytest.approx(1.5 * usual.predicted_ms, abs=1.0)


def test_an_image_has_to_fit_into_a_turn_since_live_requests_wait_for_its_end() -> None:
    live = [Candidate("live", 1, 100, True, 7, answered=True)]
    seeing = Candidate("seeing", 400, 0, images=(Image(20, 1000.0),))
    engine = {"online": live, "slo": Slo(ttft_ms=1000.0, tbt_ms=200.0), "rows_leave": True}
    assert plan_of(**engine, offline=[seeing]).tokens == {"seeing": 20}


def test_what_a_push_gains_is_of_the_time_that_live_requests_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LEAST_GAIN", LEAST_GAIN)
    rows = [Candidate("urgent", 500, 0)]
    assert pushed({"urgent"}, online=decodes(50, "live"), offline=rows).pushed == {"urgent": 50}


def test_under_a_harm_rows_push_by_as_many_times_the_whole_iteration() -> None:
    """Ten live decode steps take 20 ms, half of which rows add, and a half of the 30 ms when they push."""
    rows = [Candidate("other", 500, 0), Candidate("urgent", 500, 0)]
    plan = pushed({"urgent"}, online=decodes(10, "live"), offline=rows, slo=Slo(harm=0.5))
    assert (plan.tokens["other"], plan.pushed) == (10, {"urgent": 15})


def test_without_live_requests_rows_push_beyond_what_an_arrival_may_wait_for() -> None:
    rows = [Candidate("other", 4000, 0), Candidate("urgent", 4000, 0)]
    engine = {"offline": rows, "slo": Slo(harm=0.5), "prompt_tokens": 190, "max_tokens": 9000}
    usual, longer = plan_of(**engine), plan_of(**engine, pushed={"urgent"}, push_scale=1.5)
    assert usual.predicted_ms == 100.0, "half of the 200 ms of a typical prompt"
    assert (longer.predicted_ms, longer.pushed) == (150.0, {"urgent": 50})


def test_an_urgent_row_waits_until_its_lora_adapter_fits() -> None:
    waiting = [Candidate("other", 500, 0), Candidate("urgent", 20, 0)]
    queue: dict[str, Any] = {"waiting_offline": waiting, "most_adapters": 1}
    assert pushed({"urgent"}, **queue, adapters={"live0": 1, "urgent": 1}).pushed == {"urgent": 20}
    assert pushed({"urgent"}, **queue, adapters={"live0": 1, "urgent": 2}).pushed == {}
    queue["waiting_offline"] = [*waiting, Candidate("plain", 20, 0)]
    plan = pushed({"urgent", "plain"}, **queue, adapters={"live0": 1, "urgent": 2})
    assert plan.pushed == {"plain": 20}, "which does not wait for it"


@pytest.mark.parametrize(("waited_ms", "urgent"), [(OVERTAKE_MS, {"urgent": 20}), (OVERTAKE_MS + 1, {})])
def test_urgent_rows_overtake_one_whose_adapter_is_one_too_many_for_a_while(
    waited_ms: float, urgent: dict[str, int]
) -> None:
    waits = Candidate("waits", 20, 0, age_ms=waited_ms)
    waiting = [Candidate("other", 500, 0), waits, Candidate("urgent", 20, 0)]
    adapters = {"row": 1, "waits": 2, "urgent": 1}
    queue: dict[str, Any] = {"waiting_offline": waiting, "most_adapters": 1, "adapters": adapters}
    assert pushed({"urgent"}, **queue, offline=[Candidate("row", 1, 10, decode=True)]).pushed == urgent


def test_rows_that_left_the_iteration_are_not_counted() -> None:
    pushing = Pushing(largest_scale=1.5, rows={"a", "b"})
    pushing.computed({"a": 30, "b": 12}, but=frozenset({"a"}))
    assert pushing.report() == {"largest_slo_scale": 1.5, "slo_scale": 1.5, "rows": 2, "tokens": 12}


def test_rows_push_where_a_scale_is_stated_and_the_scale_ends_with_them() -> None:
    assert Pushing(rows={"a"}).urgent == frozenset()
    pushing = Pushing(largest_scale=1.5, rows={"a"})
    assert (pushing.urgent, pushing.scale) == ({"a"}, 1.5)
    pushing.rows.clear()
    assert pushing.scale == 1.0


def test_a_view_with_a_push_is_recorded_as_an_earlier_version_could_not_plan_it() -> None:
    view = view_of(online=LIVE, offline=[Candidate("urgent", 500, 0)], slo=TBT, push_scale=1.5)
    pushed = view_of(
        online=LIVE, offline=[Candidate("urgent", 500, 0)], slo=TBT, pushed={"urgent", "gone"}, push_scale=1.5
    )
    assert (version_of(view), version_of(pushed)) == (VERSION, VERSION_OF_PUSHING)
    plan = Conserve().plan(pushed)
    again = recorded(line_of(pushed, plan, policy="conserve", at=0.0))
    assert again.plan == plan == Conserve().plan(again.view)
    assert again.view.pushed == {"urgent"}


def test_status_says_what_was_pushed() -> None:
    (line,) = server_status.pushed(report(pushing={"largest_slo_scale": 1.5, "tokens": 4100}).pushing)
    assert line == "  push     0 rows up to x1.5 of what is promised, 4,100 tokens beyond it since the start"
    assert server_status.pushed(report(pushing={"tokens": 4100}).pushing) == []


@pytest.mark.parametrize(
    ("scale", "policy", "says"),
    [
        (1.5, "conserve", "fill iterations up to x1.5"),
        (1.0, "conserve", "push nothing"),
        (1.5, "priority", "push nothing"),
    ],
)
def test_serve_says_what_a_push_may_do(scale: float, policy: str, says: str) -> None:
    (sentence,) = serve_notices.pushed(EngineSection(policy=policy, push_slo_scale=scale))
    assert says in sentence
    assert serve_notices.pushed(EngineSection(policy=policy)) == []


def test_a_plan_that_pushes_more_than_it_computes_is_at_fault() -> None:
    view = view_of(offline=[Candidate("row", 5, 0)])
    plan = Conserve().plan(view)
    assert fault_of(plan, view) is None
    whole = Plan(tokens=plan.tokens, batch=plan.batch, predicted_ms=plan.predicted_ms, pushed={"row": 5})
    assert fault_of(whole, view) is None
    wrong: Any
    for wrong in ({"row": 6}, {"row": 2.5}, {"gone": 1}, ["row"]):
        pushing = Plan(tokens=plan.tokens, batch=plan.batch, predicted_ms=plan.predicted_ms, pushed=wrong)
        assert fault_of(pushing, view) == "it pushes what it does not compute"
