"""Limits of both HTTP servers, vLLM's and that of the Batch API, on clients, and the words of one to the other."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from enum import StrEnum
from http import HTTPStatus
from itertools import count
from typing import Any

from conserve.openai_error import error_body, kind_of

CONNECTIONS = 4096  # open at once
RESERVED = 512  # file descriptors kept for other things than clients' connections
RETRY_AFTER_S = 1
PART_S = 60.0  # for the next part of a body
STALLED = f"no part of the body came for {PART_S:.0f} s; send the request again"
KEEP_ALIVE_S = 75  # of a connection at rest: clients poll every few seconds, proxies keep theirs for a minute
CALLER_HEADER = "x-conserve-caller"
WHO = "/caller"  # route of the Batch API that a live server alone asks


class SaidOf(StrEnum):
    """Word of a live server, in `CALLER_HEADER`, on the caller of a request for the Batch API beside it."""

    KEYED = "keyed"
    """The caller sent a key of the server's own."""
    FAR = "far"
    """The caller sent no such key, and is of another machine or behind a proxy."""
    OPEN = "open"
    """The caller sent no such key, and is of this machine as far as the connection tells."""


async def parts(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a request's body as they come; raises `TimeoutError` if the next one takes too long."""
    while True:
        async with asyncio.timeout(PART_S):
            part = await anext(body, None)
        if part is None:
            return
        yield part


def affordable(wanted: int, descriptors: int) -> int:
    """The wanted number of connections, or as many as the limit of file descriptors leaves."""
    return max(1, min(wanted, descriptors - RESERVED))


def bounded(most: int) -> type[asyncio.Protocol]:
    """Make a protocol class for uvicorn that keeps at most `most` connections open.

    Beyond them the oldest connection that waits for its client is dropped: one whose client has to send the rest
    of a request or the next one, or to read. If the server owes an answer on every connection, the new one is told
    to come back. So slow clients cannot use the connections up.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol
    numbers = count()

    class Bounded(base):  # type: ignore[misc]
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.number = next(numbers)
            if len(self.connections) > most:
                waiting = [one for one in self.connections if one is not self and waits_for_its_client(one)]
                if waiting:
                    drop(min(waiting, key=lambda one: one.number))
                else:
                    self.app = full

    return Bounded


def waits_for_its_client(connection: Any) -> bool:
    """True if the server can do nothing on this connection before its client acts."""
    if not hasattr(connection, "number"):  # a WebSocket
        return False
    cycle = connection.cycle
    return bool(cycle is None or cycle.response_complete or cycle.more_body or connection.flow.write_paused)


def drop(connection: Any) -> None:
    """Close the connection at once; it no longer counts."""
    connection.connections.discard(connection)
    connection.transport.abort()


async def full(scope: Any, receive: Any, send: Any) -> None:
    """Answer on a connection beyond the limit, with OpenAI's error body."""
    from starlette.responses import JSONResponse

    said = "this server has as many connections as it may have (--max-connections); try again"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = error_body(said, kind=kind_of(status), code=int(status))
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    await JSONResponse(body, status, headers)(scope, receive, send)
