"""Lane of one of vLLM's requests, online or offline, its class, and the TTFT promise that it may bring."""

from __future__ import annotations

from vllm.v1.request import Request, RequestStatus

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.request_fields import CLASS_ARGUMENT, PUSH_ARGUMENT, TTFT_ARGUMENT

# Looking them up in their class takes as long as the comparison.
RUNNING, PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED


def is_online(request: Request) -> bool:
    """True if the request is online: its latency promises are kept."""
    return bool(request.priority < OFFLINE_PRIORITY)


def is_running(request: Request) -> bool:
    """True if the request takes part in iterations."""
    return request.status is RUNNING


def has_kv(request: Request) -> bool:
    """True if the KV of its computed tokens is in its blocks: it runs, or waits with them."""
    return is_running(request) or bool(request.status is PREEMPTED and request.num_computed_tokens)


def ttft_promise(request: Request) -> float | None:
    """The request's own TTFT promise in ms (`vllm_xargs: {"conserve_ttft_ms": ...}`); None without one."""
    promise = _argument(request, TTFT_ARGUMENT)
    return float(promise) if isinstance(promise, int | float) and promise > 0 else None


def pushes(request: Request) -> bool:
    """True for a row whose job would miss its deadline."""
    return bool(_argument(request, PUSH_ARGUMENT))


def class_named(request: Request) -> str | None:
    """Class of live traffic that the API server has found for the request; None for the default one."""
    name = _argument(request, CLASS_ARGUMENT)
    return name if isinstance(name, str) else None


def _argument(request: Request, name: str) -> object:
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return (extra or {}).get(name)
