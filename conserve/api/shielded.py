"""Waits that a cancellation does not cut short."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def outlast(working: "asyncio.Future[Any]") -> None:
    """Wait until a task has ended, however often the wait is cancelled; its result and its error stay with it."""
    while not working.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([working])


async def in_thread(call: Callable[[], T]) -> T:
    """Call in a thread; cancelled, wait until the call has ended, so that its caller may close what it uses."""
    working = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await outlast(working)
        raise
