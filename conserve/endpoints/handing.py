"""Rows are handed to a co-serving server one at a time, so that a token of a live request hardly waits for several.

Parsing, checking and tokenizing a row takes a server's event loop milliseconds. Rows of one length end in one
iteration, and as many take their places: all at once they held up the tokens of live requests for tens of
milliseconds.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager

TURN_S = 0.01  # until the next row goes all the same: the server is far, or takes long for this one


class Handing:
    """The turns of rows on their way to one server."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for a turn, which ends with the block, or after `TURN_S`."""
        await self._free.acquire()
        with ExitStack() as turn:
            turn.callback(self._free.release)
            late = asyncio.get_running_loop().call_later(TURN_S, turn.close)
            turn.callback(late.cancel)
            yield
