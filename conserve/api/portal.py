"""The portal: one event loop in a thread of its own, in which runs and engines live.

So blocking calls work where a loop runs already, as in Jupyter, and awaited ones work in any loop.
"""

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")

STOPPING = "stopping: saving progress (once more to stop at once)"
ENDS_WITHIN_S = 5.0  # a task that is cancelled
AT_EXIT: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
"""Registers a function for the time at which thread pools still take work; that of atexit's is too late."""


class Pending(Generic[T]):
    """Work in the portal's loop that may be waited for from any thread and any loop."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self.done: Future[T] = Future()
        loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(self._run(work))
        self._task.add_done_callback(lambda ended: self._never_begun(work))

    async def _run(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            self.done.set_result(await work)
        except BaseException as error:
            self.done.set_exception(error)

    def _never_begun(self, work: Coroutine[Any, Any, T]) -> None:
        if not self.done.done():  # a task that is cancelled before its first step runs nothing of `_run`
            work.close()
            self.done.set_exception(asyncio.CancelledError())

    def cancel(self) -> None:
        """Cancel the work, which then saves what it has; `done` says when."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task is not None else None)

    def result(self) -> T:
        """Wait for the end. Ctrl-C cancels the work and waits for what it saves; a second one does not wait."""
        try:
            return self.done.result()
        except KeyboardInterrupt:
            print(STOPPING, file=sys.stderr, flush=True)
            self.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                self.done.result()
            raise

    async def awaited(self) -> T:
        """Wait for the end in the caller's loop. Cancelling the caller cancels the work and waits likewise."""
        waiting = asyncio.wrap_future(self.done)
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it is known here
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([waiting])
            raise


class Portal:
    """An event loop in a daemon thread, started by its first work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last: list[Callable[[], Coroutine[Any, Any, object]]] = []

    def submit(self, work: Coroutine[Any, Any, T]) -> Pending[T]:
        """Run a coroutine in the loop."""
        return Pending(work, self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                import concurrent.futures.thread  # noqa: F401  what it registers is to run after `end`

                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="conserve", daemon=True).start()
                AT_EXIT(self.end)
            return self._loop

    def last(self, end: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Await `end()` in the loop before the interpreter ends."""
        self._last.append(end)

    def not_last(self, end: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Take back a `last`."""
        with contextlib.suppress(ValueError):
            self._last.remove(end)

    def end(self) -> None:
        """End what still runs, in the reverse order of its beginning, and then the tasks beside it.

        A forked child inherits the registration of `end`, but not the loop: nothing runs there.
        """
        if self._loop is None:
            return
        while self._last:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                self.submit(self._last.pop()()).done.result()
        self.submit(cancel_others()).done.result()


async def cancel_others() -> None:
    """Cancel the other tasks of this loop: once thread pools take no work, one that begins anew would fail."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=ENDS_WITHIN_S)


portal = Portal()


def forget() -> None:
    """Forget the loop in a forked child, which has not its thread."""
    portal.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=forget)
