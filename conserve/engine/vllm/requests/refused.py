"""Requests that the embedded engine does not answer, found without vLLM for runs and dry runs."""

from collections.abc import Mapping
from typing import Any

from conserve.endpoints.protocol import Url
from conserve.errors import RequestRejected

ELSEWHERE = "use an HTTP endpoint (--endpoint)"


def rejection_of(url: Url, body: Mapping[str, Any]) -> RequestRejected | None:
    """Error of a request that the embedded engine does not answer; None if it takes the request."""
    if url not in (Url.CHAT, Url.COMPLETIONS):
        said = f"the embedded engine does not answer {url}; {ELSEWHERE}"
        return RequestRejected(said, kind="unsupported_url")
    if _asks_for_tools(body):
        return RequestRejected(f"the embedded engine does not parse tool calls; {ELSEWHERE}")
    if body.get("use_beam_search"):
        return RequestRejected(f"the embedded engine does not do beam search; {ELSEWHERE}")
    return None


def _asks_for_tools(body: Mapping[str, Any]) -> bool:
    if body.get("tool_choice") == "none":
        return False
    return bool(body.get("tools") or body.get("functions") or body.get("tool_choice"))
