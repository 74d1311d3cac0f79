"""Requests as they are sent to a server."""

from typing import Any

from conserve.endpoints.discovery import ServerFacts
from conserve.endpoints.protocol import Call, Url

PUSH = "conserve_push"  # in `vllm_xargs`, as in the engine's plug-in, which is not imported here


def request_body(call: Call, server: ServerFacts) -> dict[str, Any]:
    """The body of a request for a whole answer."""
    body = {**call.body, "model": server.model, "stream": False}
    if call.url is Url.EMBEDDINGS:
        del body["stream"]  # strict servers reject it on that route
    if server.priority is not None:
        body["priority"] = server.priority
    if call.url is not Url.EMBEDDINGS:  # the other routes take vllm_xargs
        # A push wants the harvester's key, as resuming does.
        put_push(body, on=call.pushes and server.resumes)
    return body


def put_push(body: dict[str, Any], *, on: bool) -> None:
    """Say whether a row's job would miss its deadline; what a row says of itself does not count."""
    said = body.get("vllm_xargs")
    if on or (isinstance(said, dict) and PUSH in said):
        others = {name: value for name, value in (said or {}).items() if name != PUSH}
        body["vllm_xargs"] = {**others, PUSH: 1} if on else others


def trace_headers(call: Call) -> dict[str, str]:
    """Headers that join the server's spans to the row's trace; none without a trace."""
    return {"traceparent": call.traceparent} if call.traceparent else {}
