"""An iteration is settled: rows that left are rewound, KV blocks of the others are registered for reuse.

What a refused iteration was to encode is encoded later. All of it writes into vLLM's requests and the managers of
its caches.

The next iteration may have been scheduled already, with the tokens of rows that left. The worker refuses it, and
vLLM drops what it brings for these rows (`num_stale_output_tokens`), as after an eviction.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.lane import is_running
from conserve.engine.vllm.scheduling.encoders import strike_out

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


def settle(scheduler: CoServing, iteration: Iteration) -> None:
    """Rewind the rows that left, and register the blocks of the others for reuse.

    This comes before vLLM takes the results in, which may free the requests.
    """
    if iteration.plan is not None and iteration.plan.pushed:
        scheduler.traffic.pushing.computed(iteration.plan.pushed, but=iteration.left)
    if not iteration.registers_late:
        scheduler.arrival_monitor.computed(iteration.tokens)
        return
    scheduler.arrival_monitor.end(iteration)
    if iteration.refused:
        strike_out(scheduler, iteration.encodes)
    left, requests, size = iteration.left, scheduler.requests, scheduler.block_size
    uncounted = 0
    for name, tokens in iteration.tokens.items():
        request = requests.get(name)
        if request is None or not is_running(request):
            scheduler.arrival_monitor.forget(name)  # aborted meanwhile, or evicted by the next plan
        elif request.num_stale_output_tokens:
            continue  # rewound with an earlier iteration
        elif name in left:
            uncounted += rewind(scheduler, request, tokens)
        else:
            # vLLM counts tokens as computed once they are scheduled. This is the count behind the iteration that is
            # settled, the oldest one in flight.
            computed = request.num_computed_tokens - request.num_in_flight_tokens + tokens
            if tokens > 1 or not computed % size:  # most steps fill no block
                scheduler.kv_cache_manager.cache_blocks(request, min(computed, request.num_tokens))
    if uncounted:
        scheduler.traffic.offline(-uncounted, at=time.monotonic())


def rewind(scheduler: CoServing, request: Request, tokens: int) -> int:
    """Set the counters back to before the iteration; the row keeps its blocks, which were never registered.

    `tokens` are the row's in this iteration; more of them may be in flight. Returns how many had been counted.
    """
    in_flight, uncounted = request.num_in_flight_tokens, 0
    request.num_computed_tokens -= in_flight
    if request.request_id in scheduler.offline:
        uncounted = uncount(scheduler, request, tokens)
        if in_flight > tokens:
            uncounted += uncount(scheduler, request, in_flight - tokens, behind=tokens)
    request.num_stale_output_tokens, request.drop_stale_output = in_flight, True
    request.num_output_placeholders = 0
    request.is_prefill_chunk = request.num_computed_tokens + 1 < request.num_tokens
    if request.is_prefill_chunk:
        scheduler._inflight_prefills.add(request)
    return uncounted


def uncount(scheduler: CoServing, request: Request, tokens: int, *, behind: int = 0) -> int:
    """Uncount tokens that a row was to compute, `behind` others after those that it has; returns their number."""
    part = scheduler.part(request, tokens, request.num_computed_tokens + behind)
    counted: int = scheduler.offline_tokens.left(request.request_id, part, scheduler.iterations.worth)
    return counted
