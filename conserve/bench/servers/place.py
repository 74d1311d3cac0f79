"""A server under test with its harvester: started, stopped in its tracks, let go on, ended."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from typing import Any

from conserve.bench.cores import pin_processes
from conserve.bench.playing import Say
from conserve.bench.presets import Preset
from conserve.bench.stock import until_ready
from conserve.engine.service import ProcessCommand, Service
from conserve.units import duration

END_S = 5.0  # until processes are killed: their unsaved progress is of the benchmark's own store
AWAKE_S = 60.0  # for a server to answer again
HARVESTER_S = 1.0  # until a harvester is up
# Thaws the groups of processes once its standard input ends: with this process, however that ends.
WARDEN = 'read -r _; for group; do kill -s CONT -- "-$group"; done 2>/dev/null; exit 0'


class ServerPlace:
    """One of the servers of a comparison."""

    def __init__(
        self,
        name: str,
        command: ProcessCommand,
        harvester: ProcessCommand | None,
        server: Any,
        *,
        url: str,
        preset: Preset,
        say: Say,
    ) -> None:
        """`server` reads its counters (`field.CountedServer`)."""
        self.name, self.server, self.url = name, server, url
        self._command, self._harvester, self._preset, self._say = command, harvester, preset, say
        self._service: Service | None = None
        self._running: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._warden: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._filled = False
        self._had_turns = False

    @property
    def started(self) -> bool:
        """True from the start to the end of the processes."""
        return self._running is not None

    @property
    def harvester_said(self) -> str:
        """Last line of the harvester's log; `nothing` without one."""
        log = self._harvester.log if self._harvester is not None else None
        lines = log.read_text(errors="replace").splitlines() if log is not None and log.exists() else []
        return lines[-1] if lines else "nothing"

    async def begin(self) -> None:
        """Start the server, or let it go on; returns once it answers. Raises `ConserveError`."""
        if self._running is None:
            await self._start()
        elif self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False
            await until_ready(self.url, within_s=AWAKE_S)
        elif self._running.done():
            self._running.result()

    async def freeze(self) -> None:
        """Stop all processes in their tracks, so that they take no time from another server."""
        if self._running is not None and not self._running.done() and not self._frozen:
            self._frozen = True
            self._guard()
            self._signal(signal.SIGSTOP)

    async def filled(self, seconds: float) -> None:
        """Let rows run for a while if they have not run here before: at first there are only prompts."""
        if not self._filled:
            self._filled = True
            await asyncio.sleep(seconds)

    def first_turn(self) -> bool:
        """True at the first call since the start."""
        first, self._had_turns = not self._had_turns, True
        return first

    async def harvest_by(self, command: ProcessCommand) -> None:
        """Replace the harvester by one that this command starts."""
        self._harvester = command
        if self._service is not None:
            await self._service.harvest_by(command)
            await asyncio.sleep(HARVESTER_S)

    async def end(self) -> None:
        """End the processes, and kill them after `END_S`."""
        running, service = self._running, self._service
        if running is None or service is None:
            return
        self._signal(signal.SIGCONT)
        self._stop.set()
        try:
            await asyncio.wait({running}, timeout=END_S)
        finally:  # even after a Ctrl-C meanwhile
            if not running.done():
                service.kill()
            self._dismiss()
            self._running = self._service = None
            self._frozen = self._filled = self._had_turns = False
            await running

    async def _start(self) -> None:
        self._stop, ready = asyncio.Event(), asyncio.Event()
        service = Service(self._command, self._harvester, url=self.url, say=self._say)

        async def on_ready() -> None:
            ready.set()

        begun = time.monotonic()
        self._service = service
        self._running = running = asyncio.create_task(service.run(self._stop, on_ready=on_ready))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            waiting.cancel()
        await asyncio.sleep(HARVESTER_S)
        self._pin()
        self._say(f"{self.name} is ready after {duration(time.monotonic() - begun)}")

    def _groups(self) -> list[int]:
        """Process groups: each process that the service starts leads a session of its own."""
        return self._service.process_ids() if self._service is not None else []

    def _signal(self, number: int) -> None:
        for group in self._groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def _guard(self) -> None:
        """Have the processes go on, and so end, should this one die while they are stopped."""
        self._dismiss()
        groups = [str(group) for group in self._groups()]
        if groups:
            self._warden = subprocess.Popen(
                ["/bin/sh", "-c", WARDEN, "warden", *groups], stdin=subprocess.PIPE, start_new_session=True
            )

    def _dismiss(self) -> None:
        """Have the warden of an earlier turn end; the processes that it knows go on by that."""
        if self._warden is not None and self._warden.stdin is not None:
            self._warden.stdin.close()
            self._warden.wait()
        self._warden = None

    def _pin(self) -> None:
        """Pin the engine's worker to its cores, all other processes to the rest."""
        if self._preset.engine_cores:
            pin_processes(self._groups(), self._preset.engine_cores, self._preset.other_cores)
