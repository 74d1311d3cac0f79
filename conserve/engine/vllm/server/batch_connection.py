"""The way to the Batch API's process for small questions: GETs on connections that stay open, and whole answers.

An HTTP client takes ten times as long, for what these questions do not need. Their answers are this program's own:
each announces its length and is small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MOST = 64  # questions under way at once; more wait

Header = tuple[bytes, bytes]


class Reply(NamedTuple):
    """A whole answer; names of headers are in small letters."""

    status: int
    headers: Sequence[Header]
    body: bytes


class BatchConnections:
    """Connections to a Unix socket, for one event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[BatchConnection] = []
        self._free = asyncio.Semaphore(MOST)

    async def get(self, target: bytes, headers: Iterable[Header], within_s: float) -> Reply:
        """The answer to a GET of a path and query in ASCII.

        Raises `OSError` if there is none, `TimeoutError` among them, and `ValueError` for one of another form.
        """
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        asked = b"GET %s HTTP/1.1\r\n%s\r\n" % (target, lines)
        async with asyncio.timeout(within_s), self._free:
            while self._idle:
                kept = self._idle.pop()
                try:
                    return await self._answer(kept, asked)
                except ConnectionError:  # the process closes connections that were silent for some seconds
                    continue
            _, made = await asyncio.get_running_loop().create_unix_connection(BatchConnection, self._path)
            return await self._answer(made, asked)

    async def _answer(self, connection: BatchConnection, asked: bytes) -> Reply:
        try:
            reply = await connection.ask(asked)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Close the connections without a question under way."""
        while self._idle:
            self._idle.pop().close()


class BatchConnection(asyncio.Protocol):
    """One connection, with at most one question under way."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[Reply] | None = None
        self._got = b""

    def ask(self, asked: bytes) -> asyncio.Future[Reply]:
        """Send a question; the future raises `ConnectionError` if the connection ends before the answer does."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._got = b""
        if self._transport is None:
            answer.set_exception(ConnectionResetError())
        else:
            self._transport.write(asked)
        return answer

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        self._got += data
        try:
            reply = whole(self._got)
        except (ValueError, LookupError):
            self._answer.set_exception(ValueError("no answer of the Batch API"))
            return
        if reply is not None:
            self._answer.set_result(reply)


def whole(got: bytes) -> Reply | None:
    """The answer in these bytes, None before its end; raises `ValueError` or `LookupError` for another form."""
    head, end, body = got.partition(b"\r\n\r\n")
    if not end:
        return None
    first, *lines = head.split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    headers = [(name.lower(), value.strip()) for name, _, value in pairs]
    missing = int(dict(headers)[b"content-length"]) - len(body)
    if missing < 0:
        raise ValueError("more than one answer")
    return None if missing else Reply(int(first.split(b" ")[1]), headers, body)
