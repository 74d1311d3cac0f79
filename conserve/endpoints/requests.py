"""Requests as they are sent to a server."""

from typing import Any

from conserve.endpoints.discovery import ServerFacts
from conserve.endpoints.protocol import Call, Url
from conserve.request_fields import PUSH_ARGUMENT, RESUME_ARGUMENT


def request_body(call: Call, server: ServerFacts) -> dict[str, Any]:
    """The body of a request for a whole answer."""
    body = {**call.body, "model": server.model, "stream": False}
    if call.url is Url.EMBEDDINGS:
        del body["stream"]  # strict servers reject it on that route
    if server.priority is not None:
        body["priority"] = server.priority
    # A push wants the harvester's key, as resuming does.
    if call.pushes and server.resumes and call.url is not Url.EMBEDDINGS:  # the other routes take vllm_xargs
        add_argument(body, PUSH_ARGUMENT, 1)
    return body


def streamed_body(call: Call, server: ServerFacts, *, piece_tokens: int) -> dict[str, Any]:
    """The body of a request for an answer in pieces, which continues from the tokens that are saved."""
    body = request_body(call, server) | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "stream_interval": piece_tokens,
    }
    if call.resume_from:
        add_argument(body, RESUME_ARGUMENT, list(call.resume_from))
    return body


def add_argument(body: dict[str, Any], name: str, value: object) -> None:
    """Add a field of ours to `vllm_xargs`; where a row has no object there, the server says so."""
    said = body.get("vllm_xargs") or {}
    if isinstance(said, dict):
        body["vllm_xargs"] = {**said, name: value}


def trace_headers(call: Call) -> dict[str, str]:
    """Headers that join the server's spans to the row's trace; none without a trace."""
    return {"traceparent": call.traceparent} if call.traceparent else {}
