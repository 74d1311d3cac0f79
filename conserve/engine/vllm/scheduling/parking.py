"""Parked rows: they wait without a slot, and keep their KV blocks and what their layers have computed.

Where an arrival lacks a slot and no memory, a row that is evicted computes again the tokens behind its last full
KV block, all of a chunk that it left in the middle, and whatever a long burst takes of its blocks meanwhile. A
parked one does not: vLLM goes on with a waiting request that holds KV blocks where it was, as it does where a
connector has brought KV. The workers forget a preempted request, and would forget a row's part of a chunk with it,
so each iteration says which rows keep theirs. `application` parks and evicts.

Where iterations are scheduled ahead, a row may have a token under way. The row is parked all the same if no row can
leave that iteration: the token comes before the next plan.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.lane import is_running

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


class Parking:
    """The parked rows of a scheduler."""

    def __init__(self, scheduler: CoServing, *, settles: bool) -> None:
        """`settles`: at most one iteration is under way while another is planned: no pipeline parallelism."""
        self.on = can_park(scheduler)  # rows may be parked at all
        self._scheduler, self._settles = scheduler, settles
        self.names: set[str] = set()
        self.count = 0  # since the start
        self.under_way = False  # a row is being parked, which vLLM preempts

    def keeps(self, request: Request) -> bool:
        """True if a row is computed in part, and its KV blocks will have all that it needs when it goes on."""
        elsewhere = request.mm_features or request.pooling_params
        asks_of_prompt = request.skip_reading_prefix_cache  # logprobs, which V2 has of a whole prompt alone
        lost = request.num_stale_output_tokens  # computed for KV blocks that the row had before
        # A token under way comes before the next plan, and only running rows are rewound.
        comes = self._settles and not self._scheduler.ahead.refusable
        late = request.num_in_flight_tokens and not comes
        can = self.on and request.num_computed_tokens
        return bool(can) and not (elsewhere or asks_of_prompt or lost or late)

    def tell(self, iteration: Iteration, output: SchedulerOutput) -> None:
        """Say in the iteration's record which rows keep a part of a chunk: those parked now, and that go on."""
        if self.names:
            going_on = {name for name in self.names if is_running(self._scheduler.requests[name])}
            iteration.keeps = frozenset(going_on | (self.names & (output.preempted_req_ids or set())))
            self.names -= going_on


def can_park(scheduler: CoServing) -> bool:
    """True if the state of rows is in their KV blocks."""
    elsewhere = scheduler.kv_groups or scheduler.num_spec_tokens
    return not elsewhere and getattr(scheduler, "aux_output_connector", None) is None


def lose(scheduler: CoServing, request: Request) -> None:
    """Note that a request's KV blocks are freed now, and with them what its layers have computed."""
    name = request.request_id
    scheduler.prefixes.end(request, now=time.monotonic())
    if name in scheduler.offline:
        scheduler.offline_tokens.loses(request)
    scheduler.arrival_monitor.lost_memory(name)
    if scheduler.checkpoints is not None:
        scheduler.checkpoints.evicting(request)
