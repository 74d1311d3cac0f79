"""Files and batches at the server's own address: passed on to `conserve api`, a process of its own beside it.

That process reads SQL and Parquet and hashes uploads, which would delay live requests in this one. It listens at a
Unix socket that only this user can open, named by the variable CONSERVE_BATCH_API. Polls of a batch take a
short way (docs/adr/0031).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from string import punctuation
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from conserve.engine.runtime.api_limits import BATCH_API as SOCKET
from conserve.engine.vllm.server.batch_connection import BatchConnections, Reply
from conserve.engine.vllm.server.privileges import BATCHES, CALLER, METRICS, Caller
from conserve.hosts import is_loopback, is_proxied
from conserve.http_server import STALLED, parts

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

AUTHORIZATION = b"authorization"
HERE = (b"host", b"localhost")
# Header: "keyed" by this server's own key, "far" (another machine's) or "open".
SAID_OF = b"x-conserve-caller"
TAKEN = frozenset(
    {
        b"accept", AUTHORIZATION, b"content-length", b"content-type", b"host", b"idempotency-key", b"if-range",
        b"last-event-id", b"origin", b"range",
    }
)  # fmt: skip
GIVEN = frozenset(
    {
        "accept-ranges", "cache-control", "content-disposition", "content-length", "content-range", "content-type",
        "etag", "last-modified", "retry-after", "www-authenticate", "x-accel-buffering", "x-should-retry",
    }
)  # fmt: skip
DOTS = (".", "..")  # steps of a path that would lead to routes for which the guard was not asked
POLL = re.compile("/v1/batches/[A-Za-z0-9_-]{1,64}")
NOT_OF_POLLS = frozenset({b"content-length", b"origin", b"transfer-encoding"})
KEPT_S = 0.5  # for which the answer on a key holds
STALE_S = 60.0  # for which it holds while the process does not answer
MOST_KEPT = 1024
ASKING_S = 5.0  # live requests wait for the answer on their key
POLLING_S = 600.0
TIMEOUT = httpx.Timeout(60.0, read=600.0)  # uploads are flushed to disk before they are answered


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKey:
    """Uses of a key that the store has."""

    live: bool
    batch: bool
    name: str = ""
    project: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAnswer:
    """The process's last answer on a key."""

    key: StoreKey | None
    at: float
    asked_at: float  # later than `at` if the process did not answer then


class Unanswered(Exception):
    """The process does not say what a key may do."""


class BatchProxy:
    """Passes requests on to the Batch API's process."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._client: httpx.AsyncClient | None = None
        # Questions about keys do not wait behind polls.
        self._polling, self._asking = BatchConnections(path), BatchConnections(path)
        self._keys: dict[bytes, KeyAnswer] = {}
        self._questions: dict[bytes, asyncio.Task[None]] = {}  # about keys, under way
        self._silent = False  # the last question had no answer

    @property
    def client(self) -> httpx.AsyncClient:
        """Client at the socket, made in the loop that uses it.

        A slow transfer keeps no connection from another: their number is that of clients' connections.
        """
        if self._client is None:
            # No TLS is spoken there, so that no certificates need be read.
            through = httpx.AsyncHTTPTransport(
                uds=self._path, verify=False, limits=httpx.Limits(max_connections=None)
            )
            self._client = httpx.AsyncClient(
                transport=through, base_url="http://localhost", timeout=TIMEOUT, trust_env=False
            )
        return self._client

    async def close(self) -> None:
        """Close the connections."""
        for asking in self._questions.values():
            asking.cancel()
        self._polling.close()
        self._asking.close()
        if self._client is not None:
            await self._client.aclose()

    async def key(self, authorization: bytes) -> StoreKey | None:
        """Uses of a key; None for a key that the store has not; raises `Unanswered` if that cannot be told.

        While the process does not answer, a request with a known key waits for no question.
        """
        told, now = self._keys.get(authorization), self._clock()
        known = told is not None and now < told.at + STALE_S
        if told is None or not known or now >= told.asked_at + KEPT_S:
            asking = self._ask_once(authorization)
            if not (known and self._silent):
                await asyncio.shield(asking)
                told = self._keys.get(authorization)
        if told is None or self._clock() >= told.at + STALE_S:
            raise Unanswered
        return told.key

    def _ask_once(self, authorization: bytes) -> asyncio.Task[None]:
        """The question about a key that is under way, or a new one."""
        asking = self._questions.get(authorization)
        if asking is None:
            asking = self._questions[authorization] = asyncio.create_task(self._ask(authorization))
            asking.add_done_callback(lambda _: self._questions.pop(authorization))
        return asking

    async def _ask(self, authorization: bytes) -> None:
        """Ask about a key, and keep the answer, or that there was none."""
        try:
            answer = await self._asking.get(b"/caller", [HERE, (AUTHORIZATION, authorization)], ASKING_S)
            key = uses(answer)
        except (OSError, ValueError, LookupError, TypeError):
            self._silent = True
            if (told := self._keys.get(authorization)) is not None:
                self._keys[authorization] = replace(told, asked_at=self._clock())
            return
        self._silent = False
        if len(self._keys) >= MOST_KEPT:
            self._keys.clear()
        now = self._clock()
        self._keys[authorization] = KeyAnswer(key=key, at=now, asked_at=now)

    async def metrics(self) -> bytes:
        """The process's metrics, of the backlog; nothing while it does not answer."""
        try:
            answer = await self._asking.get(METRICS.encode(), [HERE, (SAID_OF, b"keyed")], ASKING_S)
        except (OSError, ValueError):
            return b""
        return answer.body if answer.status == HTTPStatus.OK else b""

    async def poll(self, scope: Scope, receive: Receive, send: Send, caller: Caller) -> None:
        """Answer a request for which `is_poll` is true, as `forward` would, in a tenth of the processor time."""
        headers = passed_on(scope["headers"], caller, body=False, far=is_far(scope))
        if all(name != HERE[0] for name, _ in headers):  # as HTTP/1.0 allows
            headers.append(HERE)
        try:
            answer = await self._polling.get(path_of(scope).encode(), headers, POLLING_S)
        except (OSError, ValueError):
            await unavailable()(scope, receive, send)
            return
        given = [(name, value) for name, value in answer.headers if name.decode() in GIVEN]
        await send({"type": "http.response.start", "status": answer.status, "headers": given})
        await send({"type": "http.response.body", "body": answer.body})

    async def forward(self, request: Request) -> Response:
        """Pass a request on, its body and its answer as they come."""
        content = parts(request.stream()) if request.method in ("POST", "PUT") else None
        headers = passed_on(
            request.headers.raw, CALLER.get(), body=content is not None, far=is_far(request.scope)
        )
        asked = self.client.build_request(request.method, url(request), headers=headers, content=content)
        try:
            answer = await self.client.send(asked, stream=True)
        except httpx.HTTPError:
            return unavailable()
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # which no client reads
        except TimeoutError:
            return failure(HTTPStatus.REQUEST_TIMEOUT, STALLED, "invalid_request_error")
        given = {name: value for name, value in answer.headers.items() if name in GIVEN}
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, given, background=BackgroundTask(answer.aclose)
        )


def passed_on(
    raw: Iterable[tuple[bytes, bytes]], caller: Caller | None, *, body: bool, far: bool
) -> list[tuple[bytes, bytes]]:
    """Headers of a request for the Batch API, as the client's bytes; without a body it has no length."""
    taken = TAKEN if body else TAKEN - {b"content-length"}
    headers = [(name, value) for name, value in raw if name in taken]
    if caller is not None and caller.store_key is not None:
        headers = [(name, value) for name, value in headers if name != AUTHORIZATION]
        headers.append((AUTHORIZATION, caller.store_key))
    unkeyed = b"far" if far else b"open"
    said = b"keyed" if caller is not None and caller.keyed else unkeyed
    return [*headers, (SAID_OF, said)]


def is_poll(scope: Scope) -> bool:
    """True for a GET of one batch, without a query, a body or a browser's `Origin`."""
    if scope["type"] != "http" or scope["method"] != "GET" or scope["query_string"]:
        return False
    unusual = any(name in NOT_OF_POLLS for name, _ in scope["headers"])
    return not unusual and POLL.fullmatch(path_of(scope)) is not None


def is_far(scope: Scope) -> bool:
    """True for a connection of another machine, which may claim any `Host`, and for one through a proxy.

    A Unix socket has no address.
    """
    client = scope.get("client")
    other = client is not None and not is_loopback(client[0])
    return other or is_proxied(name.decode("latin-1") for name, _ in scope["headers"])


def url(request: Request) -> httpx.URL:
    """Path and query of a request, in ASCII whatever the client sent; httpx resolves no `..` in it."""
    path = path_of(request.scope)
    steps = (quote(step).replace(".", "%2E") if step in DOTS else quote(step) for step in path.split("/"))
    query = quote(request.scope["query_string"], safe=punctuation)
    return httpx.URL(path="/".join(steps), query=query.encode())


def path_of(scope: Scope) -> str:
    """Path of a request, without the prefix of a proxy."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def uses(answer: Reply) -> StoreKey | None:
    """Uses of a key that an answer tells, None if the store has it not; raises `ValueError` for other answers."""
    if answer.status == HTTPStatus.UNAUTHORIZED:
        return None
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"status {answer.status}")
    document = json.loads(answer.body)
    name, project = document.get("name", ""), document.get("project", "")
    return StoreKey(live=document["live"], batch=document["batch"], name=name, project=project)


def unavailable() -> Response:
    """Answer while the Batch API starts: the same request may succeed later."""
    said = "files and batches are not served just now; try again"
    return failure(HTTPStatus.SERVICE_UNAVAILABLE, said, "server_error")


def failure(status: HTTPStatus, said: str, kind: str) -> Response:
    """Answer to a request that did not reach the Batch API as a whole."""
    error: Mapping[str, Any] = {"message": said, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status)


BATCH_PROXY = "conserve_batch_proxy"  # in the app's state


async def backlog(state: Any) -> bytes:
    """Metrics of the backlog; nothing on a server without a Batch API."""
    proxy: BatchProxy | None = getattr(state, BATCH_PROXY, None)
    return b"" if proxy is None else await proxy.metrics()


def attach(app: FastAPI) -> None:
    """Add the routes of files and batches, if a Batch API runs beside this server."""
    path = os.environ.get(SOCKET)
    if not path:
        return
    proxy = BatchProxy(path)
    setattr(app.state, BATCH_PROXY, proxy)
    for prefix in BATCHES:
        for more in ("", "/{rest:path}"):
            app.add_route(f"{prefix}{more}", proxy.forward, methods=["GET", "POST", "DELETE"])
