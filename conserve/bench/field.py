"""The field of a comparison: the servers under test, of which one has its turn."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from conserve.bench.answers import LoadAnswer
from conserve.bench.attainment import LatencyLimits
from conserve.bench.load import LoadTarget

LOOK_S = 1.0  # time between two readings of the counters
C = TypeVar("C")


class CountedServer(Protocol):
    """A server whose counters are read while a block is played."""

    async def counters(self) -> Any:
        """Counts since its start."""

    async def watch(self, start_at: float) -> list[tuple[float, Any]]:
        """Read the counts until cancelled; returns them with their times in s since `start_at`."""

    def counted(
        self,
        first: Any,
        last: Any,
        seen: Sequence[tuple[float, Any]],
        answers: Sequence[LoadAnswer],
        duration_s: float,
    ) -> dict[str, Any]:
        """Counts of a block, by the names of `Block`."""


class Turn(NamedTuple):
    """The server that has its turn, how live requests reach it, and the seed of their prompts.

    No two turns of a field share a seed, or prefix caches would hold the prompts of the earlier one.
    """

    server: CountedServer
    target: LoadTarget
    seed: int
    first: bool = False  # since the server's start: it has seen no live request yet


class Field(Protocol):
    """Servers that take turns, so that no two of them compute at the same time."""

    async def turn(self, policy: str, slo: LatencyLimits | None) -> Turn:
        """Give the server of this policy its turn; raises `EndpointUnusable`."""

    async def played(self, policy: str) -> None:
        """Look at the offline rows after a block of this policy; raises `ConserveError` if none is left."""


async def readings(counters: Callable[[], Awaitable[C]], start_at: float) -> list[tuple[float, C]]:
    """Counts every `LOOK_S` until cancelled, with their times in s since `start_at`."""
    loop, seen = asyncio.get_running_loop(), list[tuple[float, C]]()
    try:
        while True:
            seen.append((loop.time() - start_at, await counters()))
            await asyncio.sleep(LOOK_S)
    except asyncio.CancelledError:
        return seen
