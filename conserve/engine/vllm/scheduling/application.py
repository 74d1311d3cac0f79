"""A plan applied to vLLM's scheduler: the only place that writes what a policy has said (docs/adr/0005).

Before the view, `make_ready` asks vLLM which requests have become ready. Elsewhere `settlement` takes back what
rows that left were to compute, and `checkpoint.blocks` holds KV blocks while they are copied.

vLLM's own `schedule` runs with the requests that the plan admits as all that waits, with each request capped at the
plan's tokens, and after the plan's evictions. What a plan knows nothing of (encoder inputs, grammars,
speculative tokens) is decided by vLLM.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.plan import Plan
from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.lane import is_online, is_running
from conserve.engine.vllm.scheduling.observation import admits
from conserve.engine.vllm.scheduling.parking import lose
from conserve.profiles.batch import Batch, Slice

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing

RESTORES_PAUSE = 8  # iterations without a restore, after vLLM had no room for one


def apply(
    scheduler: CoServing,
    iteration: Iteration,
    schedule: Callable[[], SchedulerOutput],
    *,
    prompts_held_back: bool,
) -> SchedulerOutput:
    """Have vLLM's `schedule` do what the iteration's plan says; without a plan, as it likes.

    `prompts_held_back` is true if vLLM takes no waiting request in this time.
    """
    plan = iteration.plan
    if plan is None:
        with registered_late(scheduler.kv_cache_manager, on=iteration.registers_late):
            return schedule()
    park(scheduler, plan.parked, iteration.started)
    evict(scheduler, plan.evicted, iteration.started)
    admitted = [scheduler.requests[name] for name in plan.admitted]
    restored = [scheduler.requests[name] for name in plan.restored]
    out_of_order = any(request.status == RequestStatus.PREEMPTED for request in admitted)
    out_of_order = out_of_order or _overtaken(scheduler, admitted) or _behind_rows(scheduler, admitted)
    starts = bool(admitted or restored)
    late = registered_late(scheduler.kv_cache_manager, on=iteration.registers_late, starts=starts)
    waits, alone = alone_waiting(scheduler, [*restored, *admitted]), _spares_rows(scheduler, plan)
    limited = limited_to(scheduler, plan, in_parts(scheduler, plan))
    with waits as taken, limited, late, live_alone(scheduler, on=alone):
        output = schedule()
    scheduler.restores_pause = max(0, scheduler.restores_pause - 1)
    if any(request.status != RequestStatus.WAITING_FOR_REMOTE_KVS for request in restored):
        scheduler.restores_pause = RESTORES_PAUSE
    if out_of_order:  # vLLM evicts from the end, where the last arrivals should be, and begins with the first
        scheduler.running.sort()
    # A connector may not know yet what KV it has, or begin to bring it: then vLLM skips the request.
    skipped = [request for request in admitted if request in taken and not is_running(request)]
    blocked = scheduler._is_blocked_waiting_status
    iteration.skipped = frozenset(one.request_id for one in skipped if not blocked(one.status))
    # Some requests take all of their tokens or none: then vLLM composes the next iteration alone. Not after
    # evictions, which free less than planned where blocks are shared: the next ones free more.
    in_use = output.total_num_scheduled_tokens or skipped
    iteration.stalled = bool(plan.tokens) and not (plan.evicted or in_use)
    # Elsewhere `in_the_way` sees to images and sounds. An encoder that took one may have no time for another.
    room_alone = scheduler.is_encoder_decoder and not output.scheduled_encoder_inputs
    iteration.turns_away = (
        not plan.evicted
        and any(
            is_online(request) and request not in taken
            for request in admitted
            if room_alone or not request.mm_features
        )
        and admits(scheduler)
        and not prompts_held_back
    )
    return output


def make_ready(scheduler: CoServing) -> None:
    """Have vLLM see whose KV has come and which grammars are compiled: asking writes a request's status."""
    for request in [*scheduler.kv_holding_waiting, *scheduler.grammars.values()]:
        blocked = scheduler._is_blocked_waiting_status(request.status)
        if not blocked or scheduler._handle_blocked_waiting_request(request):
            scheduler.grammars.pop(request.request_id, None)


def make_way(scheduler: CoServing) -> None:
    """Evict the last row that runs, if vLLM had no room beside rows for a live request of the last plan."""
    if scheduler.last_iteration.turns_away:
        rows = [request.request_id for request in scheduler.running if not is_online(request)]
        evict(scheduler, rows[-1:], time.monotonic())


def online_alone(scheduler: CoServing, most_tokens: int) -> Plan:
    """Plan an iteration of online requests that vLLM composes as it likes."""
    make_ready(scheduler)
    blocked = scheduler._is_blocked_waiting_status
    with_kv = [one for one in scheduler.kv_holding_waiting if is_online(one) and not blocked(one.status)]
    starts = with_adapters(scheduler, chain(with_kv, scheduler.waiting.online))
    waiting = [request.request_id for request in starts]
    running = [request.request_id for request in scheduler.running if is_online(request)]
    whole = Batch.of([Slice(most_tokens, 0)])
    return Plan(tokens=dict.fromkeys([*running, *waiting], most_tokens), batch=whole, admitted=waiting)


def with_adapters(scheduler: CoServing, requests: Iterable[Request]) -> Iterator[Request]:
    """Yield requests whose LoRA adapters fit beside those of all that run, rows that wait for their turn too."""
    used = {one.lora_request.lora_int_id for one in scheduler.running if one.lora_request is not None}
    for request in requests:
        if scheduler.lora_config is None or request.lora_request is None:
            yield request
        elif len(used | {request.lora_request.lora_int_id}) <= scheduler.lora_config.max_loras:
            used.add(request.lora_request.lora_int_id)
            yield request


def evict(scheduler: CoServing, names: Sequence[str], now: float) -> None:
    """Free the KV blocks of requests that run, or that wait and have KV blocks."""
    for name in names:
        request = scheduler.requests[name]
        if is_running(request):
            preempt(scheduler, request, now)
        else:
            # A row that waits with blocks and was not parked has been restored: host memory still has its KV.
            if name in scheduler.parking.names:
                scheduler.parking.names.remove(name)
                lose(scheduler, request)
            scheduler.kv_holding_waiting.remove_requests([request])
            scheduler.kv_cache_manager.free(request)
            scheduler._inflight_prefills.discard(request)
            request.num_computed_tokens = 0
            scheduler.waiting.add_request(request)


def preempt(scheduler: CoServing, request: Request, now: float) -> None:
    """Free a running request's KV blocks; if other engines get them at its end, no token under way may end it."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now, drop_stale_output=scheduler.requires_kv_delivery)


def park(scheduler: CoServing, names: Sequence[str], now: float) -> None:
    """Free the slots of running rows; one that could not go on where it was loses its KV blocks too."""
    for name in names:
        request = scheduler.requests[name]
        computed, under_way = request.num_computed_tokens, request.num_output_placeholders
        if not scheduler.parking.keeps(request):
            preempt(scheduler, request, now)
            continue
        scheduler.running.remove(request)
        with keeping_blocks(scheduler):
            scheduler._preempt_request(request, now)
        scheduler.waiting.remove_request(request)
        request.num_computed_tokens, request.num_output_placeholders = computed, under_way
        request.num_stale_output_tokens = 0  # the KV of tokens under way counts
        scheduler.kv_holding_waiting.add_request(request)
        scheduler.parking.names.add(name)
        scheduler.parking.count += 1


@contextlib.contextmanager
def keeping_blocks(scheduler: CoServing) -> Iterator[None]:
    """Have vLLM preempt requests and free no KV block of theirs."""
    scheduler.parking.under_way, scheduler._free_request_blocks = True, as_it_stays
    try:
        yield
    finally:
        scheduler.parking.under_way = False
        del scheduler._free_request_blocks


def as_it_stays(request: Request) -> None:
    """Stand in for `_free_request_blocks`."""


class WaitingNow(FCFSRequestQueue):  # type: ignore[misc]
    """Requests that wait for one iteration; those that vLLM takes out, to start or to skip them, are in `taken`."""

    def __init__(self, requests: Iterable[Request], taken: set[Request]) -> None:
        super().__init__(requests)
        self._taken = taken

    def pop_request(self) -> Request:
        """Take the first request out."""
        request = super().pop_request()
        self._taken.add(request)
        return request


@contextlib.contextmanager
def alone_waiting(scheduler: CoServing, requests: Sequence[Request]) -> Iterator[set[Request]]:
    """Let only these requests wait, in this order; the ones that vLLM does not start wait in their lanes again.

    Yields the set of those that vLLM starts or skips. The others find no room.
    """
    lanes, holding, taken = scheduler.waiting, scheduler.kv_holding_waiting, set[Request]()
    with_kv = set(holding)
    here = [request for request in requests if request in with_kv]
    others = [request for request in requests if request not in with_kv]
    if here:
        holding.remove_requests(here)
    lanes.take(others)
    scheduler.waiting, scheduler.kv_holding_waiting = WaitingNow(others, taken), WaitingNow(here, taken)
    try:
        yield taken
    finally:
        lanes.prepend_requests(scheduler.waiting)
        holding.prepend_requests(scheduler.kv_holding_waiting)
        scheduler.waiting, scheduler.kv_holding_waiting = lanes, holding


@contextlib.contextmanager
def live_alone(scheduler: CoServing, *, on: bool) -> Iterator[None]:
    """Let only live requests run: vLLM goes through all that run before it comes to an arrival.

    Nothing changes unless `on`.
    """
    if not on:
        yield
        return
    rows = [request for request in scheduler.running if not is_online(request)]
    scheduler.running = [request for request in scheduler.running if is_online(request)]
    try:
        yield
    finally:
        scheduler.running.extend(rows)


def _spares_rows(scheduler: CoServing, plan: Plan) -> bool:
    """True if an arrival begins beside no row, and vLLM need not evict one for want of KV blocks."""
    if not plan.admitted or plan.restored or scheduler.num_spec_tokens or scheduler.kv_groups:
        return False
    if not scheduler.offline.isdisjoint(plan.tokens):
        return False
    size = scheduler.block_size
    wanted = sum(-(-scheduler.requests[name].num_tokens // size) for name in plan.admitted)
    wanted += sum(1 + tokens // size for tokens in plan.tokens.values())
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool(wanted + scheduler.kv_cache_manager.watermark_blocks <= free)


def in_parts(scheduler: CoServing, plan: Plan) -> Mapping[str, int]:
    """The plan's tokens; a parked row goes on with no more of them than the part of a chunk that it has kept.

    The plan counts KV blocks for all of its prompt, as vLLM does for a request that waits.
    """
    chunk_of, tokens = scheduler.arrival_monitor.chunk, plan.tokens
    parts = {name: chunk_of(name) or tokens[name] for name in scheduler.parking.names & {*plan.admitted}}
    return {**tokens, **{name: min(part, tokens[name]) for name, part in parts.items()}} if parts else tokens


@contextlib.contextmanager
def limited_to(scheduler: CoServing, plan: Plan, tokens: Mapping[str, int]) -> Iterator[None]:
    """Give vLLM the plan's total as its budget, cap each request, and let only the plan's restores begin."""
    most_tokens, checkpoints = scheduler.max_num_scheduled_tokens, scheduler.checkpoints
    before_lookahead, aligned, before_encoders = caps(scheduler, tokens)
    if all_step(scheduler, plan):
        before_lookahead = as_it_is
    scheduler.max_num_scheduled_tokens = min(most_tokens, plan.total + bool(plan.restored))
    scheduler._reserve_prefill_lookahead = before_lookahead
    scheduler._mamba_block_aligned_split = aligned
    scheduler._try_schedule_encoder_inputs = before_encoders
    if checkpoints is not None:
        checkpoints.allowed = plan.restored
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = most_tokens
        del scheduler._reserve_prefill_lookahead, scheduler._mamba_block_aligned_split
        del scheduler._try_schedule_encoder_inputs
        if checkpoints is not None:
            checkpoints.allowed = None


def caps(
    scheduler: CoServing, planned: Mapping[str, int]
) -> tuple[Callable[..., int], Callable[..., int], Callable[..., Any]]:
    """Stand-ins for three methods that vLLM asks about each request's tokens before it allocates blocks for them.

    The last one chooses the images and sounds to encode: those in the plan's tokens, and none behind them. Where
    vLLM cuts no prompts into chunks (encoders, for one), a prompt that the plan would cut waits.
    """
    encoders = scheduler._try_schedule_encoder_inputs
    lookahead, split = scheduler._reserve_prefill_lookahead, scheduler._mamba_block_aligned_split
    spec_tokens, looks_ahead = scheduler.num_spec_tokens, bool(scheduler.num_prefill_lookahead)
    cuts = scheduler.scheduler_config.enable_chunked_prefill

    def capped(request: Request, tokens: int) -> int:
        cap = planned.get(request.request_id)
        if cap is None:  # deferred; a waiting one is not the plan's (a KV transfer that has arrived)
            return 0 if is_running(request) else tokens
        if spec_tokens and tokens == 1 + spec_tokens and not is_running(request):
            return tokens  # vLLM has made one token as long as a decode step, and insists on it
        return shorter(request, cap) if cap < tokens else tokens

    def shorter(request: Request, cap: int) -> int:
        return cap if cuts or request.num_computed_tokens >= request.num_prompt_tokens else 0

    def before_lookahead(request: Request, computed: int, tokens: int) -> int:
        cap = None if spec_tokens else planned.get(request.request_id)
        if cap is None:
            tokens = capped(request, tokens)
        elif cap < tokens:  # as in `capped`, without another call for each request
            tokens = shorter(request, cap)
        return int(lookahead(request, computed, tokens)) if looks_ahead else tokens

    def aligned(request: Request, tokens: int, *args: Any, **kwargs: Any) -> int:
        tokens = capped(request, tokens)
        if not tokens:
            return 0
        # A chunk may end within a block only if a block is longer than this; the plan's total says nothing of that.
        total, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
        try:
            return int(split(request, tokens, *args, **kwargs))
        finally:
            scheduler.max_num_scheduled_tokens = total

    def before_encoders(request: Request, computed: int, tokens: int, *args: Any, **kwargs: Any) -> Any:
        return encoders(request, computed, capped(request, tokens), *args, **kwargs)

    return before_lookahead, aligned, before_encoders


def all_step(scheduler: CoServing, plan: Plan) -> bool:
    """True if the plan has a decode step of each running request and nothing else, so that it caps none."""
    steps = not (scheduler.num_spec_tokens or scheduler.num_prefill_lookahead or plan.batch.prefills)
    return steps and len(plan.tokens) == len(scheduler.running)


def as_it_is(request: Request, computed: int, tokens: int) -> int:
    """Stand in for `_reserve_prefill_lookahead` where no request has a prompt left."""
    return tokens


@contextlib.contextmanager
def registered_late(manager: Any, *, on: bool = True, starts: bool = True) -> Iterator[None]:
    """Allocate KV blocks without registering them for reuse: a row that leaves never computes them.

    Nothing changes unless `on`. vLLM says when to register the blocks of a request that starts, and says nothing of
    running ones. `starts` is False if none can start, which saves a call for each request.
    """
    if not on:
        yield
        return
    allocate = manager.allocate_slots

    def allocate_slots(*args: Any, delay_cache_blocks: bool = True, **kwargs: Any) -> Any:
        return allocate(*args, delay_cache_blocks=True, **kwargs)

    manager.allocate_slots = allocate_slots if starts else partial(allocate, delay_cache_blocks=True)
    try:
        yield
    finally:
        manager.allocate_slots = allocate


def _behind_rows(scheduler: CoServing, admitted: Sequence[Request]) -> bool:
    """True if a live request is admitted behind rows: vLLM would go through all of them to find it."""
    running = scheduler.running
    spares = scheduler.chosen_policy.traits.spares_offline  # vLLM evicts the request that was admitted last
    return bool(running) and not (spares or is_online(running[-1])) and any(map(is_online, admitted))


def _overtaken(scheduler: CoServing, admitted: Sequence[Request]) -> bool:
    """True if an offline request is admitted behind a later arrival, since it was deferred for its prefix."""
    offline = scheduler.offline
    last = next((request for request in reversed(scheduler.running) if request.request_id in offline), None)
    turn = [one for one in (last, *admitted) if one is not None and one.request_id in offline]
    return any(later < earlier for earlier, later in pairwise(turn))
