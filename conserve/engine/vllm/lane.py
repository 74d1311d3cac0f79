"""Online or offline: the lane of a request of vLLM's, and the TTFT promise it may bring."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.view import OFFLINE_PRIORITY, TTFT_ARGUMENT


def is_online(request: Request) -> bool:
    """Whether the request has promises to be kept."""
    return bool(request.priority < OFFLINE_PRIORITY)


def is_running(request: Request) -> bool:
    """Whether it takes part in iterations."""
    return bool(request.status == RequestStatus.RUNNING)


def ttft_promise(request: Request) -> float | None:
    """The request's own TTFT promise in ms (`vllm_xargs: {"conserve_ttft_ms": ...}`), if it brings one."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    promise = (extra or {}).get(TTFT_ARGUMENT)
    return float(promise) if isinstance(promise, int | float) and promise > 0 else None
