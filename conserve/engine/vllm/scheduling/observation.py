"""vLLM's scheduler as a policy sees it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, filterfalse
from typing import Any

from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.view import OFFLINE_PRIORITY, Candidate, Slo, View
from conserve.engine.runtime.traffic import Traffic
from conserve.engine.vllm.lane import is_online
from conserve.engine.vllm.scheduling.iterations import Iterations
from conserve.profiles.model import LatencyModel

MOST_PASSED = 32  # waiting requests whose restore has to wait, before others are not looked at either


def observe(scheduler: Any, iterations: Iterations, traffic: Traffic, slo: Slo, model: LatencyModel) -> View:
    """The requests that could compute something next, and the room for them."""
    manager = scheduler.kv_cache_manager
    kind = manager.coordinator.single_type_managers[0]
    blocks_of = kind.req_to_blocks
    decode_tokens = 1 + scheduler.num_spec_tokens
    now = time.time()
    moment = time.monotonic()
    free_blocks = manager.block_pool.get_num_free_blocks()
    expected, typical = traffic.expected(now=moment), traffic.typical_prompt(now=moment)
    # Who waits for a grammar arrives once more when it is compiled, and nobody is told.
    grammar = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    preemptible = scheduler.preemptions.acts and all(r.status != grammar for r in scheduler.waiting.online)
    online: list[Candidate] = []
    offline: list[Candidate] = []
    holding = list(scheduler.kv_holding_waiting)
    checkpoints = scheduler.checkpoints
    loading = sum(not _is_ready(scheduler, request) for request in holding)
    for request in scheduler.running:
        context = request.num_computed_tokens
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - context
        if tokens < 1 or _is_held_back(scheduler, request):
            continue
        name = request.request_id
        blocks = len(blocks_of.get(name, ()))
        lane = online if request.priority < OFFLINE_PRIORITY else offline
        saved = checkpoints is not None and lane is offline and checkpoints.has_all_of(name)
        if tokens <= decode_tokens and context >= request.num_prompt_tokens:
            lane.append(Candidate(name, tokens, context, True, blocks, 0.0, True, 0.0, saved))
        else:
            if lane is offline and (cap := scheduler.preemptions.chunk(name)) is not None:
                tokens = min(tokens, cap)
            age_ms = (now - request.arrival_time) * 1e3
            extra_ms = iterations.surcharge_ms if surcharged(request) else 0.0
            answered = traffic.answered(name)
            prefix = prefix_of(scheduler, request)
            lane.append(
                Candidate(
                    *(name, tokens, context, False, blocks, age_ms, answered, extra_ms),
                    saved=saved,
                    prefix=prefix,
                )
            )
    return View(
        online=online,
        offline=offline,
        waiting_online=waiting(
            scheduler, chain(filter(is_online, holding), scheduler.waiting.online), iterations, traffic, now
        ),
        waiting_offline=waiting(
            scheduler,
            chain(filterfalse(is_online, holding), scheduler.waiting.offline),
            iterations,
            traffic,
            now,
        ),
        queued_online=len(scheduler.waiting.online),
        model=model,
        slo=slo,
        prompt_tokens=typical,
        arrivals_per_s=traffic.arrivals_per_s(now=moment),
        preemptible=preemptible,
        resumable=preemptible and scheduler.preemptions.separable,
        max_tokens=scheduler.max_num_scheduled_tokens,
        free_slots=scheduler.max_num_running_reqs - len(scheduler.running) - loading,
        reserved_slots=min(expected, scheduler.max_num_running_reqs // 2),
        free_blocks=free_blocks,
        used_blocks=manager.block_pool.num_gpu_blocks - 1 - free_blocks,  # one is vLLM's own
        watermark_blocks=manager.watermark_blocks if scheduler.running else 0,
        reserved_blocks=min(
            expected * -(-typical // kind.block_size), manager.block_pool.num_gpu_blocks // 2
        ),
        unwritten_blocks=scheduler._inflight_prefill_reserved_blocks()
        if checkpoints is not None and checkpoints.any_saved
        else 0,
        held=[
            Candidate(
                r.request_id,
                1,
                r.num_computed_tokens,
                blocks=len(blocks_of.get(r.request_id, ())),
                saved=True,
            )
            for r in holding
            if not is_online(r)
            and r.num_computed_tokens
            and not scheduler._is_blocked_waiting_status(r.status)
        ],
        coming=checkpoints.coming if checkpoints is not None else frozenset(),
        block_tokens=kind.block_size,
    )


def _is_ready(scheduler: Any, request: Request) -> bool:
    """Whether vLLM could start it. Asking is what makes it ready once its grammar or its KV is there."""
    return bool(
        not scheduler._is_blocked_waiting_status(request.status)
        or scheduler._handle_blocked_waiting_request(request)
    )


def _is_held_back(scheduler: Any, request: Request) -> bool:
    """Whether vLLM skips it as of now: the step under way may be its last, or its token is not back yet."""
    under_way = request.num_output_placeholders
    last = request.num_prompt_tokens + request.max_tokens
    return bool(
        (under_way and request.num_computed_tokens + 2 - under_way >= last)
        or scheduler.current_step + 1 < request.next_decode_eligible_step
    )


def waiting(
    scheduler: Any, lane: Iterable[Request], iterations: Iterations, traffic: Traffic, now: float
) -> Iterator[Candidate]:
    """The waiting requests that vLLM could start, one at a time since there may be thousands."""
    blocks_of = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    passed = 0
    for request in lane:
        if not _is_ready(scheduler, request):
            continue
        if request.num_stale_output_tokens and not request.drop_stale_output:
            continue  # preempted with a token under way, which has to arrive first
        restorable = 0
        if context := request.num_computed_tokens:  # its KV was brought to it
            blocks = len(blocks_of.get(request.request_id, ()))
        else:
            found, context, _ = scheduler.kv_cache_manager.get_computed_blocks(request)
            blocks = sum(block.ref_cnt > 0 for block in found.blocks[0]) if context else 0
            if (checkpoints := scheduler.checkpoints) is not None:
                restorable = checkpoints.restorable(request, context)
                later = restorable and scheduler.restores_pause
                if later or checkpoints.is_being_saved(request.request_id):
                    passed += 1
                    if passed == MOST_PASSED:
                        return
                    continue
        tokens = max(1, request.num_tokens - context)
        if tokens == 1:
            tokens += scheduler.num_spec_tokens  # vLLM may make it as long as a decode step
        yield Candidate(
            request.request_id,
            tokens,
            context,
            False,
            blocks,
            (now - request.arrival_time) * 1e3,
            traffic.answered(request.request_id),
            iterations.surcharge_ms if surcharged(request) else 0.0,
            restorable=restorable,
            prefix=prefix_of(scheduler, request),
        )


def prefix_of(scheduler: Any, request: Request) -> Sequence[bytes]:
    """The names that vLLM's prefix cache has for the request's full blocks; none if it is not to look there."""
    manager = scheduler.kv_cache_manager
    kind = manager.coordinator.single_type_managers[0]
    same = (
        manager.block_pool.hash_block_size == kind.block_size
    )  # they differ where layers are of several kinds
    hashes: Sequence[bytes] = request.block_hashes
    return hashes if same and manager.prefix_cache_lookup_enabled(request) else ()


def surcharged(request: Request) -> bool:
    """Whether its prompt takes longer than its tokens tell: logits and logprobs for each of them."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is not None
