"""vLLM's own schedulers, with the queues of its newest version."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from conserve.engine.vllm.compat.versions import name_here

HOLDING = "vllm.v1.core.sched.scheduler.Scheduler.kv_holding_waiting"


class VllmsAttributes:
    """Attributes of vLLM's schedulers that `scheduling` uses, for the type checker, which does not read vLLM."""

    running: list[Request]
    waiting: Any
    kv_holding_waiting: Any
    requests: dict[str, Request]
    policy: SchedulingPolicy
    kv_cache_manager: Any
    encoder_cache_manager: Any
    connector: Any
    scheduler_config: Any
    lora_config: Any
    is_encoder_decoder: bool
    block_size: int
    current_step: int
    max_num_encoder_input_tokens: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    num_prefill_lookahead: int
    num_spec_tokens: int
    requires_kv_delivery: bool
    _inflight_prefills: set[Request]
    _free_request_blocks: Callable[[Request], Any]
    _handle_blocked_waiting_request: Callable[[Request], bool]
    _inflight_prefill_reserved_blocks: Callable[..., int]
    _is_blocked_waiting_status: Callable[[RequestStatus], bool]
    _mamba_block_aligned_split: Callable[..., int]
    _reserve_prefill_lookahead: Callable[..., int]
    _try_schedule_encoder_inputs: Callable[..., Any]


class HoldersApart:
    """Mixed into schedulers of vLLM 0.30: `skipped_waiting` has the requests that hold KV blocks, and only them."""

    waiting: Any
    skipped_waiting: Any
    _try_promote_blocked_waiting_request: Any

    @property
    def kv_holding_waiting(self) -> Any:
        """Waiting requests that hold KV blocks, or are getting them."""
        return self.skipped_waiting

    @kv_holding_waiting.setter
    def kv_holding_waiting(self, queue: Any) -> None:
        self.skipped_waiting = queue

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as vLLM does; what it has skipped and holds no KV block waits with the others again."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        skipped = [request for request in self.skipped_waiting if not _holds_kv(request)]
        self.skipped_waiting.remove_requests(skipped)
        self.waiting.prepend_requests(reversed(skipped))
        return output

    def _enqueue_waiting_request(self, request: Request) -> None:
        queue = self.skipped_waiting if _holds_kv(request) else self.waiting
        queue.add_request(request)

    def _select_waiting_queue_for_scheduling(self) -> Any:
        return self.skipped_waiting or self.waiting or None

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return bool(self._try_promote_blocked_waiting_request(request))


def _holds_kv(request: Request) -> bool:
    return bool(request.num_computed_tokens or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


if TYPE_CHECKING or name_here(HOLDING) == HOLDING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
else:

    class Scheduler(HoldersApart, scheduler.Scheduler):
        """vLLM's scheduler."""

    class AsyncScheduler(HoldersApart, async_scheduler.AsyncScheduler):
        """vLLM's scheduler of an engine that schedules ahead."""


__all__ = ["AsyncScheduler", "Scheduler", "VllmsAttributes"]
