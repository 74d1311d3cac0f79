"""Files and batches at the server's own address: passed on to `conserve api`, a process of its own beside it.

That process reads SQL and Parquet and hashes uploads, which would delay live requests in this one. It listens at a
Unix socket that only this user can open, named by the variable CONSERVE_BATCH_API. Polls of a batch take a
short way (docs/adr/0031).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from http import HTTPStatus
from string import punctuation
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from conserve.engine.vllm.server.batch_connection import BatchConnections
from conserve.engine.vllm.server.key_answers import ASKING_S, AUTHORIZATION, HERE, KeyAnswers
from conserve.engine.vllm.server.privileges import BATCHES, CALLER, METRICS, Caller
from conserve.hosts import is_loopback, is_proxied
from conserve.http_server import CALLER_HEADER, STALLED, SaidOf, parts
from conserve.openai_error import error_body, kind_of
from conserve.variables import BATCH_API

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

SAID_OF = CALLER_HEADER.encode()
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
POLLING_S = 600.0
TIMEOUT = httpx.Timeout(60.0, read=600.0)  # uploads are flushed to disk before they are answered


class BatchProxy:
    """Passes requests on to the Batch API's process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._client: httpx.AsyncClient | None = None
        # Questions about keys do not wait behind polls.
        self._polling, self._asking = BatchConnections(path), BatchConnections(path)
        self.keys = KeyAnswers(self._asking)

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
        self.keys.close()
        self._polling.close()
        self._asking.close()
        if self._client is not None:
            await self._client.aclose()

    async def metrics(self) -> bytes:
        """The process's metrics, of the backlog; nothing while it does not answer."""
        headers = [HERE, (SAID_OF, SaidOf.KEYED.encode())]
        try:
            answer = await self._asking.get(METRICS.encode(), headers, ASKING_S)
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
            return failure(HTTPStatus.REQUEST_TIMEOUT, STALLED)
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
    unkeyed = SaidOf.FAR if far else SaidOf.OPEN
    said = SaidOf.KEYED if caller is not None and caller.keyed else unkeyed
    return [*headers, (SAID_OF, said.encode())]


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


def unavailable() -> Response:
    """Answer while the Batch API starts: the same request may succeed later."""
    return failure(HTTPStatus.SERVICE_UNAVAILABLE, "files and batches are not served just now; try again")


def failure(status: HTTPStatus, message: str) -> Response:
    """Answer to a request that did not reach the Batch API as a whole."""
    return JSONResponse(error_body(message, kind=kind_of(status)), status)


BATCH_PROXY = "conserve_batch_proxy"  # in the app's state


async def backlog(state: Any) -> bytes:
    """Metrics of the backlog; nothing on a server without a Batch API."""
    proxy: BatchProxy | None = getattr(state, BATCH_PROXY, None)
    return b"" if proxy is None else await proxy.metrics()


def attach(app: FastAPI) -> None:
    """Add the routes of files and batches, if a Batch API runs beside this server."""
    path = os.environ.get(BATCH_API)
    if not path:
        return
    proxy = BatchProxy(path)
    setattr(app.state, BATCH_PROXY, proxy)
    for prefix in BATCHES:
        for more in ("", "/{rest:path}"):
            app.add_route(f"{prefix}{more}", proxy.forward, methods=["GET", "POST", "DELETE"])
