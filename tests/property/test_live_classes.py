"""Classes of live traffic: each keeps its own promise, none starves another, and without any nothing changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.fairness import fair_order
from conserve.engine.policy.plan_faults import fault_of
from conserve.engine.policy.promises import Promises
from conserve.engine.policy.recorded import line_of, recorded
from conserve.engine.policy.view import DEFAULT_CLASS, Candidate, Slo, View, tightest
from conserve.engine.runtime.traffic import CREDIT, Traffic
from conserve.profiles.batch import Batch, Slice
from tests.conftest import examples
from tests.property.test_policy import usual, views
from tests.reach import reached

EXAMPLES = examples(300)
SLOS = {
    "chat": Slo(ttft_ms=300.0, tbt_ms=40.0),
    "agent": Slo(ttft_ms=2000.0, tbt_ms=100.0),
    "notes": Slo(harm=0.1),
    DEFAULT_CLASS: Slo(ttft_ms=1000.0),
}
classes_of_traffic = st.sampled_from([*SLOS])


@st.composite
def classified(draw: st.DrawFn) -> View:
    """A view whose online requests are of several classes, which were served more or less."""
    view = draw(views())
    decodes = [Candidate(f"online-decode-{n}", 1, 20, True, 20) for n in range(draw(st.integers(0, 3)))]
    online = [*decodes, *view.online]
    names = [request.name for request in (*online, *view.waiting_online)]
    drawn = {name: draw(classes_of_traffic) for name in names}
    return replace(
        view,
        model=usual,
        online=online,
        slo=tightest(SLOS.values()),
        slos=SLOS,
        classes={name: one for name, one in drawn.items() if one != DEFAULT_CLASS},
        served={name: draw(st.sampled_from([0.0, 50.0, 5000.0])) for name in SLOS},
    )


@settings(max_examples=EXAMPLES)
@given(views())
def test_a_request_of_no_class_is_planned_as_on_a_server_without_classes(view: View) -> None:
    """Plans of views as they are recorded: these are the same to the letter."""
    unused = replace(
        view, slos={DEFAULT_CLASS: view.slo, "chat": SLOS["chat"]}, served={DEFAULT_CLASS: 700.0, "chat": 0.0}
    )
    with_classes, without = (
        recorded(line_of(v, None, policy="conserve", at=0.0)).view for v in (unused, view)
    )
    assert not without.slos
    assert with_classes.slos == unused.slos
    assert Conserve().plan(with_classes) == Conserve().plan(without)


@settings(max_examples=EXAMPLES)
@given(classified())
def test_offline_tokens_keep_the_promise_of_every_class_in_the_iteration(view: View) -> None:
    plan = Conserve().plan(view)
    assert fault_of(plan, view) is None
    offline = {request.name for request in (*view.offline, *view.waiting_offline)}
    present = [request for request in view.online if request.decode and request.name in plan.tokens]
    beside = bool(offline & plan.tokens.keys()) and bool(present)
    if reached("offline tokens beside decodes", beside):
        # Live requests alone may exceed it.
        assert plan.predicted_ms <= max(
            min(view.slo_of(one).tbt_ms for one in present), alone_ms(view, plan.tokens)
        )


def alone_ms(view: View, tokens: Mapping[str, int]) -> float:
    """Predicted time of the plan's online requests."""
    online = {request.name: request for request in (*view.online, *view.waiting_online)}
    return view.model.predict(
        Batch.of(
            Slice(count, online[name].context, online[name].decode)
            for name, count in tokens.items()
            if name in online
        )
    )


@settings(max_examples=EXAMPLES)
@given(classified(), st.sampled_from([1500.0, 4000.0]))
def test_a_late_prompt_spares_the_classes_that_were_served_less(view: View, age_ms: float) -> None:
    """Late prompts of classes that were served as little as a decoding request's may still hold it up."""
    prompts = [
        request._replace(age_ms=age_ms, restorable=0, tokens=request.tokens + 400, surcharge_ms=0.0)
        for request in view.waiting_online
    ]
    view = replace(
        view, waiting_online=prompts, online=[one for one in view.online if one.decode], max_tokens=2048
    )
    plan = Conserve().plan(view)
    for prompt in prompts:
        spared = [
            one
            for one in view.online
            if view.served[view.class_of(one)] < view.served[view.class_of(prompt)]
            and view.class_of(one) != view.class_of(prompt)
        ]
        if prompt.name in plan.tokens and reached("a late prompt beside a class served less", spared):
            for one in spared:
                served = view.served[view.class_of(one)]
                by_right = {p.name for p in prompts if view.served[view.class_of(p)] <= served}
                others = {name: count for name, count in plan.tokens.items() if name not in by_right}
                assert alone_ms(view, others) <= view.slo_of(one).online_tbt_ms


@given(
    st.lists(st.tuples(classes_of_traffic, st.integers(1, 900)), max_size=60),
    st.dictionaries(classes_of_traffic, st.floats(0, 5000), max_size=4),
)
def test_classes_that_wait_are_served_alike(
    waiting: Sequence[tuple[str, int]], served: dict[str, float]
) -> None:
    """The bound of stride scheduling: never further apart than before, or than one request's cost."""
    requests = [(number, *one) for number, one in enumerate(waiting)]
    largest = max((cost for _, _, cost in requests), default=0)
    ordered = [
        *fair_order(
            requests,
            class_of=lambda one: one[1],
            cost_of=lambda one: float(one[2]),
            served=served,
            level_of=lambda one: 0,
        )
    ]
    assert sorted(ordered) == requests
    for name in SLOS:
        mine = [number for number, of, _ in ordered if of == name]
        assert mine == sorted(mine), "first come, first served within a class"
    counts, left = {name: served.get(name, 0.0) for name in SLOS}, list(ordered)
    apart = {pair: abs(counts[pair[0]] - counts[pair[1]]) for pair in combinations(SLOS, 2)}
    while left:
        _, name, cost = left.pop(0)
        counts[name] += cost
        backlogged = {of for _, of, _ in left}
        for one, other in combinations([n for n in SLOS if n in backlogged], 2):
            assert abs(counts[one] - counts[other]) <= max(apart[one, other], largest) + 1e-6


@given(st.lists(st.tuples(st.integers(0, 2), classes_of_traffic), max_size=30))
def test_no_class_overtakes_a_better_priority(waiting: list[tuple[int, str]]) -> None:
    requests = sorted(waiting, key=lambda one: one[0])
    ordered = fair_order(
        requests, class_of=lambda one: one[1], cost_of=lambda one: 1.0, served={}, level_of=lambda one: one[0]
    )
    assert [level for level, _ in ordered] == [level for level, _ in requests]


def test_the_tightest_of_no_promises_is_none() -> None:
    assert tightest([]) == Slo(largest_ttft_ms=inf, largest_tbt_ms=inf)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 20_000)), min_size=1, max_size=60))
def test_a_class_that_always_decodes_saves_up_no_more_than_an_iteration(
    steps: list[tuple[bool, float]],
) -> None:
    """`steps`: an agent's cost, and whether a chat arrives after it. A chat decodes all the time."""
    traffic = Traffic(classes={"chat": Promises(harm=0.1), "agent": Promises(harm=0.1)})
    for name in ("chat", "agent"):
        traffic.arrived(name, 10, at=0.0, live_class=name)
    traffic.tokens(["chat"], at=0.1)
    for number, (arrives, cost) in enumerate(steps):
        traffic.computed({"agent": cost, "chat": 1.0})
        before = traffic.served["chat"]
        if arrives:
            traffic.arrived(f"chat-{number}", 10, at=1.0, live_class="chat")
            assert traffic.served["chat"] == max(before, traffic.served["agent"] - CREDIT)
            traffic.finished(f"chat-{number}")
    reached("a chat was brought nearer", traffic.served["chat"] > len(steps))
