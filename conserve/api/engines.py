"""Engines that stay up across jobs."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from conserve.api.display import SHOW_S, SilentDisplay, display_of, say
from conserve.api.portal import portal
from conserve.api.running import ProfileFlags, check_endpoint, make_endpoint
from conserve.api.twins import awaited
from conserve.config import Settings, load
from conserve.errors import UsageError
from conserve.hosts import without_login
from conserve.units import duration

if TYPE_CHECKING:
    from conserve.endpoints.protocol import Endpoint
    from conserve.endpoints.wrapped import BorrowedEndpoint


class Engine:
    """An engine, or a server, that stays ready across runs: `with conserve.Engine(MODEL) as engine`.

    `engine_args` are vLLM's own flags. Settings that are not given come from `CONSERVE_*` and conserve.toml.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        endpoint: str | None = None,
        api_key: str | None = None,
        engine_args: Sequence[str] = (),
        progress: bool = True,
    ) -> None:
        self._settings = load({"model": model, "endpoint": endpoint, "api_key": api_key})
        self._flags = tuple(engine_args)
        self._progress = progress
        self._endpoint: Endpoint | None = None
        self._closed = False
        self._pid: int | None = None  # of the process that started it
        self._starting = asyncio.Lock()
        check_endpoint(self._settings, self._flags, ProfileFlags())

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not started" if self._endpoint is None else "ready"
        return f"<conserve.Engine {self._named}: {state}>"

    @property
    def _named(self) -> str:
        endpoint = self._settings.endpoint
        return self._settings.engine_model if endpoint is None else without_login(endpoint)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an engine cannot be pickled, since it lives in its process; pickle its job or store"
        )

    def settings(self, store: Settings) -> Settings:
        """Settings of a run over this store on this engine."""
        return replace(
            store,
            model=self._settings.model,
            endpoint=self._settings.endpoint,
            api_key=self._settings.api_key,
        )

    @awaited
    async def start(self) -> None:
        """Start the engine, unless it is ready; with vLLM that takes up to a minute."""
        await self.borrowed()

    @awaited
    async def close(self) -> None:
        """Stop the engine and free its memory; end the runs on it first."""
        await self._close()

    async def borrowed(self) -> "BorrowedEndpoint":
        """Endpoint for one run, in the portal; the run's end does not close the engine."""
        if self._of_parent:
            raise UsageError(
                f"the engine runs in process {self._pid}, of which this one is a fork; "
                "make another conserve.Engine in this process"
            )
        self._pid = os.getpid()
        async with self._starting:
            if self._closed:
                raise UsageError("the engine is closed; make another one")
            if self._endpoint is None:
                endpoint = make_endpoint(self._settings, self._flags, ProfileFlags(), say=say)
                await self._shown_start(endpoint)
                self._endpoint = endpoint
                portal.last(self._close)
            from conserve.endpoints.wrapped import BorrowedEndpoint

            return BorrowedEndpoint(self._endpoint)

    @property
    def _of_parent(self) -> bool:
        """True in a fork of the process that started the engine."""
        return self._pid is not None and self._pid != os.getpid()

    async def _shown_start(self, endpoint: "Endpoint") -> None:
        """Start the endpoint beside a display of its steps."""
        display = display_of(progress=self._progress)
        begun = time.monotonic()
        showing = asyncio.create_task(show_steps(display, endpoint))
        try:
            await endpoint.start()
        except BaseException:
            display.leave()
            await asyncio.shield(endpoint.close())  # its processes may be up already
            raise
        finally:
            showing.cancel()
        display.end(f"{self._named}: ready after {duration(time.monotonic() - begun)}")

    async def _close(self) -> None:
        if self._of_parent:  # as where a fork leaves a `with` block
            return
        self._closed = True
        async with self._starting:  # a start that is under way ends first
            portal.not_last(self._close)
            endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None:
                await endpoint.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self.start.aio()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close.aio()


async def show_steps(display: SilentDisplay, endpoint: "Endpoint") -> None:
    """Show the steps of an endpoint's start until cancelled."""
    while True:
        if (step := endpoint.doing) is not None:
            display.step(step)
        await asyncio.sleep(SHOW_S)
