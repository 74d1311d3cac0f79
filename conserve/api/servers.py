"""Servers that harvesters feed: where they are, and what each says of itself.

Imports nothing heavy: `conserve status` asks through it.
"""

import socket
from collections.abc import Sequence
from typing import Any

from conserve.config import Settings
from conserve.hosts import split_login
from conserve.jobs.harvest.services import running
from conserve.words import duration

ANSWER_S = 2.0
PATH = "/v1/conserve"
WITHIN_S = 1.0  # after which a server in the middle of an iteration answers with its last report
NOT_FOUND = 404
STOCK = "stock"  # key in the answer of a server without ConServe's scheduler


def addresses(settings: Settings, endpoints: Sequence[str] = ()) -> list[str]:
    """Addresses of the servers to look at: running over this store, then named ones, each once.

    Without `endpoints` the one of the settings counts as named. All that show servers take them from here.
    """
    named = endpoints or ([settings.endpoint] if settings.endpoint else [])
    shown = [split_login(url)[0] for url in named]
    urls = [url.rstrip("/").removesuffix("/v1") for url in shown if url.startswith(("http://", "https://"))]
    return list(dict.fromkeys([*(server.url for server in running(settings)), *urls]))


def bearer(settings: Settings) -> dict[str, str]:
    """Authorization header for a server's own routes, with the API key, else the harvester's key."""
    key = settings.api_key or settings.harvest_key
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(url: str, settings: Settings, *, seconds: float = ANSWER_S) -> dict[str, Any]:
    """Ask a server for `GET /v1/conserve`, through the standard library, which imports faster than httpx.

    A server that does not answer has an `error`, one without ConServe's scheduler has `stock`. Figures are `age_s`
    old, by seconds where an iteration is under way.
    """
    import http.client
    import json
    import urllib.error
    import urllib.request

    class Unfollowed(urllib.request.HTTPRedirectHandler):
        """Follows no redirect: the key is for this server alone."""

        def redirect_request(self, *_: Any) -> None:
            return None

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Unfollowed)
    try:
        request = urllib.request.Request(f"{url}{PATH}?within_s={WITHIN_S:g}", headers=bearer(settings))
        with opener.open(request, timeout=seconds) as answer:
            said = json.load(answer)
            return said if isinstance(said, dict) else {STOCK: True}
    except (OSError, ValueError, http.client.HTTPException) as error:
        if getattr(error, "code", None) == NOT_FOUND:  # an HTTPError's
            return {STOCK: True}
        return {"error": unanswered(error)}


def unanswered(error: Exception) -> str:
    """Reason that a server did not answer."""
    if getattr(error, "code", None) in (401, 403):  # an HTTPError's
        return "wants another key; set CONSERVE_API_KEY"
    cause = getattr(error, "reason", error)  # a URLError's
    if isinstance(cause, socket.gaierror):
        return "runs there, and has no address that is known here"
    if isinstance(cause, ConnectionRefusedError):
        return "does not answer (starting, or ended)"
    return f"does not answer{' (busy)' if isinstance(cause, TimeoutError) else ''}"


def aged(age_s: float | None) -> str | None:
    """Age of figures in words; None if they are of now."""
    if age_s is None or age_s <= WITHIN_S:
        return None
    return f"{duration(age_s)} ago, as an iteration is under way"
