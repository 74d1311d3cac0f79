"""An event loop whose clock the program moves: it stands still while anything runs and then jumps.

A wait of a minute takes no time, one of 5 ms is over before one of 6 ms on any machine, and a promise like
"within a second" is exact. Work in threads takes as long as it takes; for the clock it is instant.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

BEGIN_S = 1e9  # like the system's clock, for code that asks for the time of day
TICK_S = 1e-5  # that a turn of the loop takes, so that code which looks at the clock until it is time ends


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer once no callback is ready and no thread works."""

    def __init__(self) -> None:
        self._now, self._working = BEGIN_S, 0
        super().__init__(Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    @property
    def threads_work(self) -> bool:
        """True if a thread will still call back."""
        return self._working > 0

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        future = super().run_in_executor(executor, func, *args)
        self._working += 1
        future.add_done_callback(self._worked)
        return future

    def _worked(self, _: "asyncio.Future[Any]") -> None:
        self._working -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._working += 1
        await super().shutdown_default_executor(*args)


class Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Waits for threads only; for timers it moves the loop's clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and self._loop.threads_work and timeout != 0:
            ready = super().select(None)
        elif not ready and timeout is None:
            raise RuntimeError("every task waits for something that nothing will bring about")
        elif not ready and timeout:
            self._loop.jump(timeout)
        self._loop.jump(TICK_S)
        return ready


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
