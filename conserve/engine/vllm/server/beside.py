"""Files and batches at the server's own address: passed on to `conserve api`, a process of its own beside it.

That process reads SQL and Parquet and hashes uploads, which would delay live requests in this one. It listens at a
Unix socket that only this user can open, named by the variable CONSERVE_BATCH_API.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httpx
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, StreamingResponse

from conserve.engine.vllm.server.privileges import BATCHES, CALLER

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

SOCKET = "CONSERVE_BATCH_API"
SAID_OF = "x-conserve-caller"  # header: "keyed" if the caller sent this server's own key, else "open"
TAKEN = frozenset(
    {
        "accept", "authorization", "content-length", "content-type", "host", "idempotency-key", "if-range",
        "origin", "range",
    }
)  # fmt: skip
GIVEN = frozenset(
    {
        "accept-ranges", "content-disposition", "content-length", "content-range", "content-type", "etag",
        "last-modified", "www-authenticate", "x-should-retry",
    }
)  # fmt: skip
KEPT_S = 1.0  # for which the answer on a key holds
MOST_KEPT = 1024
TIMEOUT = httpx.Timeout(60.0, read=600.0)  # uploads are flushed to disk before they are answered


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKey:
    """Uses of a key that the store has."""

    live: bool
    batch: bool


class Beside:
    """The Batch API's process."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._client: httpx.AsyncClient | None = None
        self._keys: dict[bytes, tuple[float, StoreKey | None]] = {}

    @property
    def client(self) -> httpx.AsyncClient:
        """Client at the socket, made in the loop that uses it."""
        if self._client is None:
            through = httpx.AsyncHTTPTransport(uds=self._path)
            self._client = httpx.AsyncClient(
                transport=through, base_url="http://localhost", timeout=TIMEOUT, trust_env=False
            )
        return self._client

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def key(self, authorization: bytes) -> StoreKey | None:
        """Uses of a key; None for a key that the store has not, or while it cannot be asked."""
        known = self._keys.get(authorization)
        if known is not None and self._clock() < known[0] + KEPT_S:
            return known[1]
        try:
            answer = await self.client.get("/caller", headers={b"authorization": authorization})
            document = answer.json() if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None
        found = StoreKey(live=document["live"], batch=document["batch"]) if document else None
        if len(self._keys) >= MOST_KEPT:
            self._keys.clear()
        self._keys[authorization] = self._clock(), found
        return found

    async def forward(self, request: Request) -> Response:
        """Pass a request on, its body and its answer as they come."""
        headers = {name: value for name, value in request.headers.items() if name in TAKEN}
        caller = CALLER.get()
        headers[SAID_OF] = "keyed" if caller is not None and caller.keyed else "open"
        if caller is not None and caller.store_key is not None:
            headers["authorization"] = caller.store_key.decode("latin-1")
        content = request.stream() if request.method in ("POST", "PUT") else None
        path = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self.client.build_request(request.method, path, headers=headers, content=content)
        try:
            answer = await self.client.send(asked, stream=True)
        except httpx.HTTPError:
            return unavailable()
        given = {name: value for name, value in answer.headers.items() if name in GIVEN}
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, given, background=BackgroundTask(answer.aclose)
        )


def unavailable() -> Response:
    """Answer while the Batch API starts: the same request may succeed later."""
    said: Mapping[str, Any] = {
        "message": "files and batches are not served just now; try again",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    return JSONResponse({"error": said}, HTTPStatus.SERVICE_UNAVAILABLE)


BESIDE = "conserve_beside"  # in the app's state


def attach(app: FastAPI) -> None:
    """Add the routes of files and batches, if a Batch API runs beside this server."""
    path = os.environ.get(SOCKET)
    if not path:
        return
    beside = Beside(path)
    setattr(app.state, BESIDE, beside)
    for prefix in BATCHES:
        for more in ("", "/{rest:path}"):
            app.add_route(f"{prefix}{more}", beside.forward, methods=["GET", "POST", "DELETE"])
