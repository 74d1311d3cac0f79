"""Access: the key of a request leads to its project; a store without keys answers this machine alone."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from conserve.batch_api import metrics
from conserve.batch_api.moved import MoveWatch
from conserve.batch_api.reads import Reads
from conserve.batch_api.state import CALLER, ApiCaller
from conserve.errors import StoreError
from conserve.hosts import host_in, is_loopback, is_proxied
from conserve.http_server import CALLER_HEADER, WHO, SaidOf
from conserve.openai_error import SERVER, error_body
from conserve.store.books import keys
from conserve.store.books.keys import ApiKey

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FREE = frozenset({"/health", "/openapi.json"})
AGAIN_S = 0.1  # between two reads for keys that are unknown
KEPT_S = 0.5  # for which keys that were read are used; a live server beside keeps the answer as long again
PAGE_S = 2.0  # for which /metrics waits for the keys, less than a scrape waits for /metrics
SAID_TO_ALL = "the store of this API was moved, or is being moved; the API's log says where to"
"""Answer to those who sent no key: the address of the other database is not theirs."""


class KeyRing:
    """Keys of a store, read at most once in `KEPT_S`, and for unknown keys at most once in `AGAIN_S`."""

    def __init__(self, reads: Reads, clock: Callable[[], float] = time.monotonic) -> None:
        self._reads, self._clock = reads, clock
        self._read_at: float | None = None
        self._keys: Sequence[ApiKey] = ()
        self._reading: asyncio.Task[None] | None = None

    async def for_caller(self, text: str) -> Sequence[ApiKey]:
        """The keys, read again for a caller whose key is not among them: it may have just been made."""
        known = await self.current()
        return known if keys.of_text(known, text) is not None else await self.current(AGAIN_S)

    async def for_page(self, text: str) -> Sequence[ApiKey]:
        """The keys for /metrics, which tells of an outage: those of before while the store does not answer.

        Raises `StoreError` or `TimeoutError` if none were ever read.
        """
        try:
            async with asyncio.timeout(PAGE_S):
                return await self.for_caller(text)
        except (StoreError, TimeoutError):
            if self._read_at is None:
                raise
            return self._keys

    async def current(self, kept_s: float | None = None) -> Sequence[ApiKey]:
        """The keys, also those that were revoked: a store that ever had a key asks for one.

        Requests share the read that is under way, and its error: each would else wait for the database in turn. One
        that had begun too early is followed by another.
        """
        oldest, began = self._clock() - (KEPT_S if kept_s is None else kept_s), False
        while not began and (self._read_at is None or self._read_at <= oldest):
            if began := self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
                self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            assert self._reading is not None
            await asyncio.shield(self._reading)
        return self._keys

    async def _read(self) -> None:
        began = self._clock()
        self._keys = keys.of_rows(await self._reads.rows(keys.EVERYTHING, {}))
        self._read_at = began


class Access:
    """Outermost layer: answers 401 and 403 before any byte of a body is read.

    With `beside`, requests come from a live server alone, which has looked at its own keys and says so.
    """

    def __init__(self, app: App, ring: KeyRing, *, beside: bool = False, free: frozenset[str] = FREE) -> None:
        self._app, self._ring, self._beside, self._free = app, ring, beside, free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._free:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            answer = await self._caller(headers, scope["path"])
        except (StoreError, TimeoutError):
            said = error_body("the store cannot be used now; try again", kind=SERVER)
            await JSONResponse(said, HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)
            return
        if isinstance(answer, Response):
            await answer(scope, receive, send)
            return
        scope[CALLER] = answer
        await self._app(scope, receive, send)

    async def _caller(self, headers: Headers, path: str) -> ApiCaller | Response:
        """Sender of a request, or the answer to it; keys are read only where they count."""
        asks_who = self._beside and path == WHO
        said_of = headers.get(CALLER_HEADER) if self._beside and not asks_who else None
        if said_of == SaidOf.KEYED:
            return ApiCaller()
        read = self._ring.for_page if path == metrics.PATH else self._ring.for_caller
        known = await read(bearer(headers))
        if asks_who:
            return uses(headers, known)
        if known:
            return caller_with_key(headers, known, path)
        return keys_required() if said_of == SaidOf.FAR else caller_of_this_machine(headers)


class StoreHere:
    """Layer behind the keys: answers 503 while the store is not in this database."""

    def __init__(self, app: App, moves: MoveWatch) -> None:
        self._app, self._moves = app, moves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        moved = self._moves.moved
        if scope["type"] != "http" or moved is None:
            await self._app(scope, receive, send)
            return
        said = str(moved) if CALLER in scope else SAID_TO_ALL
        answer = JSONResponse(error_body(said, kind=SERVER), HTTPStatus.SERVICE_UNAVAILABLE)
        await answer(scope, receive, send)


def uses(headers: Headers, known: Sequence[ApiKey]) -> Response:
    """Answer to the live server's question what a key may do."""
    key = keys.of_text(known, bearer(headers))
    if key is None:
        return refusal(HTTPStatus.UNAUTHORIZED, "Incorrect API key provided", "invalid_api_key")
    return JSONResponse({"live": key.live, "batch": key.batch, "name": key.name, "project": key.project})


def bearer(headers: Headers) -> str:
    """Key in the header `Authorization`; empty without one."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


def caller_with_key(headers: Headers, known: Sequence[ApiKey], path: str) -> ApiCaller | Response:
    """Caller whose key the store knows, or a refusal; every key reads the metrics."""
    if not (text := bearer(headers)):
        said = "this API wants a key: send it as Authorization: Bearer KEY"
        return refusal(HTTPStatus.UNAUTHORIZED, said, "invalid_api_key")
    key = keys.of_text(known, text)
    if key is None:
        return refusal(HTTPStatus.UNAUTHORIZED, "Incorrect API key provided", "invalid_api_key")
    if not key.batch and path != metrics.PATH:
        said = f"the key {key.name!r} is for live requests, not for files and batches"
        return refusal(HTTPStatus.FORBIDDEN, said, "insufficient_permissions")
    return ApiCaller(project=key.project, key=key)


def caller_of_this_machine(headers: Headers) -> ApiCaller | Response:
    """Caller of an API without keys; refuses proxies, and pages of other sites in a browser on this machine."""
    named = (f"//{headers.get('host', '')}", headers.get("origin", "//localhost"))
    if not is_proxied(headers) and all(is_loopback(host_in(url)) for url in named):
        return ApiCaller()
    return keys_required()


def keys_required() -> Response:
    """Answer to a caller that is not known to be of this machine."""
    said = "without keys this API answers this machine alone; make one: conserve keys add NAME"
    return refusal(HTTPStatus.FORBIDDEN, said, "keys_required")


def refusal(status: HTTPStatus, said: str, code: str) -> Response:
    """Answer to a caller whose key does not suffice."""
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(error_body(said, code=code), status, headers=headers)
