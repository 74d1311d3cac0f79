"""Priorities of vLLM's requests: the flex tier is offline, and all parts of one request have its priority."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from conserve.engine.policy.view import OFFLINE_PRIORITY

FLEX = "flex"  # OpenAI's service tier for work that can wait
ASKED: ContextVar[int | None] = ContextVar("conserve_priority", default=None)
"""Priority of the current request; None before it is known, and where vLLM's serving classes are not used."""


def flex_is_offline(priority_of: Callable[..., int]) -> Callable[..., int]:
    """Wrap `_get_priority`: requests of OpenAI's flex tier get the priority of offline ones."""

    @functools.wraps(priority_of)
    def wrapped(request: Any, raw_request: Any) -> int:
        priority = priority_of(request, raw_request)
        tier = getattr(request, "service_tier", None)
        return max(priority, OFFLINE_PRIORITY) if tier == FLEX else priority

    return wrapped


def noting_priority(session_of: Callable[..., Any], priority_of: Callable[..., int]) -> Callable[..., Any]:
    """Wrap `_get_session_id`, which vLLM calls once for each request before it generates: note the priority."""

    @functools.wraps(session_of)
    def wrapped(request: Any, raw_request: Any) -> Any:
        ASKED.set(priority_of(request, raw_request))
        return session_of(request, raw_request)

    return wrapped


def keeping_priority(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `AsyncLLM.generate`: a part of a request has the request's priority, or a worse one.

    vLLM starts the beams of a beam search without a priority. It starts the turns after a server-side tool with the
    next better one, which would make an offline request online, and an online one more than its client may ask for.
    """

    @functools.wraps(generate)
    def wrapped(llm: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **rest: Any) -> Any:
        if (asked := ASKED.get()) is not None:
            rest["priority"] = max(rest.get("priority", asked), asked)
        return generate(llm, prompt, sampling_params, request_id, *args, **rest)

    return wrapped
