"""Outermost layer of the API server, an ASGI middleware: checks keys and the size of bodies."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from math import inf
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import Match

from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.vllm.server.batch_proxy import (
    BATCH_PROXY,
    BatchProxy,
    is_poll,
    path_of,
)
from conserve.engine.vllm.server.delivery import DELIVERY, Delivery, Message, Send
from conserve.engine.vllm.server.key_answers import StoreKey, Unanswered
from conserve.engine.vllm.server.privileges import (
    CALLER,
    CLASS_HEADER,
    METRICS,
    SLO,
    Caller,
    Keys,
    Need,
    Role,
    is_batch,
    need,
)
from conserve.hosts import host_in, is_loopback
from conserve.openai_error import error_body, kind_of

GUARD = "conserve.vllm.Guard"  # for vLLM's --middleware
# Attributes of the server's arguments, set by `conserve serve`.
LIMITS, KEYS = "conserve_limits", "conserve_keys"

UPLOADS = "/v1/files"
FORM_BYTES = 1 << 20

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestGuard:
    """Answers 401, 403 and 413 itself from a request's headers, before any byte of its body is read."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        args = getattr(scope["app"].state, "args", None)
        limits: ApiLimits = getattr(args, LIMITS, None) or ApiLimits()
        keys: Keys = getattr(args, KEYS, None) or Keys.of(getattr(args, "api_key", None), os.environ)
        headers = dict(scope["headers"])
        sent = headers.get(b"authorization", b"")
        own = keys.role(sent)
        ask = own is None and sent and wanted_by(scope, limits) is not Need.NOTHING
        found, refused = await key_of_store(scope, sent) if ask else (None, None)
        role = Role.CLIENT if found is not None else own
        if not keys.asked:
            refused = refused or refusal_of_page(scope, headers.get(b"origin"), args, limits)
        if (refused := refused or denial_of(scope, role, limits)) is not None:
            await refused(scope, receive, send)
            return
        caller = Caller(
            role=role or Role.CLIENT,
            ttft_slo_ms=getattr(scope["app"].state, SLO, None) or inf,
            keyed=own is not None and keys.asked,
            store_key=sent if found is not None else None,
            key=found.name if found is not None else None,
            project=found.project if found is not None else None,
            asked_class=headers.get(CLASS_HEADER, b"").decode("latin-1").strip() or None,
        )
        proxy: BatchProxy | None = getattr(scope["app"].state, BATCH_PROXY, None)
        if proxy is not None and is_poll(scope) and is_bare(args):
            await proxy.poll(scope, receive, send, caller)
            return
        if caller.store_key is not None or role is Role.HARVESTER:
            scope = with_own_key(scope, keys)
        delivery = Delivery()
        caller_before, delivery_before = CALLER.set(caller), DELIVERY.set(delivery)
        try:
            await self._within(most_bytes(scope, limits), headers, scope, receive, delivery.watching(send))
        finally:
            CALLER.reset(caller_before)
            DELIVERY.reset(delivery_before)

    async def _within(
        self, most: int, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass the request on if its body has at most `most` bytes."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            await too_large(most)(scope, receive, send)
        elif b"transfer-encoding" in headers:
            await CountedBody(receive, send, most).run(self._app, scope)
        else:
            await self._app(scope, receive, send)


def is_bare(args: Any) -> bool:
    """True if no layer between this one and the routes has to do with a poll: the user's own, or request ids.

    Of vLLM's other layers one answers pages of other sites, one asks for the key again, and one counts requests.
    """
    others = [name for name in getattr(args, "middleware", ()) if name != GUARD]
    return not others and not getattr(args, "enable_request_id_headers", False)


async def key_of_store(scope: Scope, sent: bytes) -> tuple[StoreKey | None, JSONResponse | None]:
    """Key of a caller that the store has, or why the key does not suffice; two Nones for other keys.

    Every key reads the metrics.
    """
    proxy: BatchProxy | None = getattr(scope["app"].state, BATCH_PROXY, None)
    try:
        found = await proxy.keys.of(sent) if proxy is not None else None
    except Unanswered:
        said = "whether the store has this key cannot be told just now; try again"
        return None, error(HTTPStatus.SERVICE_UNAVAILABLE, said)
    if found is None:
        return None, None
    path = path_of(scope)
    batch = is_batch(path)
    if path == METRICS or (found.batch if batch else found.live):
        return found, None
    said = "files and batches" if batch else "live requests"
    return None, error(HTTPStatus.FORBIDDEN, f"this key is not for {said}")


def with_own_key(scope: Scope, keys: Keys) -> Scope:
    """The request with a key of clients, which vLLM's middleware knows, in place of another."""
    if not keys.asked:
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    own = next(iter(keys.clients), keys.harvester or b"")  # the harvester's may be the only one
    return {**scope, "headers": [*others, (b"authorization", b"Bearer " + own)]}


def most_bytes(scope: Scope, limits: ApiLimits) -> int:
    """Limit of a request's body; uploads have their own, and some room for the form around the file."""
    upload = method_of(scope) == "POST" and path_of(scope) == UPLOADS
    return limits.file_bytes + FORM_BYTES if upload else limits.body_bytes


def denial_of(scope: Scope, role: Role | None, limits: ApiLimits) -> JSONResponse | None:
    """The answer to a request whose key does not suffice for its route; None if it does."""
    method, path, wanted = method_of(scope), path_of(scope), wanted_by(scope, limits)
    if wanted is Need.NOTHING or role is Role.HARVESTER:
        return None
    if role is None:
        said = "this server wants an API key: send it as Authorization: Bearer KEY"
        return error(HTTPStatus.UNAUTHORIZED, said, **{"WWW-Authenticate": "Bearer"})
    if wanted is Need.HARVESTER and is_there(scope):
        return error(
            HTTPStatus.FORBIDDEN, f"{method} {path} changes the server for all: it wants the harvester's key"
        )
    return None


def refusal_of_page(scope: Scope, origin: bytes | None, args: Any, limits: ApiLimits) -> JSONResponse | None:
    """The answer to a page of another site in a browser on this machine, where no key is asked for; None to others.

    A site whose name is made to lead here has its pages ask as if they were this server's own. The user's own sites
    are in vLLM's `--allowed-origins`.
    """
    client, named = scope.get("client"), (origin or b"").decode("latin-1")
    if origin is None or client is None or not is_loopback(client[0]):
        return None
    allowed = getattr(args, "allowed_origins", None) or ()
    if is_loopback(host_in(named)) or not {"*", named}.isdisjoint(allowed):
        return None
    if wanted_by(scope, limits) is Need.NOTHING or is_batch(path_of(scope)):  # the Batch API looks itself
        return None
    said = "without an API key this server answers no page of another site: set a key, or --allowed-origins"
    return error(HTTPStatus.FORBIDDEN, said)


def wanted_by(scope: Scope, limits: ApiLimits) -> Need:
    """Key that a request needs."""
    if is_preflight(scope):
        return Need.NOTHING
    method = "GET" if method_of(scope) == "OPTIONS" else method_of(scope)
    return need(method, path_of(scope), open_metrics=limits.open_metrics)


def is_preflight(scope: Scope) -> bool:
    """True for a browser's preflight request, which carries no key.

    vLLM's CORS layer below answers it and passes it to no route. Any other OPTIONS reaches the routes, of which
    /metrics answers whatever the method.
    """
    named = {name for name, _ in scope["headers"]}
    return method_of(scope) == "OPTIONS" and named >= {b"origin", b"access-control-request-method"}


def method_of(scope: Scope) -> str:
    """Method of a request; that of a websocket's handshake is GET."""
    return str(scope.get("method", "GET"))


def is_there(scope: Scope) -> bool:
    """True if a route answers the request; a mistyped path is a 404 for every caller."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].router.routes)


class CountedBody:
    """A body without an announced length: cut off at the limit and answered with 413."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self._receive, self._send, self._most = receive, send, most
        self._bytes = 0
        self._started = False

    @property
    def _exceeded(self) -> bool:
        return self._bytes > self._most

    async def run(self, app: App, scope: Scope) -> None:
        """Let the app answer unless the body is too large."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._exceeded:
                raise
        if self._exceeded and not self._started:
            await too_large(self._most)(scope, self._receive, self._send)

    async def receive(self) -> Message:
        """The next part of the body; past the limit the client appears to have disconnected."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if self._exceeded else message

    async def send(self, message: Message) -> None:
        """Pass the answer on, unless the app answers a body that was cut off."""
        if self._started or not self._exceeded:
            self._started = True
            await self._send(message)


def too_large(most: int) -> JSONResponse:
    """Answer to a body over the limit. The rest of it is read and dropped, so that clients see the answer."""
    return error(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the request has more than {most:,} bytes; send less, or start the server with a larger --max-body",
    )


def error(status: HTTPStatus, message: str, **headers: str) -> JSONResponse:
    """An error in the form of OpenAI's API."""
    return JSONResponse(error_body(message, kind=kind_of(status), code=int(status)), status, headers=headers)
