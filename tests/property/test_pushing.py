"""Rows that push: the usual plan and tokens of theirs, within the stated scale of every promise."""

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.plan_faults import fault_of
from conserve.engine.policy.view import DEFAULT_CLASS, Candidate, Slo, View, tightest
from conserve.profiles.batch import Batch, Slice
from tests.conftest import examples
from tests.property.test_policy import ROUNDING, Judged, usual, views
from tests.reach import reached

EXAMPLES = examples(300)
SLOS = [
    Slo(ttft_ms=1000.0, tbt_ms=40.0),
    Slo(ttft_ms=1000.0, tbt_ms=100.0),
    Slo(ttft_ms=300.0, tbt_ms=20.0, largest_tbt_ms=100.0),
    Slo(harm=0.1),
    Slo(harm=0.5, tbt_ms=60.0),
]


@st.composite
def pushing(draw: st.DrawFn) -> View:
    """A view in which some rows push; live requests decode more often than not."""
    view = draw(views())
    live = [Candidate(f"online-decode-{n}", 1, 20, True, 20) for n in range(draw(st.integers(0, 3)))]
    prompts = draw(st.booleans())
    rows = [Candidate(f"offline-decode-{n}", 1, 20, True, 20) for n in range(draw(st.integers(0, 30)))]
    names = [row.name for row in (*rows, *view.offline, *view.waiting_offline)]
    leave, slo = draw(st.booleans()), draw(st.sampled_from(SLOS))
    several = draw(st.booleans())
    slos = {DEFAULT_CLASS: slo, "chat": draw(st.sampled_from(SLOS))} if several else {}
    return replace(
        view,
        model=usual,
        online=[*live, *(one for one in view.online if one.decode or prompts)],
        waiting_online=view.waiting_online if prompts else (),
        offline=[*rows, *view.offline],
        slo=tightest(slos.values()) if several else slo,
        slos=slos,
        classes={request.name: "chat" for request in live[1:]} if several else {},
        free_blocks=draw(st.sampled_from([1000, 1000, 30, 0])),
        rows_leave=leave,
        rows_join=leave and draw(st.booleans()),
        online_waited_ms=draw(st.sampled_from([0.0, 0.0, 15.0])),
        pushed=frozenset(name for name in names if draw(st.integers(0, 2))),
        push_scale=draw(st.sampled_from([1.1, 1.5, 3.0])),
    )


def both(view: View) -> tuple[Plan, Plan]:
    """The plan where nothing pushes, and the plan of the view."""
    return Conserve().plan(replace(view, pushed=frozenset())), Conserve().plan(view)


@settings(max_examples=EXAMPLES)
@given(pushing())
def test_a_push_adds_tokens_of_its_own_rows_and_changes_nothing_else(view: View) -> None:
    plain, plan = both(view)
    assert fault_of(plan, view) == fault_of(plain, view)
    assert (plan.evicted, plan.restored) == (plain.evicted, plain.restored)
    assert list(plan.admitted)[: len(plain.admitted)] == list(plain.admitted)
    more = {name: tokens - plain.tokens.get(name, 0) for name, tokens in plan.tokens.items()}
    assert plan.pushed == {name: tokens for name, tokens in more.items() if tokens}
    assert plan.pushed.keys() <= view.pushed
    assert min(more.values(), default=0) >= 0
    assert plain.tokens.keys() <= plan.tokens.keys()
    if not reached("something is pushed", plan.pushed):
        assert plan == plain


@settings(max_examples=EXAMPLES)
@given(pushing())
def test_no_live_request_waits_longer_than_the_scale_times_what_it_is_promised(view: View) -> None:
    plain, plan = both(view)
    scale, judged = view.push_scale, Judged(view, plan)
    if not reached("something is pushed", plan.pushed):
        return
    live = {request.name: request for request in judged.online if request.name in plan.tokens}
    assert all(request.decode for request in live.values()), "none lengthens an iteration of live prompts"
    assert plan.limit_ms is not None
    assert plain.limit_ms is None or plan.limit_ms <= plain.limit_ms * scale * ROUNDING
    assert judged.ms() <= plan.limit_ms * ROUNDING
    if live:
        waited_ms = view.online_waited_ms
        promised = view.slo_among(live.values())
        assert waited_ms + judged.ms() <= scale * promised.tbt_ms * ROUNDING
        if promised.harm is not None:
            alone = Conserve().plan(replace(view, offline=(), waiting_offline=()))
            assert judged.ms() <= scale * (1 + promised.harm) * alone.predicted_ms * ROUNDING
    elif steps := [
        request for request in view.online if request.decode
    ]:  # a turn: they wait for it, then run
        turn_ms = judged.ms() + view.model.predict(
            Batch.of([Slice(r.tokens, r.context, True) for r in steps])
        )
        assert turn_ms <= scale * view.slo_among(steps).tbt_ms * ROUNDING
    if view.slo.ttft_ms < inf:
        restored = [one for one in judged.online if one.name in plan.restored and not one.answered]
        for request in restored:
            assert request.age_ms + judged.ms() <= scale * view.slo_of(request).ttft_ms * ROUNDING
