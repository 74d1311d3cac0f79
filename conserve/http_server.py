"""What both HTTP servers, vLLM's and that of the Batch API, ask of their clients."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

PART_S = 60.0  # for the next part of a body
STALLED = f"no part of the body came for {PART_S:.0f} s; send the request again"


async def parts(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a request's body as they come; raises `TimeoutError` if the next one takes too long."""
    while True:
        async with asyncio.timeout(PART_S):
            part = await anext(body, None)
        if part is None:
            return
        yield part
