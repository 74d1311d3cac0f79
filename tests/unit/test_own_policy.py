"""A policy of the user's own: found by its path, followed where the engine can, replaced where it cannot."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from conserve.cli.serve_flags import require_policy
from conserve.engine.policy import own_class
from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.hygen import HyGen
from conserve.engine.policy.own import CheckedPolicy, own_policy
from conserve.engine.policy.own_waits import MOST_PLANS
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.plan_faults import fault_of
from conserve.engine.policy.policies import BENCHED, COMPARED, POLICIES, named, traits
from conserve.engine.policy.refusals import KINDS, refusals_of
from conserve.engine.policy.view import Candidate, Lazy, ReadOnly, Slo, View
from conserve.errors import SettingsError
from conserve.names import CONSERVE
from conserve.profiles.batch import Batch, Slice
from tests.policy_views import decodes, view_of

EXAMPLES = Path(__file__).parents[2] / "examples"
LIVE = Candidate("live", 1, 20, True, 2)
ROW = Candidate("row", 1, 20, True, 2)
PROMPT = Candidate("prompt", 100, 0)
BACK = Candidate("back", 100, 0, restorable=99)
GONE = Candidate("gone", 1, 0)
BUSY = view_of(online=[LIVE], offline=[ROW], waiting_online=[PROMPT], waiting_offline=[BACK])


def plan_of(*requests: tuple[Candidate, int], **changes: Any) -> Plan:
    """Plan these tokens, with the batch that belongs to them."""
    batch = Batch.of(Slice(tokens, request.context, request.decode) for request, tokens in requests)
    return Plan(
        **{"tokens": {request.name: tokens for request, tokens in requests}, "batch": batch, **changes}
    )


GOOD = plan_of((LIVE, 1), (ROW, 1), (PROMPT, 100), admitted=["prompt"], restored=["back"], predicted_ms=9.0)


def test_a_plan_without_faults() -> None:
    assert fault_of(GOOD, BUSY) is None
    assert fault_of(plan_of((LIVE, 1), evicted=["row"]), BUSY) is None
    parks = replace(BUSY, parks=True)
    assert fault_of(plan_of((LIVE, 1), parked=["row"]), parks) is None
    assert fault_of(plan_of((LIVE, 1), parked=["row"]), BUSY) == "rows cannot be parked on this engine"
    full = replace(parks, free_slots=0)
    starts = plan_of((LIVE, 1), (PROMPT, 100), admitted=["prompt"])
    assert "0 slots are free" in str(fault_of(starts, full))
    assert fault_of(replace(starts, parked=["row"]), full) is None
    assert "parks live, which is no offline request that runs" in str(
        fault_of(plan_of((ROW, 1), parked=["live"]), parks)
    )
    assert "names row twice" in str(fault_of(plan_of((LIVE, 1), parked=["row"], evicted=["row"]), parks))
    assert fault_of(plan_of((PROMPT, 60), admitted=["prompt"]), view_of(waiting_online=[PROMPT])) is None
    assert fault_of(plan_of(), view_of(offline=[ROW])) is None, "rows may be held"


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ({"live": 1}, "it is no Plan but of type dict"),
        (plan_of((LIVE, 1), (GONE, 1)), "it computes gone, which does not run and is not admitted"),
        (plan_of((LIVE, 1), (PROMPT, 9)), "it computes prompt, which does not run and is not admitted"),
        (plan_of((LIVE, 1), admitted=["prompt"]), "it admits prompt without tokens"),
        (plan_of((LIVE, 1), admitted=["live"]), "it starts live, which does not wait"),
        (plan_of((LIVE, 1), restored=["gone"]), "it starts gone, which does not wait"),
        (plan_of((LIVE, 1), restored=["prompt"]), "it restores prompt, of which host memory has nothing"),
        (plan_of((LIVE, 1), restored=["back", "back"]), "it names back twice"),
        (plan_of((LIVE, 1), (PROMPT, 9), admitted=["prompt", "prompt"]), "it names prompt twice"),
        (plan_of((LIVE, 1), (ROW, 1), evicted=["row"]), "it names row twice"),
        (plan_of((ROW, 1), evicted=["live"]), "it evicts live, which is no offline request with KV blocks"),
        (plan_of((LIVE, 1), evicted=["back"]), "it evicts back, which is no offline request with KV blocks"),
        (plan_of((LIVE, 2)), "it gives live 2 tokens, and 1 to 1 can be computed"),
        (plan_of((LIVE, 0)), "it gives live 0 tokens, and 1 to 1 can be computed"),
        (plan_of((LIVE, 1.0)), "it gives live 1.0 tokens, and 1 to 1 can be computed"),  # type: ignore[arg-type]
        (plan_of((LIVE, True)), "it gives live True tokens, and 1 to 1 can be computed"),
        (plan_of((LIVE, 1), limit_ms="100"), "its limit_ms is '100'"),
        (plan_of((LIVE, 1), evicted=iter(["row"])), "its lists of requests can be read once only"),
        (plan_of((LIVE, 1), batch=Batch()), "its batch does not say what its tokens say"),
        (plan_of((LIVE, 1), predicted_ms=nan), "it predicts nan ms"),
        (plan_of((LIVE, 1), predicted_ms=-1.0), "it predicts -1.0 ms"),
        (plan_of((LIVE, 1), online_ms=nan), "it predicts nan ms for live requests"),
        (plan_of((LIVE, 1), online_ms=-1.0), "it predicts -1.0 ms for live requests"),
        (plan_of(), "it computes nothing while live requests run"),
    ],
)  # fmt: skip
def test_a_plan_with_a_fault(plan: Plan, fault: str) -> None:
    assert fault_of(plan, BUSY) == fault


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"max_tokens": 102}, "it has 103 tokens, and an iteration takes 102"),
        ({"free_slots": 1}, "it starts 2 requests, and 1 slots are free"),
        ({"free_blocks": 13}, "it takes 14 KV blocks, and 13 are free"),
    ],
)
def test_a_plan_without_room(changes: dict[str, Any], fault: str) -> None:
    assert fault_of(GOOD, replace(BUSY, **changes)) == fault
    enough = {name: value + 1 for name, value in changes.items()}
    assert fault_of(GOOD, replace(BUSY, **enough)) is None


def test_no_more_adapters_run_than_can_be_computed_whoever_has_tokens() -> None:
    """vLLM ends where a later plan computes the row beside the prompt."""
    one = {"adapters": {"row": 1, "prompt": 2}, "most_adapters": 1, "parks": True}
    view = replace(BUSY, **one)
    beside = plan_of((LIVE, 1), (PROMPT, 50), admitted=["prompt"])
    assert fault_of(beside, view) == "it runs 2 LoRA adapters at once, and 1 can"
    for gone in ("evicted", "parked"):
        assert fault_of(replace(beside, **{gone: ["row"]}), view) is None
    for fits in ({"most_adapters": 2}, {"adapters": {"row": 1, "prompt": 1}}, {"adapters": {"row": 1}}):
        assert fault_of(beside, replace(view, **fits)) is None
    resting = replace(view, adapters={"prompt": 2}, resting_adapters=[1])
    assert fault_of(beside, resting) == "it runs 2 LoRA adapters at once, and 1 can"
    assert fault_of(plan_of((LIVE, 1)), view) is None


def test_a_prompt_that_begins_takes_blocks_for_all_of_it_and_one_that_runs_for_its_tokens() -> None:
    begins = plan_of((PROMPT, 20), admitted=["prompt"])
    assert fault_of(begins, view_of(waiting_offline=[PROMPT], free_blocks=7)) is None
    assert (
        fault_of(begins, view_of(waiting_offline=[PROMPT], free_blocks=6))
        == "it takes 7 KV blocks, and 6 are free"
    )
    goes_on = plan_of((PROMPT, 20))
    assert fault_of(goes_on, view_of(offline=[PROMPT], free_blocks=2)) is None
    assert (
        fault_of(goes_on, view_of(offline=[PROMPT], free_blocks=1)) == "it takes 2 KV blocks, and 1 are free"
    )


def test_evicted_rows_make_room() -> None:
    evicting = plan_of((LIVE, 1), (PROMPT, 100), admitted=["prompt"], evicted=["row"])
    assert fault_of(evicting, replace(BUSY, free_slots=0, free_blocks=5)) is None
    assert (
        fault_of(evicting, replace(BUSY, free_slots=0, free_blocks=4))
        == "it takes 7 KV blocks, and 6 are free"
    )
    kept = plan_of((LIVE, 1), (PROMPT, 100), admitted=["prompt"])
    held = replace(BUSY, waiting_with_blocks=[BACK._replace(blocks=3)], free_blocks=4)
    assert fault_of(replace(kept, evicted=["back"]), held) is None
    assert fault_of(replace(kept, evicted=["back"]), replace(held, free_slots=0)) is not None, (
        "it has no slot"
    )


def test_live_requests_that_run_may_outgrow_the_memory() -> None:
    """vLLM evicts for them."""
    growing = LIVE._replace(context=32)
    assert fault_of(plan_of((growing, 1)), view_of(online=[growing], free_blocks=0)) is None
    assert fault_of(plan_of((growing, 1)), view_of(offline=[growing], free_blocks=0)) is not None


def test_a_list_of_the_engines_is_read_as_it_is_now_and_cannot_be_changed() -> None:
    engines = [LIVE, ROW]
    seen = ReadOnly(engines)
    assert ([*seen], len(seen), seen[1], seen[:1]) == ([LIVE, ROW], 2, ROW, [LIVE])
    assert seen == ReadOnly((LIVE, ROW))
    assert seen != ReadOnly([ROW, LIVE])
    assert seen != engines, "as a tuple is no list"
    assert not hasattr(seen, "append")
    assert not hasattr(seen, "__setitem__")
    engines.append(GONE)
    assert seen[-1] == GONE


def unread() -> Iterator[Candidate]:
    """A queue that nothing may read."""
    raise AssertionError("it was read")
    yield


def test_queues_are_read_as_far_as_the_plan_names_them() -> None:
    def endless() -> Any:
        yield PROMPT
        raise AssertionError("it was read on")

    plan = plan_of((PROMPT, 5), admitted=["prompt"])
    assert fault_of(plan, view_of(waiting_online=endless())) is None
    assert fault_of(plan, view_of(waiting_online=[PROMPT], waiting_offline=unread())) is None


def test_a_plan_may_pass_over_requests_that_wait() -> None:
    later = plan_of((PROMPT, 5), admitted=["prompt"])
    assert fault_of(later, view_of(waiting_offline=[GONE, BACK, PROMPT])) is None


class Planning:
    """A user's policy that gives the same plan always."""

    def __init__(self, plan: Callable[[View], Any]) -> None:
        self.plan = plan


def test_the_built_in_policy_plans_where_a_plan_is_refused() -> None:
    said: list[str] = []
    wrong = plan_of((LIVE, 2))
    policy = CheckedPolicy("mine.Policy", Planning(lambda view: wrong), Conserve(), said.append)
    for _ in range(3):
        assert policy.plan(BUSY) == Conserve().plan(BUSY)
    fault = "it gives live 2 tokens, and 1 to 1 can be computed"
    assert said == [f"a plan of mine.Policy is refused ({fault}); Conserve plans instead"]
    assert (policy.refused.count, policy.refused.reasons) == (3, [fault])


def test_a_policy_that_fails_is_replaced_too_and_does_not_fill_the_log() -> None:
    said: list[str] = []
    count = iter(range(300))

    def failing(view: View) -> Plan:
        number = next(count)
        raise type(f"Kind{number % 100}", (Exception,), {})(number)

    policy = CheckedPolicy("mine.Policy", Planning(failing), Conserve(), said.append)
    for _ in range(300):
        assert policy.plan(BUSY) is not None
    assert (policy.refused.count, len(said), len(policy.refused.reasons)) == (300, KINDS, KINDS)
    assert "(it failed with Kind0: 0)" in said[0]


def unsaid(sentence: str) -> None: ...


def emptied(things: Any) -> None:
    things.clear()


def overwritten(things: Any) -> None:
    things["live"] = "bulk"


@pytest.mark.parametrize(
    "field", ["online", "offline", "waiting_online", "waiting_offline", "waiting_with_blocks"]
)
def test_a_policy_cannot_hide_requests_from_the_one_that_plans_instead(field: str) -> None:
    policy = CheckedPolicy(
        "mine.Policy", Planning(lambda view: emptied(getattr(view, field))), Conserve(), unsaid
    )
    held = BACK._replace(name="held", blocks=3)
    view = view_of(
        online=[LIVE],
        offline=[ROW],
        waiting_online=[PROMPT],
        waiting_offline=[BACK],
        waiting_with_blocks=[held],
    )
    expected = Conserve().plan(view)
    assert policy.plan(view) == expected
    assert "failed with AttributeError" in policy.refused.reasons[0]
    assert [one.name for one in getattr(view, field)]


@pytest.mark.parametrize("field", ["slos", "classes", "served"])
def test_a_policy_cannot_change_what_the_engine_keeps_of_classes(field: str) -> None:
    engines_own: dict[str, Any] = {"live": {"slos": Slo(), "classes": "chat", "served": 1.0}[field]}
    view = view_of(online=[LIVE], **{field: engines_own})
    for change in (emptied, overwritten):
        policy = CheckedPolicy(
            "mine.Policy", Planning(lambda view, do=change: do(getattr(view, field))), Paced(), unsaid
        )
        policy.plan(view)
        assert policy.refused.count == 1
    assert len(engines_own) == 1
    engines_own["later"] = engines_own["live"]
    assert "later" in getattr(view, field), "nothing is copied"


def followed(
    theirs: Callable[[View], Any], view: View, plans: int = 12, instead: Any = None
) -> tuple[list[bool], CheckedPolicy]:
    """Plan so often; True where the user's plan was followed."""
    policy = CheckedPolicy("mine.Policy", Planning(theirs), instead or Conserve(), unsaid)
    known = []
    for _ in range(plans):
        before = policy.refused.count
        policy.plan(view)
        known.append(policy.refused.count == before)
    return known, policy


ROWS_ALONE = plan_of((ROW, 1))
NEXT, LAST = PROMPT._replace(name="next"), PROMPT._replace(name="last")


@pytest.mark.parametrize(
    ("plan", "view"),
    [
        (ROWS_ALONE, view_of(online=[LIVE], offline=[ROW])),
        (ROWS_ALONE, view_of(online=[PROMPT], offline=[ROW])),
        (ROWS_ALONE, view_of(waiting_online=[PROMPT], offline=[ROW])),
        (plan_of(), view_of(waiting_online=[PROMPT])),
        (plan_of((LIVE, 1)), view_of(online=[LIVE, LIVE._replace(name="other")])),
        (plan_of((LIVE, 1)), view_of(online=[LIVE], waiting_online=[PROMPT])),
        (plan_of((NEXT, 9), (ROW, 1), admitted=["next"]), view_of(waiting_online=[PROMPT, NEXT], offline=[ROW])),
        (
            plan_of((NEXT, 9), (GONE, 1), admitted=["next", "gone"]),
            view_of(waiting_online=[PROMPT, NEXT], waiting_offline=[GONE]),
        ),
        (plan_of((NEXT, 9), admitted=["next"]), view_of(online=[LIVE], waiting_online=[NEXT])),
        (plan_of((LIVE, 1)), view_of(online=[LIVE, PROMPT])),
    ],
)  # fmt: skip
def test_no_live_request_is_left_out_of_more_plans_than_a_few(plan: Plan, view: View) -> None:
    known, policy = followed(lambda view: plan, view)
    assert known == [*[True] * MOST_PLANS, False] * 2 + [True] * 2
    (reason,) = policy.refused.reasons
    assert reason.startswith("it leaves the live request ")


def test_no_live_request_is_left_out_for_longer_than_its_promise() -> None:
    view = view_of(online=[LIVE], offline=[ROW], slo=Slo(tbt_ms=25.0))  # one of 11 ms after the other
    assert followed(lambda view: ROWS_ALONE, view)[0] == [True, True, False] * 4
    assert (
        followed(lambda view: ROWS_ALONE, replace(view, slo=Slo(tbt_ms=22.0)))[0] == [True, True, False] * 4
    )
    late = PROMPT._replace(age_ms=101.0)
    for slo, known in ((Slo(ttft_ms=100.0), [False] * 4), (Slo(ttft_ms=101.0), [True] * 4)):
        view = view_of(waiting_online=[late], offline=[ROW], slo=slo)
        assert followed(lambda view: ROWS_ALONE, view, 4)[0] == known


@pytest.mark.parametrize(
    ("plan", "view"),
    [
        (plan_of((NEXT, 100), admitted=["next"]), view_of(waiting_online=[PROMPT, NEXT], offline=[ROW])),
        (plan_of((NEXT, 9), (LAST, 9), admitted=["next", "last"]), view_of(waiting_online=[PROMPT, NEXT, LAST])),
        (plan_of((NEXT, 9)), view_of(online=[PROMPT, NEXT], waiting_online=[BACK])),
        (ROWS_ALONE, view_of(waiting_online=[PROMPT], offline=[ROW], free_blocks=0)),  # nor would Conserve's
    ],
)  # fmt: skip
def test_the_order_among_live_prompts_is_the_policys_own(plan: Plan, view: View) -> None:
    known, policy = followed(lambda view: plan, view)
    assert all(known), policy.refused.reasons


@pytest.mark.parametrize(
    "plan",
    [
        plan_of((ROW, 1), (PROMPT, 9), admitted=["prompt"]),
        plan_of((ROW, 1), restored=["prompt"]),
    ],
)
def test_requests_behind_one_that_begins_are_not_left_out(plan: Plan) -> None:
    waiting = [PROMPT._replace(restorable=9), NEXT]
    view = view_of(waiting_online=waiting, offline=[ROW])
    known, policy = followed(lambda view: plan, view, instead=Planning(lambda view: None))
    assert all(known), policy.refused.reasons


def read_up_to(*waiting: Candidate) -> Lazy[Candidate]:
    """A queue of which no more may be read."""
    return Lazy(chain(waiting, unread()))


@pytest.mark.parametrize(
    ("plan", "view"),
    [
        (ROWS_ALONE, view_of(online=[PROMPT], offline=[ROW], waiting_online=read_up_to(NEXT))),
        (plan_of((NEXT, 9)), view_of(online=[PROMPT, NEXT], waiting_online=read_up_to(LAST))),
        (plan_of((NEXT, 9), admitted=["next"]), view_of(waiting_online=read_up_to(PROMPT, NEXT))),
    ],
)
def test_the_look_for_requests_that_are_left_out_reads_the_queue_as_far_as_needed(
    plan: Plan, view: View
) -> None:
    assert (
        CheckedPolicy("mine.Policy", Planning(lambda view: plan), Conserve(), pytest.fail).plan(view) is plan
    )


def test_vllm_plans_where_the_other_policy_leaves_that_to_it() -> None:
    view = view_of(online=[LIVE], offline=[ROW])
    known, policy = followed(lambda view: ROWS_ALONE, view, 6, instead=Planning(lambda view: None))
    assert known == [*[True] * MOST_PLANS, False, True]
    assert policy.refused.reasons == ["it leaves the live request live out for too long"]


def test_turns_of_rows_are_no_fault() -> None:
    """Live requests wait for one iteration of rows alone at a time, where rows leave it as a whole only."""
    long = [Candidate(f"row{n}", 400, 0) for n in range(20)]
    live = decodes(20, "live")
    view = view_of(online=live, waiting_offline=long, slo=Slo(tbt_ms=300.0, ttft_ms=900.0), rows_leave=True)
    policy, turns = CheckedPolicy("mine.Policy", Conserve(), Conserve(), pytest.fail), 0
    for _ in range(50):
        plan = policy.plan(view)
        assert plan is not None
        waited = "live0" not in plan.tokens
        turns += waited
        view = replace(view, online_waited_ms=plan.predicted_ms if waited else 0.0)
    assert turns == 25
    assert not policy.refused.count


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raising(error: BaseException) -> Callable[[View], Any]:
    def plan(view: View) -> Any:
        raise error

    return plan


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit("over"), "GeneratorExit: over"),
        (Wordless(), "Wordless, which has no words"),
    ],
)
def test_nothing_that_a_policy_raises_ends_the_engine(error: BaseException, told: str) -> None:
    policy = CheckedPolicy("mine.Policy", Planning(raising(error)), Conserve(), unsaid)
    assert policy.plan(BUSY) == Conserve().plan(BUSY)
    assert policy.refused.reasons == [f"it failed with {told}"]


def test_an_interrupt_ends_a_command_but_no_engine_whose_signals_are_its_own() -> None:
    policy = CheckedPolicy("mine.Policy", Planning(raising(KeyboardInterrupt())), Conserve(), unsaid)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            policy.plan(BUSY)
        with ThreadPoolExecutor(1) as thread:  # an engine's, which signals do not reach
            assert thread.submit(policy.plan, BUSY).result() is not None
        signal.signal(signal.SIGINT, lambda number, frame: None)
        assert policy.plan(BUSY) is not None
    finally:
        signal.signal(signal.SIGINT, before)
    assert policy.refused.count == 2


def test_an_interrupt_while_a_policy_is_made_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planning, "__init__", raising(KeyboardInterrupt()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            own_policy(f"{__name__}.Planning")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reason_is_told_once_whatever_the_request() -> None:
    said: list[str] = []
    names = iter("abc")
    evicting = Planning(lambda view: plan_of((LIVE, 1), evicted=[next(names)]))
    policy = CheckedPolicy("mine.Policy", evicting, Conserve(), said.append)
    for _ in range(3):
        policy.plan(BUSY)
    assert policy.refused.reasons == ["it evicts a, which is no offline request with KV blocks"]
    assert len(said) == 1


def test_good_plans_are_followed_and_none_leaves_the_iteration_to_vllm() -> None:
    assert refusals_of(Conserve()) == {"count": 0, "reasons": []}
    for plan in (GOOD, None):
        policy = CheckedPolicy("mine.Policy", Planning(lambda view, plan=plan: plan), Conserve(), pytest.fail)
        assert policy.plan(BUSY) is plan
        assert not policy.refused.count


@pytest.mark.parametrize("field", ["predicted_ms", "online_ms"])
def test_a_time_that_is_no_number_is_refused(field: str) -> None:
    for wrong in (None, "20"):
        plan = replace(GOOD, **{field: wrong})
        policy = CheckedPolicy("mine.Policy", Planning(lambda view, plan=plan: plan), Conserve(), unsaid)
        assert policy.plan(BUSY) == Conserve().plan(BUSY)


def test_flags_of_the_protocol_are_the_users_or_the_usual_ones() -> None:
    plain = CheckedPolicy("mine.Policy", Planning(lambda view: None), Conserve(), pytest.fail)
    assert plain.traits == Traits(rows_may_leave=True) == traits("mine.Policy")
    theirs = Planning(lambda view: None)
    vars(theirs).update(decides=False, defers_offline=True, spares_offline=True, repeats=True)
    own = CheckedPolicy("mine.Policy", theirs, Conserve(), pytest.fail)
    assert own.traits == Traits(False, True, True, True, rows_may_leave=True)


def test_a_policy_that_inherits_from_conserves_has_its_flags_and_no_other_trait() -> None:
    class Heir(Conserve): ...

    class Different(Conserve):
        repeats = False

    for heir, repeats in ((Heir(), True), (Different(), False)):
        own = CheckedPolicy("mine.Policy", heir, Conserve(), pytest.fail)
        assert own.traits == Traits(repeats=repeats, rows_may_leave=True)
    theirs = Planning(lambda view: None)
    vars(theirs).update(traits="gentle")
    assert CheckedPolicy("mine.Policy", theirs, Conserve(), pytest.fail).traits == traits("mine.Policy")


class WithoutPlan: ...


class OfOldFlags:
    holds_offline = True

    def plan(self, view: Any) -> None: ...


class Leaving:
    def __init__(self) -> None:
        raise SystemExit("it leaves")


def test_a_policy_is_named_by_the_path_of_its_class() -> None:
    for path, why in (
        ("nowhere.Mine", "No module named 'nowhere'"),
        (f"{__name__}.Yours", "Yours"),
        (f"{__name__}.Planning", "missing 1 required positional argument"),
        (f"{__name__}.Leaving", "SystemExit: it leaves"),
        (f"{__name__}.WithoutPlan", r"has no method plan\(view\)"),
        (f"{__name__}.OfOldFlags", "has the flag holds_offline, which is called defers_offline"),
    ):
        with pytest.raises(ValueError, match=rf"^the policy {path} .*{why}"):
            own_policy(path)
        with pytest.raises(SettingsError, match=why):
            require_policy(path)
    with pytest.raises(ValueError, match="there is no policy 'often'; there are conserve, "):
        named("often")
    with pytest.raises(SettingsError, match="the policy paced is for conserve run"):
        require_policy("paced")
    assert isinstance(named(CONSERVE), Conserve)
    assert {*BENCHED} <= {*POLICIES}
    assert {type(named(name)) for name in COMPARED} == {HyGen}
    assert traits(CONSERVE).rows_may_leave
    assert not traits("of-another-version").rows_may_leave


def test_the_example_takes_half_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    gentle = named("gentle_policy.Gentle", pytest.fail)
    live = decodes(2, "live")  # of 10 ms, and 1 ms for each token
    rows = [Candidate(f"row{n}", 40, 0) for n in range(4)]
    view = view_of(online=live, waiting_offline=rows, slo=Slo(tbt_ms=100.0))
    plan = gentle.plan(view)
    assert plan is not None
    assert plan.limit_ms == 12 + (100 - 12) / 2
    assert plan.predicted_ms == plan.limit_ms
    assert all(request.name in plan.tokens for request in live)
    idle = gentle.plan(view_of(waiting_offline=rows))
    assert idle is not None
    assert idle.predicted_ms == 50.0
    busy = gentle.plan(replace(view, slo=Slo(tbt_ms=12.0)))
    assert busy is not None
    assert busy.total == 2
    assert view.slo.ttft_ms == inf


def test_of_what_users_code_raises_ctrl_c_alone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_class.signal, "getsignal", lambda number: signal.default_int_handler)
    for error in (ZeroDivisionError("no"), SystemExit(3)):
        own_class.pass_interrupt(error)
    with pytest.raises(KeyboardInterrupt):
        own_class.pass_interrupt(KeyboardInterrupt())
    in_thread = threading.Thread(target=lambda: own_class.pass_interrupt(KeyboardInterrupt()))
    in_thread.start()
    in_thread.join()
