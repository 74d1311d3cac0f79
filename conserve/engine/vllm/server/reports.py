"""The scheduler's report within a given time: it answers between two iterations, and an iteration may take long."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

log = logging.getLogger("vllm.conserve")

Ask = Callable[[Any], Awaitable[dict[str, Any] | None]]


class AgedReport(NamedTuple):
    """A report, None if another scheduler runs, and how many seconds ago it came."""

    said: Mapping[str, Any] | None
    age_s: float


class LastReports:
    """Asks the scheduler; questions at the same time share one, and the last answer is kept."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._last: Mapping[str, Any] | None = None
        self._came: float | None = None  # on the event loop's clock; None before the first answer

    def keep(self, said: Mapping[str, Any] | None) -> None:
        """Keep an answer as the last one."""
        self._last, self._came = said, asyncio.get_running_loop().time()

    async def within(self, engine_client: Any, wait_s: float) -> AgedReport | None:
        """The report, or the last one if the scheduler does not answer in time; None if there was none yet."""
        asking = self._asking
        if asking is None or asking.done():
            asking = self._asking = asyncio.ensure_future(self._look(engine_client))
        await asyncio.wait({asking}, timeout=wait_s)
        if asking.done() and (asking.cancelled() or asking.exception() is not None):
            log.debug("the scheduler does not answer: %r", asking)
        if self._came is None:
            return None
        return AgedReport(self._last, asyncio.get_running_loop().time() - self._came)

    async def _look(self, engine_client: Any) -> None:
        """Ask the scheduler, and keep its answer, whether or not a question still waits for it."""
        self.keep(await self._ask(engine_client))
