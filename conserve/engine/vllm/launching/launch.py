"""Starts vLLM's processes so that they keep quiet, ignore Ctrl-C and never outlive this process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeVar

from conserve.engine.vllm.compat.versions import name_here
from conserve.engine.vllm.launching import fork_server
from conserve.engine.vllm.launching.flags import configured, require_exchange
from conserve.engine.vllm.launching.watchdog import Watchdog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from conserve.engine.vllm.settings import RequestedSettings

T = TypeVar("T")
FORK_SERVER_GONE = 255  # exit code of a process whose fork server died; its real end is unknown
THREAD = "engine"  # name of the threads of `on_thread`
STARTING = threading.Lock()  # descriptors 1 and 2 and the list of children are the whole process's
os.register_at_fork(after_in_child=lambda: forget_starts())


class Launch:
    """One start of the engine: `run` builds it, `stop` shuts it down and waits for its processes."""

    def __init__(
        self, arguments: AsyncEngineArgs, *, log_descriptor: int, requested: RequestedSettings | None = None
    ) -> None:
        self._arguments = arguments
        self._requested = requested
        self._log_descriptor = log_descriptor
        self._not_ours: frozenset[BaseProcess] = frozenset()
        self._watchdogs: list[tuple[BaseProcess, Watchdog]] = []
        self._building = False  # if True, there are processes to end
        self._engine: AsyncLLM | None = None

    async def run(self) -> AsyncLLM:
        """Start the engine; raises whatever vLLM raises if it cannot start.

        If cancelled, waits until the half-started processes have ended, if there are any.
        """
        starting = asyncio.create_task(self._start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if not self._building:
                starting.cancel()
            await self._abandon(starting)
            raise

    async def stop(self) -> None:
        """Shut the engine down; may be called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await on_thread(engine.shutdown)
            await asyncio.sleep(0)  # its sockets are closed by a callback in this loop
            await on_thread(engine.engine_core.resources.ctx.term)  # vLLM leaves it open
        self._dismiss_watchdogs()

    async def _start(self) -> AsyncLLM:
        config = await on_thread(partial(configured, self._arguments, served=False))
        require_exchange(config)
        async with one_at_a_time():
            return await self._start_processes(config)

    async def _start_processes(self, config: VllmConfig) -> AsyncLLM:
        tell_steps(config)
        # Modules live to the end, and a full collection that visits them takes 0.6 s in the middle of the work.
        gc.freeze()
        atexit.register(thaw)
        if self._requested is not None:
            await on_thread(partial(self._requested.install, config))
        self._not_ours = frozenset(multiprocessing.active_children())
        self._building = True
        await on_thread(partial(fork_server.prepare, config))
        with output_to(self._log_descriptor), without_main():
            building = asyncio.ensure_future(on_thread(lambda: _build(config, self._arguments)))
            cores = await self._wait_for_cores(building, config.parallel_config.data_parallel_size_local)
        self._watchdogs = [(core, Watchdog(core.pid)) for core in cores if core.pid is not None]
        try:
            await on_thread(lambda: load_chat_template(config))
            self._engine = await building
        except BaseException:
            self._dismiss_watchdogs()
            raise
        return self._engine

    async def _wait_for_cores(self, building: asyncio.Future[AsyncLLM], count: int) -> list[BaseProcess]:
        # Only processes spawned while the output is redirected inherit the redirection: a second at most.
        while len(cores := self._cores()) < max(count, 1) and not building.done():
            await asyncio.sleep(0.02)
        return cores

    def _cores(self) -> list[BaseProcess]:
        if not self._building:
            return []
        ours = set(multiprocessing.active_children()) - self._not_ours
        return [process for process in ours if process.name.startswith("EngineCore")]

    async def _abandon(self, starting: asyncio.Task[AsyncLLM]) -> None:
        while not starting.done():
            for core in self._cores():
                core.kill()
            await asyncio.sleep(0.05)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            starting.result()
        await self.stop()

    def _dismiss_watchdogs(self) -> None:
        for core, watchdog in self._watchdogs:
            if core.exitcode == FORK_SERVER_GONE:  # the core may run on
                watchdog.kill()
            else:
                watchdog.dismiss()
        self._watchdogs = []


def thaw() -> None:
    """Free what DuckDB's classes are held by: while any is left at the end, it prints pages of warnings."""
    if "_duckdb" in sys.modules:
        gc.unfreeze()
        gc.collect()


def forget_starts() -> None:
    """Free the lock in a forked child: the thread that would have released it is in the parent alone."""
    global STARTING
    STARTING = threading.Lock()


@contextlib.asynccontextmanager
async def one_at_a_time() -> AsyncIterator[None]:
    """Wait until no other engine of this process starts, in whichever event loop."""
    held = STARTING  # a forked child has another
    while not held.acquire(blocking=False):  # a thread that waits could not be cancelled
        await asyncio.sleep(0.05)
    try:
        yield
    finally:
        held.release()


def tell_steps(config: VllmConfig) -> None:
    """Have vLLM's processes log the steps of their start, which the display reads (phases.TOLD).

    This process keeps its own log level: vLLM believes that the configuration is applied already.
    """
    import vllm.logger

    if name_here("vllm.config.VllmConfig.logging_config") is None:
        return  # the log level is the environment's, as this process has it
    if config.logging_config.log_level == "ERROR":
        config.logging_config = replace(config.logging_config, log_level="INFO")
        vllm.logger._last_configured_logging_config = config.logging_config


def load_chat_template(config: VllmConfig) -> None:
    """Render a chat while the processes start; else the first request would wait 0.7 s for vLLM to cache it."""
    from vllm.renderers import renderer_from_config
    from vllm.renderers.params import ChatParams

    if config.model_config.is_multimodal_model:  # the engine's own renderer loads its processor
        return
    with contextlib.suppress(Exception):  # the engine's renderer will fail in the same way, and report it
        renderer_from_config(config).warmup(ChatParams())


def _build(config: VllmConfig, arguments: AsyncEngineArgs) -> AsyncLLM:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)


def at_work() -> bool:
    """True if a thread of `on_thread` has not come to its end, such as one whose caller was cancelled."""
    return any(thread.name == THREAD for thread in threading.enumerate())


async def on_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread of its own, in which, as in its child processes, Ctrl-C is blocked.

    vLLM's core would stop on a terminal's Ctrl-C; we finish or withdraw rows first. The thread is a daemon, so
    that a second Ctrl-C need not wait for it.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # SystemExit would stop the event loop
            future.set_exception(RuntimeError(repr(error)))

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    return await asyncio.wrap_future(future)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not import the main module: a script without a guard would submit its job again.

    vLLM's processes need nothing of it.
    """
    prepared = spawn.get_preparation_data

    def without(name: str) -> dict[str, object]:
        return {key: value for key, value in prepared(name).items() if not key.startswith("init_main_from")}

    spawn.get_preparation_data = without
    try:
        yield
    finally:
        spawn.get_preparation_data = prepared


@contextlib.contextmanager
def output_to(descriptor: int) -> Iterator[None]:
    """Point descriptors 1 and 2, which child processes inherit, to `descriptor`; Python's own output stays."""
    with contextlib.ExitStack() as undo:
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = getattr(sys, name)
            saved = os.dup(number)
            undo.callback(os.close, saved)
            if _writes_to(stream, number):
                stream.flush()
                ours = undo.enter_context(open(saved, "w", buffering=1, closefd=False))
                undo.callback(setattr, sys, name, stream)
                setattr(sys, name, ours)
            os.dup2(descriptor, number)
            undo.callback(os.dup2, saved, number)
        yield


def _writes_to(stream: object, number: int) -> bool:
    try:
        return bool(stream.fileno() == number)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
