"""Properties of every plan, whatever the view, and of the work that plans get done."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.engine.policy.conserve import Conserve, arrival_limit_ms
from conserve.engine.policy.hygen import hygen, sarathi_plus
from conserve.engine.policy.non_preemptive import NonPreemptive
from conserve.engine.policy.offline import GROWTH
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.plan import Plan, Policy
from conserve.engine.policy.plan_faults import fault_of
from conserve.engine.policy.policies import POLICIES, SERVING
from conserve.engine.policy.priority import Priority
from conserve.engine.policy.recorded import line_of, recorded
from conserve.engine.policy.view import Candidate, Image, Lazy, Slo, View
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.model import LatencyModel, LinearModel
from conserve.profiles.profile import MODELS
from tests.byte_choices import ByteChoices, made_of_bytes
from tests.conftest import examples
from tests.reach import reached

EXAMPLES = examples(400)
ROUNDING = 1 + 1e-9  # of sums of surcharges, which are added up in another order here
PLANNING = [Conserve(), OnlineOnly(), Paced(), hygen(), sarathi_plus()]

usual = ConServeModel.of(0.05, 1e-5, 1e-5, 1e-3, 0.1, 0.5, 1e-3, 10.0)


def some_model(choose: ByteChoices) -> LinearModel:
    """The usual one more often than not: with most others there is time for everything or for nothing."""
    if choose.integer(0, 3) < 3:
        return usual
    kind = choose.one_of([*MODELS.values()])
    return kind.of(*[coefficient(choose) for _ in kind.terms])


def coefficient(choose: ByteChoices) -> float:
    return choose.one_of([0.0, choose.one_of([1e-5, 1e-3, 0.02, 0.3]), choose.real(1e-6, 5)])


def running(choose: ByteChoices, name: str, block_tokens: int) -> Candidate:
    context = choose.integer(0, 200)
    blocks = max(1, ceil(context / block_tokens)) + choose.one_of([0, 0, 1])
    saved = choose.one_of([False, False, True])
    if context and choose.yes():
        return Candidate(name, choose.one_of([1, 1, 1, 2, 4]), context, True, blocks, saved=saved)
    return unread(choose, name, context, blocks)._replace(saved=saved)


def waiting(choose: ByteChoices, name: str, block_tokens: int) -> Candidate:
    cached, shared = choose.one_of([(0, 0), (0, 0), (1, 0), (5, 0), (5, 3)])
    request = unread(choose, name, cached * block_tokens, shared)
    if choose.integer(0, 4) < 4:
        return request
    return request._replace(restorable=choose.integer(1, request.tokens))


def unread(choose: ByteChoices, name: str, context: int, blocks: int) -> Candidate:
    """A request whose prompt is not computed yet."""
    answered, surcharge_ms = choose.one_of([(False, 0.0), (False, 0.0), (True, 0.0), (False, 0.5)])
    prompt = choose.one_of([None, None, "a", "b"])  # beginnings that others have too
    prefix = [] if prompt is None else [f"{prompt}{n}" for n in range(50)]
    age_ms = choose.one_of([0.0, 0.0, 0.0, 400.0, 960.0, 2000.0])
    tokens = choose.integer(1, choose.one_of([40, 600]))
    return Candidate(name, tokens, context, False, blocks, age_ms, answered, surcharge_ms, prefix=prefix)


def some_view(choose: ByteChoices) -> View:
    """Mostly with room for a request, and with one thing or another that is short."""
    block_tokens = choose.one_of([4, 16])

    def some(kind: str, made: Callable[..., Candidate], most: int) -> list[Candidate]:
        return [made(choose, f"{kind}-{n}", block_tokens) for n in range(choose.integer(0, most))]

    return View(
        online=some("online", running, 2),
        offline=some("offline", running, 4),
        waiting_online=some("waiting-online", waiting, 2),
        waiting_offline=some("waiting-offline", waiting, 3),
        model=some_model(choose),
        slo=Slo(
            ttft_ms=choose.one_of([inf, 1000.0, 1000.0, 300.0]),
            tbt_ms=choose.one_of([inf, 100.0, 40.0, 13.0]),
        ),
        prompt_tokens=choose.one_of([0, 30, 500]),
        max_tokens=choose.one_of([2048, 2048, 300, 20, 3]),
        free_slots=choose.one_of([50, 50, 2, 1, 0]),
        parks=choose.yes(),
        free_blocks=choose.one_of([1000, choose.integer(0, 200), choose.integer(0, 3)]),
        watermark_blocks=choose.one_of([0, 0, 2]),
        block_tokens=block_tokens,
    )


def some_full_view(choose: ByteChoices, *, online: bool = True) -> View:
    """The KV cache is full, and every running request wants its next block."""
    view = some_view(choose)

    def growing(requests: Iterable[Candidate]) -> list[Candidate]:
        blocks = [max(1, request.context // view.block_tokens) for request in requests]
        return [
            request._replace(tokens=1, context=count * view.block_tokens, decode=True, blocks=count)
            for request, count in zip(requests, blocks, strict=True)
        ]

    live = [*view.online, running(choose, "online-last", view.block_tokens)] if online else []
    return replace(
        view,
        online=growing(live),
        offline=growing(view.offline) if not online or choose.yes() else [],
        waiting_online=view.waiting_online if online else (),
        free_blocks=choose.one_of([0, 0, 1]),
    )


def some_unhurried_view(choose: ByteChoices) -> View:
    """Online requests decode beside prompts, a TBT SLO is to be kept, and there is time to first tokens."""
    view = some_view(choose)
    decode = Candidate("online-first", 1, 20, True, ceil(20 / view.block_tokens))
    slo = Slo(ttft_ms=1e6, tbt_ms=choose.one_of([100.0, 40.0, 13.0]))
    prompts = [r._replace(restorable=0) for r in view.waiting_online]
    return replace(view, model=usual, slo=slo, online=[decode, *view.online], waiting_online=prompts)


def some_view_with_room(choose: ByteChoices) -> View:
    """A row waits beside an online request that decodes; there is memory for both, and often time."""
    view = some_view(choose)
    decode = Candidate("online-first", 1, 20, True, ceil(20 / view.block_tokens))
    row = waiting(choose, "waiting-offline-first", view.block_tokens)
    slo = Slo(ttft_ms=choose.one_of([inf, 1000.0]), tbt_ms=choose.one_of([inf, 100.0, 40.0]))
    return replace(
        view,
        model=usual,
        slo=slo,
        online=[decode, *view.online],
        waiting_offline=[row, *view.waiting_offline],
        free_slots=50,
        free_blocks=1000,
        max_tokens=2048,
    )


def some_view_of_one_prefix(choose: ByteChoices) -> View:
    """Rows that all begin alike, with room and time for some."""
    view = some_view(choose)
    prefix = [f"a{n}" for n in range(50)]
    rows = [waiting(choose, f"waiting-offline-{n}", view.block_tokens) for n in range(choose.integer(2, 4))]
    alike = [row._replace(context=0, blocks=0, restorable=0, prefix=prefix) for row in rows]
    return replace(
        view,
        waiting_online=(),
        waiting_offline=alike,
        free_blocks=10_000,
        free_slots=50,
        max_tokens=2048,
        model=usual,
    )


def some_view_with_rows_that_come_back(choose: ByteChoices) -> View:
    """The waiting offline rows were evicted, and there is often room for some of them."""
    view = some_view(choose)
    first = waiting(choose, "waiting-offline-first", view.block_tokens)
    rows = [row._replace(restorable=row.tokens, prefix=()) for row in (first, *view.waiting_offline)]
    free = choose.one_of([view.free_blocks, 400])
    return replace(
        view, waiting_offline=rows, free_slots=max(2, view.free_slots), free_blocks=free, model=usual
    )


def some_view_without_slots(choose: ByteChoices) -> View:
    """Live requests wait, and rows have all slots and need no more memory."""
    view = some_view(choose)
    arrivals = [
        waiting(choose, f"arrival-{n}", view.block_tokens)._replace(restorable=0)
        for n in range(choose.integer(1, 3))
    ]
    return replace(
        view,
        waiting_online=arrivals,
        parks=True,
        free_slots=0,
        free_blocks=10_000,
        max_tokens=2048,
        model=usual,
        slo=Slo(),
    )


BYTES = 320  # a view of the most requests takes fewer
views = made_of_bytes(BYTES, some_view)
full_views = made_of_bytes(BYTES, some_full_view)
unhurried_views = made_of_bytes(BYTES, some_unhurried_view)
views_with_room = made_of_bytes(BYTES, some_view_with_room)
views_without_slots = made_of_bytes(BYTES, some_view_without_slots)
views_of_one_prefix = made_of_bytes(BYTES, some_view_of_one_prefix)
views_with_rows_that_come_back = made_of_bytes(BYTES, some_view_with_rows_that_come_back)


class Judged:
    """A view and a plan for it, counted again from scratch."""

    def __init__(self, view: View, plan: Plan | None) -> None:
        assert plan is not None
        self.view, self.plan = view, plan
        self.running = {request.name: request for request in (*view.online, *view.offline)}
        self.waiting = {r.name: r for r in (*view.waiting_online, *view.waiting_offline)}
        self.all = self.running | self.waiting
        self.online = [*view.online, *view.waiting_online]
        self.offline = {request.name for request in (*view.offline, *view.waiting_offline)}
        self.offline_tokens = sum(tokens for name, tokens in plan.tokens.items() if name in self.offline)
        freed_slots = len(plan.evicted) + len(plan.parked)
        self.slots_left = view.free_slots + freed_slots - len(plan.admitted) - len(plan.restored)
        freed = sum(self.running[name].blocks for name in plan.evicted)
        taken = sum(map(self.blocks_taken, [*plan.tokens, *plan.restored]))
        self.blocks_left = view.free_blocks + freed - taken
        self.tokens_left = view.max_tokens - sum(plan.tokens.values()) - bool(plan.restored)
        (only,) = plan.tokens if len(plan.tokens) == 1 else (None,)
        # An idle engine computes the least there is, whatever its model says.
        self.least = (
            only in self.offline
            and not view.online
            and (plan.total <= view.block_tokens or self.all[only].decode)
        )

    def blocks_for(self, request: Candidate, tokens: int) -> int:
        return max(0, ceil((request.context + tokens) / self.view.block_tokens) - request.blocks)

    def blocks_taken(self, name: str) -> int:
        """Blocks that a planned request takes: for its tokens, or for its whole prompt if it was waiting."""
        request = self.all[name]
        return self.blocks_for(request, request.tokens if name in self.waiting else self.plan.tokens[name])

    def ms(self, more: Candidate | None = None, tokens: int = 0) -> float:
        """Predicted time of the plan with some tokens more of one request, in ms."""
        planned = dict(self.plan.tokens)
        if more is not None:
            planned[more.name] = planned.get(more.name, 0) + tokens
        requests = [(self.all[name], count) for name, count in planned.items()]
        batch = Batch.of([Slice(count, request.context, request.decode) for request, count in requests])
        return self.view.model.predict(batch) + sum(request.beyond_ms(count) for request, count in requests)

    def served(self, request: Candidate) -> bool:
        """True if the request got all its tokens, also if from host memory."""
        return request.name in self.plan.restored or self.plan.tokens.get(request.name) == request.tokens

    def online_limit_ms(self) -> float:
        """Time that the online requests in the iteration leave to offline ones, in ms."""
        tbt = [self.view.slo.tbt_ms for request in self.view.online if request.decode]
        first_tokens = [
            self.view.slo.ttft_ms - request.age_ms
            for request in self.online
            if not request.decode and not request.answered and self.served(request)
        ]
        return min([*tbt, *first_tokens], default=inf)

    def limit_ms(self) -> float:
        """Time that offline tokens have to fit into under ConServe's policy, in ms."""
        return min(self.online_limit_ms(), arrival_limit_ms(self.view))

    def computed_for(self, request: Candidate, by: Iterable[str] | None = None) -> bool:
        """True if another request in the plan computes the block that the request would begin with."""
        size = self.view.block_tokens
        block = request.context // size
        if block >= len(request.prefix) or (block + 1) * size >= request.context + request.tokens:
            return False
        for name in self.plan.tokens if by is None else by:
            other = self.all[name]
            blocks = slice(other.context // size, ceil((other.context + self.plan.tokens[name]) / size))
            if other is not request and not other.decode and request.prefix[block] in other.prefix[blocks]:
                return True
        return False

    def next_in_order(self, kept: Iterable[Candidate], waiting: Iterable[Candidate]) -> Candidate | None:
        """The first request of phase 2 that did not get all it wanted; last those held out for their prefix."""
        gone = {*self.plan.evicted, *self.plan.parked}
        left = [request for request in kept if request.name not in gone]
        ordered = sorted(left, key=lambda request: not request.decode)
        held, others = [], []
        for request in waiting:
            out = (
                request.name not in self.plan.tokens and self.computed_for(request) and not request.restorable
            )
            (held if out else others).append(request)
        first = next((r for r in (*ordered, *others, *held) if not self.served(r)), None)
        return None if first is not None and first.restorable else first

    def could_have_more(self, request: Candidate, limit_ms: float, prompts: Sequence[Candidate]) -> bool:
        """True if there was time, room and memory for the least more of the request."""
        planned = self.plan.tokens.get(request.name, 0)
        least = request.tokens if request.decode else 1
        if self.tokens_left < least or self.ms(request, least) > limit_ms / ROUNDING:
            return False
        if request.name in self.waiting:
            if planned:
                return True  # it was cut although it has memory for all of its prompt
            reserve = max(self.view.watermark_blocks, len(self.plan.tokens) // GROWTH)
            needed = self.blocks_for(request, request.tokens) + reserve
            return self.slots_left >= 1 and needed <= self.blocks_left
        later = prompts[prompts.index(request) + 1 :] if request in prompts else []
        parked = [self.running[name] for name in self.plan.parked]
        later = [*(r for r in later if r not in parked), *parked]
        room = self.blocks_left + sum(r.blocks for r in later if r.name not in self.plan.evicted)
        most = min(request.tokens, self.tokens_left)
        while self.ms(request, most) > limit_ms:
            most -= 1
        return self.blocks_for(request, most) <= room


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from(PLANNING))
def test_no_plan_exceeds_what_there_is(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    plan = judged.plan
    for name, tokens in plan.tokens.items():
        assert 1 <= tokens <= judged.all[name].tokens
    assert judged.tokens_left >= 0 or all(judged.all[name].decode for name in plan.tokens)
    assert judged.slots_left >= 0
    assert len(set(plan.admitted)) == len(plan.admitted)
    assert list(plan.admitted) == [name for name in plan.tokens if name in judged.waiting]
    gone = [*plan.evicted, *plan.parked]
    assert not set(gone) & set(plan.tokens)
    assert len(set(gone)) == len(gone)
    assert judged.blocks_left >= 0 or beyond_memory(judged, policy)


@settings(max_examples=EXAMPLES)
@given(st.one_of(views(), full_views(), views_with_rows_that_come_back()), st.sampled_from(PLANNING))
def test_rows_that_are_looked_at_as_they_are_read_are_planned_alike(view: View, policy: Policy) -> None:
    assert policy.plan(replace(view, offline=Lazy(iter(view.offline)))) == policy.plan(view)


@settings(max_examples=EXAMPLES)
@given(full_views(), st.sampled_from(PLANNING))
def test_only_online_requests_or_a_row_alone_grow_beyond_memory(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    if reached("blocks are missing", judged.blocks_left < 0):
        assert beyond_memory(judged, policy)


def beyond_memory(judged: Judged, policy: Policy) -> bool:
    """True if a plan that wants more KV blocks than there are is one that vLLM finds the blocks for."""
    tokens = judged.plan.tokens
    online = {*tokens} <= {request.name for request in judged.view.online}
    return (online or len(tokens) == 1) and (not judged.plan.admitted or isinstance(policy, Paced))


@settings(max_examples=EXAMPLES)
@given(
    st.one_of(views(), full_views(), full_views(online=False)), st.sampled_from([Conserve(), OnlineOnly()])
)
def test_only_running_offline_requests_are_evicted_or_parked_the_last_first(
    view: View, policy: Policy
) -> None:
    plan = Judged(view, policy.plan(view)).plan
    names = [request.name for request in view.offline]
    gone = {*plan.evicted, *plan.parked}
    if not reached("rows are evicted", gone):
        return
    assert gone <= set(names)
    for decode, saved, begun in product((True, False), repeat=3):
        alike = (decode, saved, begun)
        kind = [r.name for r in view.offline if (r.decode, r.saved, bool(r.context)) == alike]
        lost = [name for name in kind if name in gone]
        assert lost == kind[len(kind) - len(lost) :]


@settings(max_examples=EXAMPLES)
@given(st.one_of(views(), views_with_rows_that_come_back()), st.sampled_from(PLANNING))
def test_what_comes_back_waits_for_nothing_but_room(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    plan = judged.plan
    if reached("rows are admitted", plan.admitted):
        assert not any(judged.all[name].restorable for name in plan.admitted)
    if reached("rows come back", plan.restored):
        for name in plan.restored:
            assert judged.all[name].restorable
            assert name not in plan.tokens
        assert len(set(plan.restored)) == len(plan.restored)
        assert plan.total < view.max_tokens or all(judged.all[name].decode for name in plan.tokens)


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from(PLANNING))
def test_a_plan_knows_what_it_computes(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    plan = judged.plan
    slices = [Slice(n, judged.all[name].context, judged.all[name].decode) for name, n in plan.tokens.items()]
    assert plan.batch == Batch.of(slices)
    assert plan.total == sum(plan.tokens.values())
    assert plan.predicted_ms == pytest.approx(judged.ms() if plan.tokens else 0.0)


@settings(max_examples=EXAMPLES)
@given(st.one_of(views(), views_with_room()))
def test_offline_tokens_stay_within_every_limit(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    plan = judged.plan
    assert (plan.limit_ms is None) == (judged.offline_tokens == 0)
    if not reached("offline tokens beyond the least", plan.limit_ms is not None and not judged.least):
        return
    assert plan.limit_ms is not None
    assert judged.ms() <= plan.limit_ms * ROUNDING
    assert plan.limit_ms <= arrival_limit_ms(view)
    if reached("beside online decode steps", any(request.decode for request in view.online)):
        assert plan.limit_ms <= view.slo.tbt_ms
    first_tokens = [request for request in judged.online if not request.decode and not request.answered]
    if reached("beside prompts of online requests", first_tokens):
        for request in first_tokens:
            assert plan.limit_ms <= view.slo.ttft_ms - request.age_ms


@settings(max_examples=EXAMPLES)
@given(st.one_of(views(), views_with_room()), st.sampled_from([0.1, 0.5, 2.0]))
def test_offline_tokens_add_no_more_than_the_harm_that_is_promised(view: View, harm: float) -> None:
    judged = Judged(view, Conserve().plan(replace(view, slo=Slo(harm=harm))))
    plan, online = judged.plan, {request.name for request in (*view.online, *view.waiting_online)}
    theirs = [judged.all[name] for name in plan.tokens if name in online]
    if reached("offline tokens beside online requests", plan.limit_ms is not None and theirs):
        slices = [Slice(plan.tokens[one.name], one.context, one.decode) for one in theirs]
        alone_ms = view.model.predict(Batch.of(slices)) + sum(
            one.beyond_ms(plan.tokens[one.name]) for one in theirs
        )
        assert judged.ms() <= (1 + harm) * alone_ms * ROUNDING


def with_images(view: View, image_ms: float) -> View:
    """The view with two images in each prompt of a row."""

    def seeing(rows: Iterable[Candidate]) -> list[Candidate]:
        return [
            row._replace(images=(Image(row.tokens // 3, image_ms), Image(row.tokens // 2, image_ms)))
            if not row.decode and not row.restorable
            else row
            for row in rows
        ]

    return replace(view, offline=seeing(view.offline), waiting_offline=seeing(view.waiting_offline))


@settings(max_examples=EXAMPLES)
@given(
    st.one_of(views(), views_with_room()),
    st.sampled_from([0.1, 0.5, 2.0]),
    st.sampled_from([2.0, 10.0, 80.0]),
)
def test_images_of_rows_add_no_more_than_the_harm_that_is_promised(
    view: View, harm: float, image_ms: float
) -> None:
    view = with_images(view, image_ms)
    judged = Judged(view, Conserve().plan(replace(view, slo=Slo(harm=harm))))
    plan, online = judged.plan, {request.name for request in (*view.online, *view.waiting_online)}
    theirs = {name: tokens for name, tokens in plan.tokens.items() if name in online}
    if reached("offline tokens beside online requests", plan.limit_ms is not None and theirs):
        slices = [Slice(n, judged.all[name].context, judged.all[name].decode) for name, n in theirs.items()]
        surcharge_ms = sum(judged.all[name].beyond_ms(tokens) for name, tokens in theirs.items())
        alone_ms = view.model.predict(Batch.of(slices)) + surcharge_ms
        assert judged.ms() <= (1 + harm) * alone_ms * ROUNDING


@settings(max_examples=EXAMPLES)
@given(views_with_room(), st.sampled_from([2.0, 80.0]))
def test_rows_alone_get_on_with_their_images(view: View, image_ms: float) -> None:
    view = replace(with_images(view, image_ms), online=(), waiting_online=())
    judged = Judged(view, Conserve().plan(view))
    if reached("rows wait with nothing beside them", view.offline or judged.waiting):
        assert judged.plan.tokens or judged.plan.restored or view.free_blocks < 50


@settings(max_examples=EXAMPLES)
@given(views())
def test_no_online_request_waits_behind_offline_tokens(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    if reached("offline tokens beside online requests", judged.offline_tokens and judged.online):
        assert all(map(judged.served, judged.online))


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from([Conserve(), OnlineOnly()]))
def test_online_requests_get_the_same_as_without_offline_ones(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    alone = replace(
        view,
        offline=(),
        waiting_offline=(),
        free_slots=view.free_slots + len(view.offline),
        free_blocks=view.free_blocks + sum(request.blocks for request in view.offline),
    )
    without = Judged(alone, policy.plan(alone)).plan
    online = {name: n for name, n in judged.plan.tokens.items() if name not in judged.offline}
    assert online == without.tokens
    assert [name for name in judged.plan.admitted if name not in judged.offline] == without.admitted


@settings(max_examples=EXAMPLES)
@given(views())
def test_online_decode_steps_always_run(view: View) -> None:
    for policy in (Conserve(), OnlineOnly()):
        judged = Judged(view, policy.plan(view))
        decodes = [request for request in view.online if request.decode]
        if reached("online requests decode", decodes):
            assert all(map(judged.served, decodes))


@settings(max_examples=EXAMPLES)
@given(unhurried_views())
def test_chunks_of_online_prompts_keep_the_tbt_unless_their_own_ttft_is_at_stake(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    late = [request for request in judged.online if request.age_ms > view.slo.ttft_ms / 2]
    late += [one for one in judged.online if one.answered and nothing_fits(one, judged)]
    decodes = sum(request.decode for request in view.online)
    computed = {name for name in judged.plan.tokens if name not in judged.offline}
    chunks = len(computed) > decodes > 0
    bounded = chunks and view.slo.tbt_ms < inf and view.slo.ttft_ms < inf and not late and unhurried(view)
    if reached("chunks that have time", bounded):
        assert judged.plan.predicted_ms <= view.slo.tbt_ms * ROUNDING


def nothing_fits(request: Candidate, judged: Judged) -> bool:
    """True if a request whose KV is computed again has tokens, though there was time for none beside the others."""
    if request.decode or not (tokens := judged.plan.tokens.get(request.name, 0)):
        return False
    others = judged.plan.batch.copy()
    others.remove(tokens, request.context)
    return not judged.view.model.can_schedule(others, Slice(1, request.context), judged.view.slo.tbt_ms)


def unhurried(view: View) -> bool:
    """True if every prompt makes its TTFT token by token, one an iteration, each as long as the TBT SLO."""
    prompts = [*(request for request in view.online if not request.decode), *view.waiting_online]
    left_ms = [view.slo.ttft_ms - request.age_ms for request in prompts]
    alone_ms = [
        view.model.predict(Batch.of([Slice(request.tokens, request.context)]))
        + request.tokens * request.surcharge_ms
        for request in prompts
    ]
    needed = ((request.tokens + 1) * view.slo.tbt_ms for request in prompts)
    return all(
        left >= max(slow, alone + view.slo.tbt_ms)
        for left, slow, alone in zip(left_ms, needed, alone_ms, strict=True)
    )


@settings(max_examples=EXAMPLES)
@given(views())
def test_nothing_that_would_fit_is_left_out(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    if not all(map(judged.served, judged.online)) or judged.blocks_left < 0:
        return
    left_out = judged.next_in_order(view.offline, view.waiting_offline)
    prompts = [request for request in view.offline if not request.decode]
    if reached("a request is left out", left_out is not None):
        assert left_out is not None
        assert not judged.could_have_more(left_out, judged.limit_ms(), prompts)


@settings(max_examples=EXAMPLES)
@given(
    views().filter(lambda view: view.waiting_offline),
    st.integers(0, 400),
    st.sampled_from([3, 30]),
    st.sampled_from([0, 1, 5]),
)
def test_offline_rows_begin_only_beside_what_is_kept_for_online_ones(
    view: View, free: int, blocks: int, slots: int
) -> None:
    starting = [request._replace(restorable=0) for request in view.waiting_offline]
    view = replace(view, model=usual, slo=Slo(), max_tokens=2048, free_blocks=free)
    view = replace(view, waiting_offline=starting, reserved_blocks=blocks, reserved_slots=slots)
    judged = Judged(view, Conserve().plan(view))
    plan = judged.plan
    begun = [name for name in plan.admitted if name in judged.offline]
    if not reached("rows begin", begun):
        return
    assert judged.slots_left >= slots
    if len(begun) == len(set(plan.tokens) & judged.offline) < 2:
        return  # one may always run
    revocable = [request for request in view.offline if request.saved and request.name not in plan.evicted]
    assert judged.blocks_left >= blocks - sum(request.blocks for request in revocable)


@settings(max_examples=EXAMPLES)
@given(views())
def test_a_paced_iteration_leaves_out_nothing_that_would_fit(view: View) -> None:
    judged = Judged(view, Paced().plan(view))
    if judged.plan.total == 1:
        return  # the least there is, for want of time or of memory
    kept = [*view.online, *view.offline]
    left_out = judged.next_in_order(kept, [*view.waiting_online, *view.waiting_offline])
    if reached("a request is left out", left_out is not None and judged.ms() <= view.slo.tbt_ms):
        assert left_out is not None
        prompts = [request for request in kept if not request.decode]
        assert not judged.could_have_more(left_out, view.slo.tbt_ms, prompts)


@settings(max_examples=EXAMPLES)
@given(
    st.one_of(views(), full_views(), full_views(online=False)),
    st.sampled_from([Conserve(), OnlineOnly(), Paced()]),
)
def test_none_is_evicted_for_nothing(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    if reached("rows are evicted", judged.plan.evicted):
        last = judged.running[judged.plan.evicted[-1]]
        own = judged.blocks_for(last, last.tokens) if last.decode else 0  # it would have grown itself
        assert judged.blocks_left - last.blocks - own < view.watermark_blocks or judged.slots_left < 1


@settings(max_examples=EXAMPLES)
@given(views_without_slots())
def test_a_slot_alone_costs_no_row_its_memory(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    plan = judged.plan
    if reached("rows are parked", plan.parked):
        assert judged.slots_left < 1
        assert not plan.evicted
    starts = [name for name in plan.admitted if name not in judged.offline]
    assert len(starts) == len(plan.parked), "a row has no place that an arrival took"


@settings(max_examples=EXAMPLES)
@given(views_without_slots(), st.integers(0, 60))
def test_rows_are_parked_only_with_memory_that_nobody_lacks(view: View, free: int) -> None:
    judged = Judged(view, Conserve().plan(replace(view, free_blocks=free)))
    if reached("rows are parked", judged.plan.parked):
        assert judged.blocks_left >= 0
        assert judged.slots_left < 1


@settings(max_examples=EXAMPLES)
@given(full_views(online=False))
def test_a_row_survives_the_growth_of_others(view: View) -> None:
    plan = Judged(view, Conserve().plan(view)).plan
    if reached("rows are evicted", plan.evicted):
        assert len(plan.evicted) < len(view.offline)


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from([inf, 100.0, 13.0, 9.0]))
def test_a_paced_iteration_stays_within_its_time_or_is_as_small_as_can_be(view: View, tbt_ms: float) -> None:
    view = replace(view, slo=Slo(tbt_ms=tbt_ms))
    judged = Judged(view, Paced().plan(view))
    tokens = judged.plan.tokens
    if reached("it takes longer", judged.ms() > tbt_ms * ROUNDING and tokens):
        (name,) = tokens
        assert tokens[name] == 1 or judged.all[name].decode


@settings(max_examples=EXAMPLES)
@given(views(), st.integers(0, 20), st.sampled_from([0, 1, 50]))
def test_a_paced_engine_stands_still_only_where_nothing_can_start(
    view: View, blocks: int, slots: int
) -> None:
    idle = {"online": (), "offline": (), "waiting_online": (), "free_blocks": blocks, "free_slots": slots}
    front = Candidate("front", 100, 0)
    view = replace(view, **idle, waiting_offline=[front, *view.waiting_offline])
    judged = Judged(view, Paced().plan(view))
    if reached("nothing is computed", not judged.plan.tokens):
        missing = judged.blocks_for(front, 100) + view.watermark_blocks > blocks
        assert missing or slots < 1


@settings(max_examples=EXAMPLES)
@given(st.one_of(views(), full_views()), st.sampled_from([Conserve(), OnlineOnly()]))
def test_no_plan_of_ours_would_be_refused(view: View, policy: Policy) -> None:
    plan = policy.plan(view)
    assert plan is not None
    nothing = (
        "it computes nothing while live requests run"  # where there is neither memory nor a row to evict
    )
    assert fault_of(plan, view) in (None, nothing)
    if reached("something is computed", plan.tokens):
        assert fault_of(plan, view) is None


@given(views())
def test_online_only_never_computes_an_offline_token(view: View) -> None:
    judged = Judged(view, OnlineOnly().plan(view))
    assert not judged.offline_tokens
    assert judged.plan.limit_ms is None


@given(views())
def test_the_baselines_leave_everything_to_vllm(view: View) -> None:
    assert Priority().plan(view) is None
    assert NonPreemptive().plan(view) is None
    assert not Priority().traits.spares_offline
    assert NonPreemptive().traits.spares_offline
    assert set(SERVING) < set(POLICIES)


@settings(max_examples=EXAMPLES)
@given(views_of_one_prefix())
def test_a_prefix_is_computed_twice_only_when_all_others_are_served(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    planned = list(judged.plan.tokens)
    again = {
        request.name
        for request in view.waiting_offline
        if request.name in planned and judged.computed_for(request, planned[: planned.index(request.name)])
    }
    if reached("a prefix is computed twice", again):
        first = min(planned.index(name) for name in again)
        for request in view.waiting_offline:
            if not judged.served(request):
                assert request.name in again or judged.computed_for(request, planned[:first])


# Progress.


@dataclass(slots=True)
class Work:
    """A request of the simulated engine."""

    name: str
    prompt: int
    output: int
    done: int = 0  # tokens generated
    computed: int = 0
    blocks: int = 0
    age_ms: float = 0.0

    @property
    def wanted(self) -> int:
        return self.prompt + self.done - self.computed

    def whole(self, block_tokens: int) -> int:
        """KV blocks that it takes in the end."""
        return ceil((self.prompt + self.output) / block_tokens)

    def candidate(self) -> Candidate:
        decode = self.computed >= self.prompt and self.wanted == 1
        return Candidate(self.name, self.wanted, self.computed, decode, self.blocks, self.age_ms)


@dataclass(slots=True)
class Engine:
    """Applies plans to requests; keeps no prefix of an evicted one. Live requests come, and each stays a while."""

    policy: Policy
    model: LatencyModel
    slo: Slo
    blocks: int
    block_tokens: int
    slots: int
    max_tokens: int
    waiting: list[Work]
    running: list[Work] = field(default_factory=list)
    live_waiting: list[Work] = field(default_factory=list)
    live: list[Work] = field(default_factory=list)
    parked: list[Work] = field(default_factory=list)
    computed: int = 0
    evictions: int = 0

    def step(self) -> None:
        plan = self.policy.plan(self.view())
        assert plan is not None
        assert plan.tokens, "the engine stands still"
        by_name = {work.name: work for work in (*self.running, *self.waiting, *self.parked)}
        by_name |= {work.name: work for work in (*self.live, *self.live_waiting)}
        for name in plan.parked:
            self.running.remove(by_name[name])
            self.parked.insert(0, by_name[name])
        for name in plan.evicted:
            victim = by_name[name]
            victim.blocks = victim.computed = 0
            self.evictions += 1
            (self.running if victim in self.running else self.parked).remove(victim)
            self.waiting.append(victim)
        for name in plan.admitted:
            self.start(by_name[name])
        for works in (self.waiting, self.running):
            works.sort(key=lambda work: int(work.name))
        for name, tokens in plan.tokens.items():
            self.compute(by_name[name], tokens)
        assert self.free_blocks() >= 0
        assert len(self.running) + len(self.live) <= self.slots

    def start(self, work: Work) -> None:
        wanted = ceil((work.prompt + work.done) / self.block_tokens) - work.blocks
        assert wanted <= self.free_blocks(), "vLLM takes a request in with blocks for all of it"
        if work in self.live_waiting:
            self.live_waiting.remove(work)
            self.live.append(work)
        else:
            (self.waiting if work in self.waiting else self.parked).remove(work)
            self.running.append(work)

    def compute(self, work: Work, tokens: int) -> None:
        live = work in self.live
        work.computed += tokens
        self.computed += 0 if live else tokens
        work.blocks = max(work.blocks, ceil(work.computed / self.block_tokens))
        if work.wanted == 0:
            work.done += 1
        if work.done == work.output:
            (self.live if live else self.running).remove(work)

    def free_blocks(self) -> int:
        return self.blocks - sum(work.blocks for work in (*self.running, *self.live, *self.parked))

    def view(self) -> View:
        return View(
            online=[work.candidate() for work in self.live],
            offline=[work.candidate() for work in self.running],
            waiting_online=[work.candidate() for work in self.live_waiting],
            waiting_offline=[
                work.candidate()._replace(decode=False) for work in (*self.parked, *self.waiting)
            ],
            waiting_with_blocks=[work.candidate() for work in self.parked],
            model=self.model,
            slo=self.slo,
            max_tokens=self.max_tokens,
            free_slots=self.slots - len(self.running) - len(self.live),
            parks=True,
            free_blocks=self.free_blocks(),
            block_tokens=self.block_tokens,
        )


def some_works(draw: Any, first: int, most: int, longest: int) -> list[Work]:
    """Requests with answers of so many tokens at most, named by numbers from `first` on."""
    lengths = st.tuples(st.integers(1, 120), st.integers(1, longest))
    drawn = draw(st.lists(lengths, min_size=1, max_size=most))
    return [Work(str(first + n), *sizes) for n, sizes in enumerate(drawn)]


def some_engine(
    draw: Any, works: Sequence[Work], *, slots: int, live: Sequence[Work] = (), **given: Any
) -> Engine:
    """An engine with memory for the largest row, or for as many live requests as have slots, and for some more."""
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    largest = max(work.whole(block_tokens) for work in works)
    at_once = sum(sorted((work.whole(block_tokens) for work in live), reverse=True)[:slots])
    base_ms = draw(st.sampled_from([5.0, 15.0]))
    return Engine(
        model=ConServeModel.of(0.05, 1e-5, 1e-5, 1e-3, 0.1, 0.5, 1e-3, base_ms),
        blocks=max(largest, at_once) + draw(st.integers(0, 3 * largest)),
        block_tokens=block_tokens,
        slots=slots,
        max_tokens=draw(st.sampled_from([16, 64, 512])),
        waiting=[*works],
        **given,
    )


@settings(max_examples=examples(100))
@given(st.data())
def test_offline_work_is_always_finished_and_little_of_it_done_twice(data: st.DataObject) -> None:
    draw = data.draw
    works = some_works(draw, 0, 25, 80)
    engine = some_engine(
        draw,
        works,
        slots=draw(st.integers(1, 16)),
        policy=draw(st.sampled_from([Conserve(), Paced()])),
        slo=Slo(ttft_ms=draw(st.sampled_from([inf, 500.0])), tbt_ms=draw(st.sampled_from([inf, 100.0]))),
    )
    work = sum(work.prompt + work.output - 1 for work in works)
    while engine.running or engine.waiting:
        engine.step()
        assert engine.computed <= 3 * work, f"{engine.evictions} evictions"
    assert all(work.done == work.output for work in works)


@settings(max_examples=examples(100))
@given(st.data())
def test_rows_that_give_way_to_live_requests_go_on_and_no_engine_stands_still(data: st.DataObject) -> None:
    """Memory is large enough for each request, and mostly too small for all that want it."""
    draw = data.draw
    works, live = some_works(draw, 0, 12, 40), some_works(draw, 1000, 12, 40)
    arrivals = [(draw(st.integers(0, 60)), work) for work in live]
    engine = some_engine(draw, works, live=live, slots=draw(st.integers(1, 6)), policy=Conserve(), slo=Slo())
    steps, parked = 0, False
    while engine.running or engine.waiting or engine.parked or engine.live or engine.live_waiting or arrivals:
        engine.live_waiting += [work for at, work in arrivals if at <= steps]
        arrivals = [(at, work) for at, work in arrivals if at > steps]
        if engine.running or engine.waiting or engine.parked or engine.live or engine.live_waiting:
            engine.step()
        parked = parked or bool(engine.parked)
        steps += 1
        assert steps < 20_000
    reached("rows are parked", parked)
    assert all(work.done == work.output for work in works)


STEP_MS = 1000.0


@settings(max_examples=examples(100))
@given(st.data())
def test_a_row_that_lacks_memory_is_overtaken_and_begins_once_live_requests_leave_it(
    data: st.DataObject,
) -> None:
    """A live request holds what it lacks, again and again with short breaks, and small rows never run out."""
    draw = data.draw
    block_tokens, blocks, small = 16, 25, st.tuples(st.integers(1, 40), st.integers(10, 30))
    large = Work("0", draw(st.integers(250, 380)), 5)
    lacked = block_tokens * (blocks - large.whole(block_tokens) + draw(st.integers(2, 5)))
    held, left = draw(st.integers(5, 40)), draw(st.integers(1, 4))
    engine = Engine(
        policy=Conserve(),
        model=usual,
        slo=Slo(),
        blocks=blocks,
        block_tokens=block_tokens,
        slots=draw(st.integers(3, 16)),
        max_tokens=512,
        waiting=[large],
        live=[Work("1000000", lacked, 1000, 1, lacked, lacked // block_tokens)],
    )
    steps, names, overtaken = 0, count(1), False
    while large not in engine.running:
        if steps % (held + left) == held:
            engine.live.clear()
        elif steps and steps % (held + left) == 0:
            engine.live_waiting.append(Work(str(1_000_000 + steps), lacked, 1000))
        while len(engine.waiting) < 30:
            engine.waiting.append(Work(str(next(names)), *draw(small)))
        engine.step()
        overtaken = overtaken or bool(engine.running)
        for work in engine.waiting:
            work.age_ms += STEP_MS
        steps += 1
        assert steps < 16 * 60, "it waits for sixteen minutes: in the last two none overtakes it"
        assert overtaken, "there is memory for small rows"
    reached("none overtakes it for a while", steps > 60)


@pytest.mark.parametrize("policy", PLANNING)
@settings(max_examples=EXAMPLES)
@given(view=views())
def test_a_recorded_view_is_planned_the_same(policy: Policy, view: View) -> None:
    plan = policy.plan(view)
    line = line_of(view, plan, policy="any", at=0.0)
    again = recorded(line)
    assert again.plan == plan == policy.plan(again.view)
    assert line_of(again.view, again.plan, policy="any", at=0.0) == line
