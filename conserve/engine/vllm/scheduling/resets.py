"""A reset of vLLM's prefix cache, which needs all KV blocks free: `/pause?mode=keep` and weight updates ask for it.

vLLM evicts the requests that run. Others hold blocks as well: rows that are parked or restored wait with theirs,
and blocks are being saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from conserve.engine.vllm.scheduling.application import evict, make_ready

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


@contextmanager
def resetting(scheduler: CoServing, *, running: bool) -> Iterator[None]:
    """Meanwhile no block is being saved. `running`: vLLM resets running requests, so those that wait go as well.

    A row that is being restored keeps its blocks, which the workers write: vLLM refuses the reset.
    """
    saves = scheduler.checkpoints
    with saves.standing_still(free=running) if saves is not None else nullcontext():
        if running:
            make_ready(scheduler)
            held, blocked = scheduler.kv_holding_waiting, scheduler._is_blocked_waiting_status
            names = [request.request_id for request in held if not blocked(request.status)]
            evict(scheduler, names, time.monotonic())
        try:
            yield
        finally:
            scheduler.prefixes.forget()  # also what live requests left that vLLM has preempted for the reset
