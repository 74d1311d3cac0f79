"""Limit on open connections that slow clients cannot use up: uvicorn's HTTP protocol with one more rule."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from itertools import count
from typing import Any

from starlette.types import Receive, Scope, Send

from conserve.engine.vllm.server.guard import error

RESERVED = 512  # file descriptors kept for other things than clients' connections
RETRY_AFTER_S = 1


def affordable(wanted: int, descriptors: int) -> int:
    """The wanted number of connections, or as many as the limit of file descriptors leaves."""
    return max(1, min(wanted, descriptors - RESERVED))


def bounded(most: int) -> type[asyncio.Protocol]:
    """Make a protocol class for uvicorn that keeps at most `most` connections open.

    Beyond them the oldest connection that waits for its client is dropped: one whose client has to send the rest
    of a request or the next one, or to read. If the server owes an answer on every connection, the new one is told
    to come back.
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


async def full(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer on a connection beyond the limit."""
    said = "this server has as many connections as it may have (--max-connections); try again"
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    await error(HTTPStatus.SERVICE_UNAVAILABLE, said, **headers)(scope, receive, send)
