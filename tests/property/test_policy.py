"""What holds of every plan, whatever the view; and what holds of the work that plans get done."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.engine.policy.composer import revocable_blocks
from conserve.engine.policy.conserve import Conserve, arrival_limit_ms
from conserve.engine.policy.non_preemptive import NonPreemptive
from conserve.engine.policy.offline import GROWTH, MOST_HELD
from conserve.engine.policy.online_only import OnlineOnly
from conserve.engine.policy.paced import Paced
from conserve.engine.policy.plan import Plan, Policy
from conserve.engine.policy.policies import POLICIES, SERVING
from conserve.engine.policy.priority import Priority
from conserve.engine.policy.view import Candidate, Slo, View
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.model import LatencyModel, LinearModel
from conserve.profiles.profile import MODELS
from tests.conftest import examples

EXAMPLES = examples(400)
ROUNDING = 1 + 1e-9  # of sums of surcharges, which are added up in another order here
PLANNING = [Conserve(), OnlineOnly(), Paced()]

coefficients = st.one_of(st.just(0.0), st.sampled_from([1e-5, 1e-3, 0.02, 0.3]), st.floats(1e-6, 5))
usual = ConServeModel.of(0.05, 1e-5, 1e-5, 1e-3, 0.1, 0.5, 1e-3, 10.0)
ages_ms = st.sampled_from([0.0, 0.0, 0.0, 400.0, 960.0, 2000.0])
sizes = st.one_of(st.integers(1, 40), st.integers(1, 600))


@st.composite
def models(draw: st.DrawFn) -> LinearModel:
    """The usual one more often than not: with most others there is time for everything or for nothing."""
    if draw(st.integers(0, 3)):
        return usual
    kind = draw(st.sampled_from([*MODELS.values()]))
    return kind.of(*[draw(coefficients) for _ in kind.terms])


@st.composite
def running(draw: st.DrawFn, name: str, block_tokens: int) -> Candidate:
    context = draw(st.integers(0, 200))
    blocks = max(1, ceil(context / block_tokens)) + draw(st.sampled_from([0, 0, 1]))
    saved = draw(st.sampled_from([False, False, True]))
    if context and draw(st.booleans()):
        return Candidate(name, draw(st.sampled_from([1, 1, 1, 2, 4])), context, True, blocks, saved=saved)
    return unread(draw, name, context, blocks)._replace(saved=saved)


@st.composite
def waiting(draw: st.DrawFn, name: str, block_tokens: int) -> Candidate:
    cached, shared = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (5, 0), (5, 3)]))
    request = unread(draw, name, cached * block_tokens, shared)
    if draw(st.integers(0, 4)):
        return request
    return request._replace(restorable=draw(st.integers(1, request.tokens)))


def unread(draw: st.DrawFn, name: str, context: int, blocks: int) -> Candidate:
    """A request whose prompt is not computed yet."""
    answered, surcharge_ms = draw(st.sampled_from([(False, 0.0), (False, 0.0), (True, 0.0), (False, 0.5)]))
    prompt = draw(st.sampled_from([None, None, "a", "b"]))  # beginnings that others have too
    prefix = [] if prompt is None else [f"{prompt}{n}" for n in range(50)]
    age_ms = draw(ages_ms)
    return Candidate(name, draw(sizes), context, False, blocks, age_ms, answered, surcharge_ms, prefix=prefix)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Mostly with room for somebody, and with one thing or another that is short."""
    block_tokens = draw(st.sampled_from([4, 16]))

    def some(kind: str, made: Callable[..., st.SearchStrategy[Candidate]], most: int) -> list[Candidate]:
        return [draw(made(f"{kind}-{n}", block_tokens)) for n in range(draw(st.integers(0, most)))]

    return View(
        online=some("online", running, 2),
        offline=some("offline", running, 4),
        waiting_online=some("waiting-online", waiting, 2),
        waiting_offline=some("waiting-offline", waiting, 3),
        model=draw(models()),
        slo=Slo(
            ttft_ms=draw(st.sampled_from([inf, 1000.0, 1000.0, 300.0])),
            tbt_ms=draw(st.sampled_from([inf, 100.0, 40.0, 13.0])),
        ),
        prompt_tokens=draw(st.sampled_from([0, 30, 500])),
        max_tokens=draw(st.sampled_from([2048, 2048, 300, 20, 3])),
        free_slots=draw(st.sampled_from([50, 50, 2, 1, 0])),
        free_blocks=draw(st.one_of(st.just(1000), st.integers(0, 200), st.integers(0, 3))),
        watermark_blocks=draw(st.sampled_from([0, 0, 2])),
        block_tokens=block_tokens,
    )


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
        self.slots_left = view.free_slots + len(plan.preempted) - len(plan.admitted) - len(plan.restored)
        freed = sum(self.running[name].blocks for name in plan.preempted)
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
        """By a planned request: those of its tokens, or of its whole prompt if it was waiting."""
        request = self.all[name]
        return self.blocks_for(request, request.tokens if name in self.waiting else self.plan.tokens[name])

    def ms(self, more: Candidate | None = None, tokens: int = 0) -> float:
        """What the plan takes, with some tokens more of one request."""
        planned = dict(self.plan.tokens)
        if more is not None:
            planned[more.name] = planned.get(more.name, 0) + tokens
        requests = [(self.all[name], count) for name, count in planned.items()]
        batch = Batch.of([Slice(count, request.context, request.decode) for request, count in requests])
        surcharge_ms = sum(count * request.surcharge_ms for request, count in requests)
        return self.view.model.predict(batch) + surcharge_ms

    def served(self, request: Candidate) -> bool:
        """Whether it got all it wanted, be it from host memory."""
        return request.name in self.plan.restored or self.plan.tokens.get(request.name) == request.tokens

    def online_limit_ms(self) -> float:
        """What the online requests in the iteration leave to offline ones."""
        tbt = [self.view.slo.tbt_ms for request in self.view.online if request.decode]
        first_tokens = [
            self.view.slo.ttft_ms - request.age_ms
            for request in self.online
            if not request.decode and not request.answered and self.served(request)
        ]
        return min([*tbt, *first_tokens], default=inf)

    def limit_ms(self) -> float:
        """What offline tokens have to fit into under ConServe's policy."""
        return min(self.online_limit_ms(), arrival_limit_ms(self.view))

    def computed_for(self, request: Candidate, by: Iterable[str] | None = None) -> bool:
        """Whether somebody else in the plan computes the block that the request would begin with."""
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
        left = [request for request in kept if request.name not in self.plan.preempted]
        ordered = sorted(left, key=lambda request: not request.decode)
        held, others = [], []
        for request in waiting:
            out = request.name not in self.plan.tokens and self.computed_for(request)
            (held if out else others).append(request)
        first = next((r for r in (*ordered, *others, *held) if not self.served(r)), None)
        return None if first is not None and first.restorable else first

    def could_have_more(self, request: Candidate, limit_ms: float, prompts: Sequence[Candidate]) -> bool:
        """Whether there was time, room and memory for the least more of the request."""
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
        room = self.blocks_left + sum(r.blocks for r in later if r.name not in self.plan.preempted)
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
    assert not set(plan.preempted) & set(plan.tokens)
    assert len(set(plan.preempted)) == len(plan.preempted)
    if judged.blocks_left < 0:  # vLLM preempts among the online requests then
        assert {*plan.tokens} <= {request.name for request in view.online} or len(plan.tokens) == 1
        assert not plan.admitted or isinstance(policy, Paced)


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from([Conserve(), OnlineOnly()]))
def test_only_running_offline_requests_are_preempted_the_last_first(view: View, policy: Policy) -> None:
    plan = Judged(view, policy.plan(view)).plan
    names = [request.name for request in view.offline]
    assert set(plan.preempted) <= set(names)
    for decode, saved in product((True, False), repeat=2):
        kind = [r.name for r in view.offline if r.decode == decode and r.saved == saved]
        lost = [name for name in kind if name in plan.preempted]
        assert lost == kind[len(kind) - len(lost) :]


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from([Conserve(), OnlineOnly(), Paced()]))
def test_what_comes_back_waits_for_nothing_but_room(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    plan = judged.plan
    for name in plan.restored:
        assert judged.all[name].restorable
        assert name not in plan.tokens
    assert not any(judged.all[name].restorable for name in plan.admitted)
    assert len(set(plan.restored)) == len(plan.restored)
    if plan.restored:
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
@given(views())
def test_offline_tokens_stay_within_every_limit(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    plan = judged.plan
    assert (plan.limit_ms is None) == (judged.offline_tokens == 0)
    if plan.limit_ms is None or judged.least:
        return
    assert judged.ms() <= plan.limit_ms * ROUNDING
    assert plan.limit_ms <= arrival_limit_ms(view)
    if any(request.decode for request in view.online):
        assert plan.limit_ms <= view.slo.tbt_ms
    for request in judged.online:
        if not request.decode and not request.answered:
            assert plan.limit_ms <= view.slo.ttft_ms - request.age_ms


@settings(max_examples=EXAMPLES)
@given(views())
def test_no_online_request_waits_behind_offline_tokens(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    if judged.offline_tokens:
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
        assert all(judged.served(request) for request in view.online if request.decode)


@settings(max_examples=EXAMPLES)
@given(views())
def test_chunks_of_online_prompts_keep_the_tbt_unless_their_own_ttft_is_at_stake(view: View) -> None:
    judged = Judged(view, Conserve().plan(view))
    late = [request for request in judged.online if request.age_ms > view.slo.ttft_ms / 2]
    decodes = sum(request.decode for request in view.online)
    computed = {name for name in judged.plan.tokens if name not in judged.offline}
    if view.slo.ttft_ms < inf and decodes and len(computed) > decodes and not late and unhurried(view):
        assert judged.plan.predicted_ms <= view.slo.tbt_ms * ROUNDING


def unhurried(view: View) -> bool:
    """Whether every prompt makes its TTFT token by token, one an iteration, each as long as the TBT SLO."""
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
    if left_out is not None:
        assert not judged.could_have_more(left_out, judged.limit_ms(), prompts)


@settings(max_examples=EXAMPLES)
@given(views(), st.integers(0, 100), st.sampled_from([3, 30, 100]), st.sampled_from([0, 1, 5]))
def test_offline_rows_begin_only_beside_what_is_kept_for_online_ones(
    view: View, free: int, blocks: int, slots: int
) -> None:
    starting = [request._replace(restorable=0) for request in view.waiting_offline]
    view = replace(view, model=usual, max_tokens=2048, free_blocks=free, waiting_offline=starting)
    view = replace(view, reserved_blocks=blocks, reserved_slots=slots)
    judged = Judged(view, Conserve().plan(view))
    plan = judged.plan
    begun = [name for name in plan.admitted if name in judged.offline]
    assert not begun or judged.slots_left >= slots
    if len(begun) == len(set(plan.tokens) & judged.offline) < 2:
        return  # one may always run
    revocable = [request for request in view.offline if request.saved and request.name not in plan.preempted]
    assert not begun or judged.blocks_left >= blocks - sum(request.blocks for request in revocable)


@settings(max_examples=EXAMPLES)
@given(views())
def test_a_paced_iteration_leaves_out_nothing_that_would_fit(view: View) -> None:
    judged = Judged(view, Paced().plan(view))
    if judged.plan.total == 1:
        return  # the least there is, for want of time or of memory
    kept = [*view.online, *view.offline]
    left_out = judged.next_in_order(kept, [*view.waiting_online, *view.waiting_offline])
    if left_out is not None and judged.ms() <= view.slo.tbt_ms:
        prompts = [request for request in kept if not request.decode]
        assert not judged.could_have_more(left_out, view.slo.tbt_ms, prompts)


@settings(max_examples=EXAMPLES)
@given(views(), st.sampled_from([Conserve(), OnlineOnly(), Paced()]))
def test_nobody_is_preempted_for_nothing(view: View, policy: Policy) -> None:
    judged = Judged(view, policy.plan(view))
    if judged.plan.preempted:
        last = judged.running[judged.plan.preempted[-1]]
        own = judged.blocks_for(last, last.tokens) if last.decode else 0  # it would have grown itself
        assert judged.blocks_left - last.blocks - own < view.watermark_blocks or judged.slots_left < 1


@settings(max_examples=EXAMPLES)
@given(views())
def test_somebody_survives_the_growth_of_others(view: View) -> None:
    offline_only = replace(view, online=(), waiting_online=())
    plan = Judged(offline_only, Conserve().plan(offline_only)).plan
    assert not view.offline or len(plan.preempted) < len(view.offline)


@settings(max_examples=EXAMPLES)
@given(views())
def test_a_paced_iteration_stays_within_its_time_or_is_as_small_as_can_be(view: View) -> None:
    judged = Judged(view, Paced().plan(view))
    tokens = judged.plan.tokens
    if not tokens:
        assert not judged.running
        front = next(iter(judged.waiting.values()), None)
        if front is None or front.restorable or view.free_slots <= view.reserved_slots:
            return
        assert judged.blocks_for(front, front.tokens) + view.watermark_blocks > view.free_blocks
    elif judged.ms() > view.slo.tbt_ms * ROUNDING:
        (name,) = tokens
        assert tokens[name] == 1 or judged.all[name].decode


@given(views())
def test_online_only_never_computes_an_offline_token(view: View) -> None:
    judged = Judged(view, OnlineOnly().plan(view))
    assert not judged.offline_tokens
    assert judged.plan.limit_ms is None


@given(views())
def test_the_baselines_leave_everything_to_vllm(view: View) -> None:
    assert Priority().plan(view) is None
    assert NonPreemptive().plan(view) is None
    assert not Priority().spares_offline
    assert NonPreemptive().spares_offline
    assert set(SERVING) < set(POLICIES)


@settings(max_examples=EXAMPLES)
@given(views())
def test_a_prefix_is_computed_twice_only_when_all_others_are_served(view: View) -> None:
    roomy = replace(view, free_blocks=10_000, free_slots=50)
    judged = Judged(roomy, Conserve().plan(roomy))
    planned = list(judged.plan.tokens)
    again = {
        request.name
        for request in view.waiting_offline
        if request.name in planned and judged.computed_for(request, planned[: planned.index(request.name)])
    }
    if again:
        first = min(planned.index(name) for name in again)
        for request in view.waiting_offline:
            if not judged.served(request):
                assert request.name in again or judged.computed_for(request, planned[:first])


def sharing(count: int, *, tokens: int = 100, behind: int = 0) -> list[Candidate]:
    """Waiting rows that all begin alike, and others behind them."""
    prefix = [f"p{n}" for n in range(tokens // 16)]
    alike = [Candidate(f"alike-{n}", tokens, 0, prefix=prefix) for n in range(count)]
    return [*alike, *(Candidate(f"other-{n}", 100, 0) for n in range(behind))]


def test_a_row_whose_prefix_is_being_computed_is_held_out_while_others_fill_the_iteration() -> None:
    for policy in (Conserve(), Paced()):
        plan = Judged(view := spacious(waiting_offline=sharing(3, behind=6)), policy.plan(view)).plan
        assert plan.admitted == ["alike-0", "other-0", "other-1", "other-2", "other-3"]


def test_a_row_held_out_is_taken_where_nobody_else_fills_the_iteration() -> None:
    plan = Judged(view := spacious(waiting_offline=sharing(3, behind=1)), Conserve().plan(view)).plan
    assert plan.admitted == ["alike-0", "other-0", "alike-1", "alike-2"]


def test_a_row_held_out_is_taken_where_the_next_has_no_memory() -> None:
    large = Candidate("large", 400, 0)
    view = spacious(waiting_offline=[*sharing(2), large], free_blocks=20)
    assert Judged(view, Conserve().plan(view)).plan.admitted == ["alike-0", "alike-1"]


def test_rows_are_held_out_for_prompts_under_way_and_for_online_ones_too() -> None:
    waiting = sharing(1, behind=5)
    computing = Candidate("computing", 100, 0, False, 7, prefix=waiting[0].prefix)
    for lane in ("online", "offline"):
        view = spacious(waiting_offline=waiting, **{lane: [computing]})
        assert "alike-0" not in Judged(view, Conserve().plan(view)).plan.tokens
    computed = computing._replace(tokens=1, context=100, decode=True)
    view = spacious(waiting_offline=waiting, offline=[computed])
    assert "alike-0" in Judged(view, Conserve().plan(view)).plan.tokens


def test_what_is_cached_already_holds_nobody_out() -> None:
    waiting = [row._replace(tokens=4, context=96, blocks=6) for row in sharing(3)]
    view = spacious(waiting_offline=waiting)
    assert Judged(view, Conserve().plan(view)).plan.admitted == ["alike-0", "alike-1", "alike-2"]


def test_no_more_rows_are_looked_at_than_can_be_held_out() -> None:
    read: list[int] = []

    def endless() -> Iterable[Candidate]:
        for n in range(10**9):
            read.append(n)
            yield Candidate(f"r{n}", 100, 0, prefix=["p"] * 6)

    Conserve().plan(spacious(waiting_offline=endless()))
    assert len(read) <= MOST_HELD + 6


def test_waiting_requests_are_read_only_as_far_as_they_fit() -> None:
    def endless() -> Iterable[Candidate]:
        for n in range(10**9):
            read.append(n)
            yield Candidate(f"r{n}", 100, 0)

    for policy in (Conserve(), Paced()):
        read: list[int] = []
        policy.plan(spacious(waiting_offline=endless()))
        assert len(read) <= 6


def test_a_model_without_a_constant_does_not_shut_offline_requests_out() -> None:
    model = ConServeModel.of(0.1, 0, 0, 0, 0, 0, 0, 0)
    view = spacious(model=model, slo=Slo(ttft_ms=1000, tbt_ms=100), waiting_offline=[Candidate("r", 100, 0)])
    assert Judged(view, Conserve().plan(view)).offline_tokens


def test_nobody_is_preempted_for_decode_steps_that_there_is_no_time_for() -> None:
    """The TBT is too tight for offline tokens, and the KV cache is full."""
    offline = [Candidate(f"off-{n}", 1, 64, True, 4) for n in range(3)]
    online = [Candidate("on", 1, 20, True, 2)]
    view = spacious(online=online, offline=offline, slo=Slo(tbt_ms=1.0), free_blocks=0)
    assert not Judged(view, Conserve().plan(view)).plan.preempted


def test_the_last_running_request_is_not_preempted_for_its_own_growth() -> None:
    view = spacious(offline=[Candidate("r", 1, 64, True, 4)], free_blocks=0)
    assert not Judged(view, Conserve().plan(view)).plan.preempted


@pytest.mark.parametrize("count", [1, 2, 39, 40, 41, 200])
def test_as_many_decode_steps_run_as_there_is_time_for(count: int) -> None:
    """10 ms and 0.3 for each, so that 40 of them take the 22."""
    model = ConServeModel.of(0.2, 0, 0, 0, 0.1, 0, 0, 10.0)
    decodes = [Candidate(f"r{n}", 1, 20, True, 2) for n in range(count)]
    view = spacious(model=model, offline=decodes, slo=Slo(tbt_ms=22.0 * ROUNDING))
    tokens = Judged(view, Paced().plan(view)).plan.tokens
    assert list(tokens) == [request.name for request in decodes[:40]]


def test_offline_requests_are_not_admitted_into_the_watermark() -> None:
    waiting = [Candidate("r", 160, 0)]
    for free_blocks, admitted in ((11, []), (12, ["r"])):
        view = spacious(waiting_offline=waiting, free_blocks=free_blocks, watermark_blocks=2)
        assert Judged(view, Conserve().plan(view)).plan.admitted == admitted


def test_a_block_for_every_second_running_request_is_kept_free() -> None:
    running = [Candidate(f"r{n}", 1, 20, True, 2) for n in range(4)]
    for free_blocks, admitted in ((11, []), (12, ["new"])):
        view = spacious(offline=running, waiting_offline=[Candidate("new", 160, 0)], free_blocks=free_blocks)
        assert Judged(view, Conserve().plan(view)).plan.admitted == admitted


@pytest.mark.parametrize(
    ("age_ms", "tokens"),
    [
        (0.0, range(60, 100)),  # five chunks in 20 ms each are early enough
        (950.0, range(400, 401)),  # they are not, and the prompt is computed at full speed
    ],
)
def test_an_online_prompt_is_cut_to_the_tbt_of_others_while_that_is_early_enough(
    age_ms: float, tokens: range
) -> None:
    view = spacious(
        online=[Candidate("decode", 1, 20, True, 2)],
        waiting_online=[Candidate("prompt", 400, 0, age_ms=age_ms)],
        waiting_offline=[Candidate("offline", 400, 0)],
        slo=Slo(ttft_ms=1000.0, tbt_ms=20.0),
    )
    plan = Judged(view, Conserve().plan(view)).plan
    assert plan.tokens["prompt"] in tokens
    assert "offline" not in plan.tokens


@pytest.mark.parametrize(("age_ms", "waits"), [(0.0, True), (960.0, False)])
def test_an_online_prompt_waits_an_iteration_that_has_no_time_for_it_if_it_can(
    age_ms: float, waits: bool
) -> None:
    view = spacious(
        online=[Candidate("decode", 1, 20, True, 2)],
        waiting_online=[Candidate("prompt", 400, 0, age_ms=age_ms)],
        slo=Slo(ttft_ms=1000.0, tbt_ms=10.2),
    )
    assert ("prompt" not in Judged(view, Conserve().plan(view)).plan.tokens) == waits


def test_an_online_prompt_does_not_hold_up_first_tokens_unless_many_wait() -> None:
    """A token takes 0.1 ms, an iteration 10 more: together the first waits for 40 ms, apart the second for 10."""
    first, second = Candidate("first", 100, 0), Candidate("second", 400, 0)

    def served(*prompts: Candidate, queued: int, ttft_ms: float = 2000.0) -> list[str]:
        view = spacious(waiting_online=prompts, queued_online=queued, slo=Slo(ttft_ms=ttft_ms))
        return list(Conserve().plan(view).tokens)

    assert served(first, second, queued=2) == ["first"]
    assert served(first, second, queued=20) == ["first", "second"]
    assert served(first, second, queued=2, ttft_ms=inf) == ["first", "second"]
    assert served(first, second._replace(tokens=10), queued=2) == ["first", "second"]
    assert served(first._replace(answered=True), second, queued=2) == ["first", "second"]


def test_a_paced_prompt_that_does_not_fit_computes_one_token() -> None:
    view = spacious(offline=[Candidate("r", 500, 0, False, 40)], slo=Slo(tbt_ms=1.0))
    assert Judged(view, Paced().plan(view)).plan.tokens == {"r": 1}


def spacious(**changes: object) -> View:
    """A view with room for five requests of a hundred tokens."""
    room = {
        "model": ConServeModel.of(0.1, 0, 0, 0.001, 0.1, 0.1, 0, 10.0),
        "slo": Slo(),
        "max_tokens": 500,
        "free_slots": 50,
        "free_blocks": 1000,
        "block_tokens": 16,
    }
    return View(**{**room, **changes})  # type: ignore[arg-type]


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

    @property
    def wanted(self) -> int:
        return self.prompt + self.done - self.computed

    def candidate(self) -> Candidate:
        decode = self.computed >= self.prompt and self.wanted == 1
        return Candidate(self.name, self.wanted, self.computed, decode, self.blocks)


@dataclass(slots=True)
class Engine:
    """Applies plans to requests; keeps no prefix of a preempted one."""

    policy: Policy
    model: LatencyModel
    slo: Slo
    blocks: int
    block_tokens: int
    slots: int
    max_tokens: int
    waiting: list[Work]
    running: list[Work] = field(default_factory=list)
    computed: int = 0
    preemptions: int = 0

    def step(self) -> None:
        plan = self.policy.plan(self.view())
        assert plan is not None
        assert plan.tokens, "the engine stands still"
        by_name = {work.name: work for work in (*self.running, *self.waiting)}
        for name in plan.preempted:
            victim = by_name[name]
            victim.blocks = victim.computed = 0
            self.preemptions += 1
            self.running.remove(victim)
            self.waiting.append(victim)
        for name in plan.admitted:
            self.waiting.remove(by_name[name])
            self.running.append(by_name[name])
        for works in (self.waiting, self.running):
            works.sort(key=lambda work: int(work.name))
        for name, tokens in plan.tokens.items():
            self.compute(by_name[name], tokens)
        assert self.free_blocks() >= 0

    def compute(self, work: Work, tokens: int) -> None:
        work.computed += tokens
        self.computed += tokens
        work.blocks = max(work.blocks, ceil(work.computed / self.block_tokens))
        if work.wanted == 0:
            work.done += 1
        if work.done == work.output:
            self.running.remove(work)

    def free_blocks(self) -> int:
        return self.blocks - sum(work.blocks for work in self.running)

    def view(self) -> View:
        return View(
            offline=[work.candidate() for work in self.running],
            waiting_offline=[work.candidate() for work in self.waiting],
            model=self.model,
            slo=self.slo,
            max_tokens=self.max_tokens,
            free_slots=self.slots - len(self.running),
            free_blocks=self.free_blocks(),
            block_tokens=self.block_tokens,
        )


@settings(max_examples=examples(100))
@given(st.data())
def test_offline_work_is_always_finished_and_little_of_it_done_twice(data: st.DataObject) -> None:
    draw = data.draw
    lengths = st.tuples(st.integers(1, 120), st.integers(1, 80))
    works = [Work(str(n), *sizes) for n, sizes in enumerate(draw(st.lists(lengths, min_size=1, max_size=25)))]
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    largest = max(ceil((work.prompt + work.output) / block_tokens) for work in works)
    engine = Engine(
        policy=draw(st.sampled_from([Conserve(), Paced()])),
        model=ConServeModel.of(0.05, 1e-5, 1e-5, 1e-3, 0.1, 0.5, 1e-3, draw(st.sampled_from([5.0, 15.0]))),
        slo=Slo(ttft_ms=draw(st.sampled_from([inf, 500.0])), tbt_ms=draw(st.sampled_from([inf, 100.0]))),
        blocks=largest + draw(st.integers(0, 3 * largest)),
        block_tokens=block_tokens,
        slots=draw(st.integers(1, 16)),
        max_tokens=draw(st.sampled_from([16, 64, 512])),
        waiting=works,
    )
    work = sum(work.prompt + work.output - 1 for work in works)
    while engine.running or engine.waiting:
        engine.step()
        assert engine.computed <= 3 * work, f"{engine.preemptions} preemptions"
    assert all(work.done == work.output for work in works)


@pytest.mark.parametrize("spare", [{"reserved_slots": 3}, {"reserved_blocks": 30}])
def test_what_is_reserved_for_online_requests_is_not_given_to_further_offline_ones(
    spare: dict[str, int],
) -> None:
    waiting = [Candidate(f"offline-{number}", 10, 0) for number in range(10)]
    model = ConServeModel.of(0, 0, 0, 0, 0, 0, 0, 1.0)
    view = View(
        offline=[Candidate("running", 10, 0)], waiting_offline=waiting, model=model, slo=Slo(),
        max_tokens=2048, free_slots=8, free_blocks=50, block_tokens=2, **spare,
    )  # fmt: skip
    plan = Conserve().plan(view)
    assert len(plan.admitted) == {"reserved_slots": 5, "reserved_blocks": 3}[next(iter(spare))]
    alone = Conserve().plan(replace(view, offline=[], reserved_blocks=50))
    assert alone.admitted[0] == "offline-0"  # one may always run


def test_what_is_reserved_is_used_by_rows_that_lose_nothing_with_their_memory() -> None:
    waiting = [Candidate(f"offline-{number}", 10, 0) for number in range(10)]
    model = ConServeModel.of(0, 0, 0, 0, 0, 0, 0, 1.0)

    def admitted(*, saved: bool) -> int:
        view = View(
            offline=[Candidate("running", 1, 40, decode=True, blocks=21, saved=saved)],
            waiting_offline=waiting, model=model, slo=Slo(), max_tokens=2048, free_slots=8,
            free_blocks=50, reserved_blocks=30, block_tokens=2,
        )  # fmt: skip
        return len(Conserve().plan(view).admitted)

    assert admitted(saved=False) == 4
    assert admitted(saved=True) == 8  # of 30 blocks 21 could be freed at once


def test_blocks_that_several_rows_share_are_reserved_once() -> None:
    rows = [Candidate(f"row{n}", 1, 160, decode=True, blocks=10, saved=True) for n in range(4)]
    view = spacious(offline=rows, reserved_blocks=50, used_blocks=16)  # eight of them are everybody's
    assert revocable_blocks(view) == 16
    assert revocable_blocks(replace(view, used_blocks=40)) == 40
    assert revocable_blocks(replace(view, used_blocks=26, online=[Candidate("live", 1, 160, True, 10)])) == 16


def test_a_row_that_has_its_kv_back_is_not_refused_for_the_reserve() -> None:
    row = Candidate("row", 1, 319, blocks=20)
    others = [Candidate("other", 1, 40, decode=True, blocks=3)]
    view = spacious(offline=others, waiting_offline=[row], free_blocks=5, reserved_blocks=30)
    assert Conserve().plan(view).admitted == []
    assert Conserve().plan(replace(view, held=[row])).admitted == ["row"]


def test_kv_that_came_back_to_a_row_that_waits_is_taken_again_for_a_live_request() -> None:
    row = Candidate("row", 1, 320, blocks=20)
    view = spacious(
        waiting_online=[Candidate("live", 400, 0)],
        waiting_offline=[row],
        held=[row],
        free_blocks=12,
        block_tokens=16,
    )
    for policy in (Conserve(), OnlineOnly()):
        plan = policy.plan(view)
        assert plan.preempted == ["row"]
        assert plan.tokens == {"live": 400}


def test_a_row_that_grows_alone_takes_the_room_of_one_that_waits() -> None:
    held = Candidate("held", 1, 320, blocks=20)
    view = spacious(
        offline=[Candidate("row", 1, 64, True, 4)],
        waiting_offline=[held],
        held=[held],
        free_blocks=0,
        block_tokens=16,
    )
    plan = Conserve().plan(view)
    assert plan.preempted == ["held"]
    assert "row" in plan.tokens


def test_what_comes_back_for_one_row_is_not_brought_for_others_too() -> None:
    rows = [Candidate(f"r{n}", 100, 0, restorable=99, prefix=["p"] * 6) for n in range(3)]
    plan = Conserve().plan(spacious(waiting_offline=[*rows, Candidate("fresh", 100, 0)], block_tokens=16))
    assert plan.restored == ["r0"]
    assert plan.tokens == {"fresh": 100}
    later = spacious(waiting_offline=rows[1:], coming=frozenset(["p"]), block_tokens=16)
    assert not Conserve().plan(later).restored


@pytest.mark.parametrize("decode", [True, False])
def test_an_idle_engine_computes_something_whatever_its_model_says(decode: bool) -> None:
    slow = ConServeModel.of(*[1e6] * 8)  # so that no typical prompt keeps its promise, and none could wait
    view = spacious(model=slow, slo=Slo(ttft_ms=1000, tbt_ms=100), prompt_tokens=500)
    view = replace(view, waiting_offline=[Candidate("r", 100, 0)])
    if decode:
        view = replace(view, waiting_offline=(), offline=[Candidate("r", 1, 900, True, 60)])
    assert Conserve().plan(view).total == (1 if decode else view.block_tokens)
