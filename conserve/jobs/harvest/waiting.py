"""Waits of the event loop that a signal may end."""

import asyncio


async def elapsed_or_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds` or until the event is set; returns True if it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
