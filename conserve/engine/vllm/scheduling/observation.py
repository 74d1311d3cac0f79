"""vLLM's scheduler as a policy sees it: a lazy picture. Looking at it changes no request, queue or KV block."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse
from math import inf
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.fairness import fair_order
from conserve.engine.policy.kv_groups import KvGroup, blocks_taken
from conserve.engine.policy.view import (
    DEFAULT_CLASS,
    OFFLINE_PRIORITY,
    Candidate,
    Image,
    Lazy,
    ReadOnly,
    Slo,
    View,
)
from conserve.engine.runtime.traffic import Traffic
from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.lane import is_online
from conserve.engine.vllm.scheduling.encoders import to_encode
from conserve.profiles.model import LatencyModel

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing

MOST_PASSED = 32  # waiting requests passed over since their restore has to wait; then the queue ends
FAR = (1 << 30) - 1  # tokens: beyond every window
STATES = 2  # blocks of a request where layers have a state


class Picture:
    """The scheduler between two iterations. It holds until a plan is applied.

    Requests that wait for a grammar or for their KV are taken as they are: asking vLLM about them would change
    them (`application.make_ready` does that before).
    """

    def __init__(self, scheduler: CoServing, traffic: Traffic, *, surcharge_ms: float) -> None:
        """`surcharge_ms`: time of a prompt token with logprobs beyond that of one without."""
        self.looked: list[tuple[Request, int]] = []  # waiting offline requests that were read, their context
        self._scheduler, self._traffic = scheduler, traffic
        self._manager = scheduler.kv_cache_manager
        self._kinds = self._manager.coordinator.single_type_managers  # one for each group of KV blocks
        self._blocks_of = self._kinds[0].req_to_blocks
        self._block_tokens: int = self._kinds[0].block_size
        self._kv_groups = scheduler.kv_groups
        self._surcharge_ms = surcharge_ms
        # By the time at which the next iteration begins.
        rest_s = scheduler.ahead.rest_ms(time.monotonic()) / 1e3
        self._now, self._wall = time.monotonic() + rest_s, time.time() + rest_s

    def view(self, slo: Slo, model: LatencyModel) -> View:
        """Make the view for a policy. A row and a waiting request are looked at when they are read."""
        scheduler = self._scheduler
        running = scheduler.running
        online = [*self._running([one for one in running if one.priority < OFFLINE_PRIORITY])]
        offline = Lazy(self._running([one for one in running if one.priority >= OFFLINE_PRIORITY]))
        holding = list(scheduler.kv_holding_waiting)  # they have KV blocks, or are getting them
        lanes, online_waits = scheduler.waiting, [*filter(is_online, holding)]
        online_lane, offline_lane = (lanes.online, lanes.offline) if admits(scheduler) else ((), ())
        ahead, monitor = scheduler.ahead.beside, scheduler.arrival_monitor
        rows_leave = monitor.may_leave_next and not (ahead or scheduler.online_grammars_compile)
        rows_join = rows_leave and monitor.separable
        adapters = self._adapters()
        return View(
            online=online,
            offline=offline,
            waiting_online=Lazy(self._waiting(chain(online_waits, self._in_turn(online_lane)))),
            waiting_offline=Lazy(self._waiting(chain(filterfalse(is_online, holding), offline_lane))),
            queued_online=len(online_lane),
            model=model,
            slo=slo,
            slos=self._traffic.bounds_by_class(),
            classes=self._traffic.class_of,
            served=self._traffic.served if self._traffic.classified else {},
            rows_leave=rows_leave,
            rows_join=rows_join,
            ahead=ahead,
            layers=monitor.layers,
            online_waited_ms=0.0 if monitor.separable else self._waited_ms(online),
            live_busy=self._traffic.live_busy.share,
            own_ms=0.0 if ahead else scheduler.own_time.ms,  # hidden where the device computes meanwhile
            waiting_with_blocks=Lazy(self._waiting_with_blocks(holding)),
            computing=frozenset(chain.from_iterable(map(self._under_way, scheduler.ahead.computing()))),
            batches=scheduler.batches,
            adapters=adapters,
            resting_adapters=self._resting(adapters, chain(online, offline)) if adapters else (),
            most_adapters=scheduler.lora_config.max_loras if scheduler.lora_config is not None else None,
            pushed=self._traffic.pushing.urgent,
            push_scale=self._traffic.pushing.scale,
            **scheduler.row_terms.of_view(
                time.monotonic(),
                scheduler.max_num_scheduled_tokens,
                chain(filterfalse(is_online, holding), offline_lane),
            ),
            **self._room(holding),
        )

    def _adapters(self) -> dict[str, int]:
        """LoRA adapters by request."""
        if self._scheduler.lora_config is None:
            return {}
        asked = ((name, request.lora_request) for name, request in self._scheduler.requests.items())
        return {name: lora.lora_int_id for name, lora in asked if lora is not None}

    def _resting(self, adapters: Mapping[str, int], running: Iterable[Candidate]) -> tuple[int, ...]:
        """LoRA adapters of running requests that are not among these: they have to wait a step."""
        shown = {one.name for one in running}
        resting = (one.request_id for one in self._scheduler.running if one.request_id not in shown)
        return tuple(adapters[name] for name in resting if name in adapters)

    def _waited_ms(self, online: Sequence[Candidate]) -> float:
        """Time of the last iteration if a request that decodes was not in it: it was the rows' turn."""
        last: Iteration = self._scheduler.last_iteration
        waited = any(request.decode and request.name not in last.tokens for request in online)
        return last.took_s * 1e3 if waited else 0.0

    def _running(self, requests: Iterable[Request]) -> Iterator[Candidate]:
        """Running requests of one lane with something to compute; a generator, for there may be hundreds."""
        scheduler, blocks_of = self._scheduler, self._blocks_of
        step, decode_tokens = scheduler.current_step + 1, 1 + scheduler.num_spec_tokens
        checkpoints = scheduler.checkpoints
        saves = checkpoints if checkpoints is not None and checkpoints.any_saved else None
        new = tuple.__new__  # a `Candidate` without a call in Python
        for request in requests:
            context, under_way = request.num_computed_tokens, request.num_output_placeholders
            tokens = request.num_tokens_with_spec + under_way - context
            # vLLM skips those whose token is not back yet, or whose last step may be under way.
            if tokens < 1 or step < request.next_decode_eligible_step or (under_way and may_end(request)):
                continue
            name = request.request_id
            blocks = self._blocks(request) if self._kv_groups else len(blocks_of.get(name, ()))
            offline = request.priority >= OFFLINE_PRIORITY
            saved = saves is not None and offline and saves.has_all_of(name)
            if tokens <= decode_tokens and context >= request.num_prompt_tokens:
                yield new(Candidate, (name, tokens, context, True, blocks, 0.0, True, 0.0, saved, 0, (), ()))
                continue
            if offline and (cap := scheduler.arrival_monitor.chunk(name)) is not None:
                tokens = min(tokens, cap)
            yield self._prompt(request, tokens, context, blocks, saved=saved)

    def _waiting(self, requests: Iterable[Request]) -> Iterator[Candidate]:
        """Waiting requests that vLLM could start; a generator, since there may be thousands."""
        scheduler, checkpoints = self._scheduler, self._scheduler.checkpoints
        skipped, passed = scheduler.last_iteration.skipped, 0
        for request in requests:
            if self._is_blocked(request) or request.request_id in skipped:
                continue
            if request.num_stale_output_tokens and not request.drop_stale_output:
                continue  # evicted with a token under way, which has to arrive first
            blocks, context = self._found(request)
            restorable = 0
            if checkpoints is not None and not request.num_computed_tokens:
                self.looked.append((request, context))
                restorable = checkpoints.restorable(request, context)
                later = restorable and scheduler.restores_pause and not is_online(request)
                if later or checkpoints.is_being_saved(request.request_id):
                    passed += 1
                    if passed == MOST_PASSED:
                        return
                    continue
            tokens = max(1, request.num_tokens - context)
            if tokens == 1:
                tokens += scheduler.num_spec_tokens  # vLLM may make it as long as a decode step
            yield self._prompt(request, tokens, context, blocks, restorable=restorable)

    def _in_turn(self, requests: Sequence[Request]) -> Iterable[Request]:
        """Waiting online requests in the order in which their classes are served."""
        if not self._traffic.classified:
            return requests
        return fair_order(
            requests,
            class_of=lambda request: self._traffic.class_of.get(request.request_id, DEFAULT_CLASS),
            cost_of=lambda request: request.num_prompt_tokens,
            level_of=lambda request: request.priority,
            served=self._served_with_prompts(),
        )

    def _served_with_prompts(self) -> dict[str, float]:
        """Cost of the tokens of each class, with those that its running prompts have still to compute."""
        served = self._traffic.served
        for request in filter(is_online, self._scheduler.running):
            left = request.num_prompt_tokens - request.num_computed_tokens
            served[self._traffic.class_of.get(request.request_id, DEFAULT_CLASS)] += max(0, left)
        return served

    def _waiting_with_blocks(self, holding: Iterable[Request]) -> Iterator[Candidate]:
        """Waiting offline requests with KV blocks: host memory has the KV of those whose KV has come back."""
        parked, checkpoints = self._scheduler.parking.names, self._scheduler.checkpoints
        for request in holding:
            name, context = request.request_id, request.num_computed_tokens
            if context and not (is_online(request) or self._is_blocked(request)):
                saved = name not in parked or (checkpoints is not None and checkpoints.has_all_of(name))
                yield Candidate(name, 1, context, blocks=self._blocks(request), saved=saved)

    def _room(self, holding: Iterable[Request]) -> dict[str, Any]:
        """Slots and KV blocks, and what arrivals will want of both.

        Of requests that hold KV blocks without running, rows whose KV comes back leave their slots to live ones.
        """
        blocked = [*filter(self._is_blocked, holding)]
        returning = sum(
            one.status == RequestStatus.WAITING_FOR_REMOTE_KVS and not is_online(one) for one in blocked
        )
        scheduler, manager, pool = self._scheduler, self._manager, self._manager.block_pool
        moment = time.monotonic()
        expected = self._traffic.expected(now=moment)
        typical = self._traffic.typical_prompt(now=moment)
        slots, free_blocks = slots_of(scheduler), pool.get_num_free_blocks()
        checkpoints = scheduler.checkpoints
        restores = checkpoints is not None and checkpoints.any_saved
        return {
            "prompt_tokens": typical,
            "rare_starts": self._traffic.rare_starts,
            "arrivals_per_s": self._traffic.arrivals_per_s(now=moment),
            "parks": scheduler.parking.on,
            "free_slots": slots - len(scheduler.running) - len(blocked) + returning,
            "reserved_slots": min(expected, slots // 2) + returning,
            "free_blocks": free_blocks,
            "kept_blocks": scheduler.prefixes.kept,
            "used_blocks": pool.num_gpu_blocks - 1 - free_blocks,  # one is vLLM's own
            "reserved_blocks": min(expected * self._blocks_of_prompt(typical), pool.num_gpu_blocks // 2),
            "watermark_blocks": manager.watermark_blocks if scheduler.running else 0,
            "unwritten_blocks": scheduler._inflight_prefill_reserved_blocks() if restores else 0,
            "coming": checkpoints.coming if checkpoints is not None else frozenset(),
            "block_tokens": self._block_tokens,
            "kv_groups": self._kv_groups,
        }

    def _prompt(
        self,
        request: Request,
        tokens: int,
        context: int,
        blocks: int,
        *,
        saved: bool = False,
        restorable: int = 0,
    ) -> Candidate:
        """A request whose prompt, or what it had computed before an eviction, is not computed yet."""
        return Candidate(
            request.request_id,
            tokens,
            context,
            False,
            blocks,
            self._age_ms(request),
            self._traffic.answered(request.request_id),
            self._surcharge_ms if surcharged(request) else 0.0,
            saved,
            restorable,
            self._prefix(request),
            self._images(request, context) if request.mm_features else (),
        )

    def _age_ms(self, request: Request) -> float:
        """Time since the request's arrival; of a live one without a token by the monotonic clock."""
        arrived = self._traffic.arrived_at(request.request_id)
        return 1e3 * (self._wall - request.arrival_time if arrived is None else self._now - arrived)

    def _images(self, request: Request, context: int) -> tuple[Image, ...]:
        """Images and sounds of a prompt that the encoders have not seen."""
        return to_encode(self._scheduler, request, context, self._scheduler.iterations.encoder_ms)

    def context_of(self, request: Request) -> int:
        """Tokens of a waiting request with their KV on the device."""
        return self._found(request)[1]

    def _found(self, request: Request) -> tuple[int, int]:
        """KV blocks that a waiting request has, or would share with running ones, and its tokens in KV blocks."""
        if context := request.num_computed_tokens:  # its KV was brought back, or it was parked
            return self._blocks(request), context
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0, 0
        # Not `get_computed_blocks`, which tells subscribers of KV events that it was asked.
        coordinator = self._manager.coordinator
        found, context, _ = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        found = found if self._kv_groups else found[:1]
        shared = (block.ref_cnt > 0 and not block.is_null for block in chain.from_iterable(found))
        return (sum(shared) if context else 0), context

    def _blocks(self, request: Request) -> int:
        """KV blocks that the request has, in all groups, but for those that vLLM frees before it gives more."""
        name, context = request.request_id, request.num_computed_tokens
        if not self._kv_groups:
            return len(self._blocks_of.get(name, ()))
        held: list[int] = [len(kind.req_to_blocks.get(name, ())) for kind in self._kinds]
        return sum(
            max(0, blocks - group.forgotten(context))
            for blocks, group in zip(held, self._kv_groups, strict=True)
        )

    def _blocks_of_prompt(self, tokens: int) -> int:
        if self._kv_groups:
            return blocks_taken(self._kv_groups, 0, tokens)
        return -(-tokens // int(self._block_tokens))

    def _prefix(self, request: Request) -> Sequence[bytes]:
        """Hashes of the request's full blocks, by which the prefix cache finds them; none if it is not asked."""
        kind, pool = self._manager.coordinator.single_type_managers[0], self._manager.block_pool
        same = pool.hash_block_size == kind.block_size  # they differ where layers are of several kinds
        asked = same and self._manager.prefix_cache_lookup_enabled(request)
        return ReadOnly(request.block_hashes) if asked else ()

    def _under_way(self, name: str) -> Sequence[bytes]:
        """Names of the KV blocks that iterations in flight compute for a request, wholly or in part."""
        request, size = self._scheduler.requests.get(name), self._block_tokens
        if request is None:
            return ()
        settled = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        return self._prefix(request)[settled // size : -(-request.num_computed_tokens // size)]

    def _is_blocked(self, request: Request) -> bool:
        """True if the request waits for a grammar, for its KV or for input."""
        return bool(self._scheduler._is_blocked_waiting_status(request.status))


def admits(scheduler: CoServing) -> bool:
    """True if vLLM takes in waiting requests that hold no KV blocks: it is not paused."""
    return _pause_of(scheduler) == "UNPAUSED"


def computes(scheduler: CoServing) -> bool:
    """False in a pause in which vLLM keeps all requests as they are (`/pause?mode=keep`)."""
    return _pause_of(scheduler) != "PAUSED_ALL"


def _pause_of(scheduler: CoServing) -> str:
    """Name of vLLM's state of pause; an older vLLM has none."""
    state = getattr(scheduler, "pause_state", None)
    return "UNPAUSED" if state is None else str(state.name)


def slots_of(scheduler: CoServing) -> int:
    """Requests that vLLM runs at a time: a limit of its own may be below the size of a batch."""
    return int(min(scheduler.max_num_running_reqs, getattr(scheduler, "max_num_active_reqs", inf)))


def may_end(request: Request) -> bool:
    """True if the step under way may be the request's last one."""
    last = request.num_prompt_tokens + request.max_tokens
    return bool(request.num_computed_tokens + 2 - request.num_output_placeholders >= last)


def surcharged(request: Request) -> bool:
    """True if the request wants logprobs of its prompt, which take time for each token beyond the model's."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is not None


def keeps_kv(scheduler: CoServing) -> bool:
    """False for a model without KV, as one that embeds: there is nothing to plan by."""
    return bool(scheduler.kv_cache_manager.coordinator.single_type_managers)


def kv_groups_of(manager: Any, config: Any) -> tuple[KvGroup, ...]:
    """Groups of KV blocks, by vLLM's configuration; none where a single one keeps the KV of all tokens."""
    in_flight = config.max_concurrent_batches * config.scheduler_config.max_num_batched_tokens
    groups = []
    for kind in manager.coordinator.single_type_managers:
        size, kept = kind.block_size, FAR - kind.get_num_skipped_tokens(FAR)
        if kept >= FAR:
            groups.append(KvGroup(size))
        elif kept <= 1:  # a state in place of KV: that of the last token, and the one that follows it
            groups.append(KvGroup(size, kept, STATES))
        else:  # a window, which may begin within a block
            groups.append(KvGroup(size, kept, -(-(kept + in_flight) // size) + 1))
    return () if len(groups) == 1 and groups[0].kept_tokens is None else tuple(groups)
