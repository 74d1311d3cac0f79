"""Waits that a cancellation does not cut short."""

import asyncio
import contextlib
from typing import Any


async def outlast(working: "asyncio.Future[Any]") -> None:
    """Wait until a task has ended, however often the wait is cancelled; its result and its error stay with it."""
    while not working.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([working])
