"""What a server's answers mean: a completion, or an error that says whose fault it is."""

from collections.abc import Mapping
from typing import Any

import httpx

from conserve.endpoints.protocol import Choice, Completion, Url
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
)

TOO_LONG = ("context length", "maximum model length", "too long", "max_model_len", "maximum context")
ENGINE_DEAD = ("enginecore encountered an issue", "enginedeaderror")  # vLLM's last words, with status 500
CUT_SHORT = (
    "abort",
    "error",
)  # finish reasons of answers that the server gave up, as vLLM does when it stops


def completion(url: Url, answer: Mapping[str, Any]) -> Completion:
    """Read an OpenAI response body; raises whatever a malformed one raises."""
    choices = tuple(to_choice(url, choice) for choice in answer["choices"])
    if not choices:
        raise ValueError("no choices")
    return with_usage(choices, answer.get("usage"), str(answer.get("model", "")))


def with_usage(choices: tuple[Choice, ...], usage: Mapping[str, Any] | None, model: str) -> Completion:
    """The completion of these choices; raises `EndpointUnavailable` for one that was cut short."""
    for choice in choices:
        if choice.finish_reason in CUT_SHORT:
            raise EndpointUnavailable(f"the server gave the answer up (finish_reason {choice.finish_reason})")
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        choices=choices,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        model=model,
    )


def to_choice(url: Url, choice: Mapping[str, Any]) -> Choice:
    """One entry of `choices`, of either route."""
    text = choice["message"]["content"] if url is Url.CHAT else choice["text"]
    return Choice(
        text=text or "",
        finish_reason=str(choice.get("finish_reason") or "stop"),
        logprobs=choice.get("logprobs"),
    )


def refusal(answer: httpx.Response) -> EndpointError:
    """The error that a response with a status other than 200 amounts to."""
    return error_of(answer.status_code, error_message(answer), retry_after_s(answer))


def error_of(status: int, said: str, retry_after_s: float | None = None) -> EndpointError:
    """The error that a status, of a response or of an event within a stream, amounts to."""
    message = f"HTTP {status}: {said}"
    lowered = said.lower()
    if any(words in lowered for words in ENGINE_DEAD):
        return EngineDied(message)
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return EndpointBusy(message, retry_after_s=retry_after_s)
    if status in (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT):
        return EndpointUnavailable(message)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return EndpointUnusable(f"{message}; check CONSERVE_API_KEY")
    if status == httpx.codes.NOT_FOUND and "model" in lowered:
        return EndpointUnusable(f"{message}; correct --model")
    if status == httpx.codes.REQUEST_TIMEOUT or status >= 500:
        return EndpointFault(message)
    too_long = any(words in lowered for words in TOO_LONG)
    return RequestRejected(message, kind="too_long" if too_long else "invalid_request")


def error_message(answer: httpx.Response) -> str:
    """What the server says went wrong."""
    try:
        body = answer.json()
        inner = body.get("error", body)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        return answer.text[:200]


def retry_after_s(answer: httpx.Response) -> float | None:
    """The server's own wish, in seconds."""
    try:
        return max(0.0, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
