"""Supervisor of the processes of `conserve serve`: vLLM's server and a harvester."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from conserve.engine.runtime.parent_death import follow_parent
from conserve.engine.vllm.launching.environment import last_error
from conserve.engine.vllm.launching.phases import server_step
from conserve.errors import ServiceFailed
from conserve.logs import plain

READY_S = 0.5  # between two checks of the starting server
LONGEST_BACKOFF_S = 60.0
STEADY_S = 60.0  # a process that ran this long is started again without a pause
HARVESTER_S = 20.0  # to save progress
DRAIN_S = 45.0  # for the server to finish running requests: more than vLLM's own limit (--shutdown-timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCommand:
    """Command line, environment and log of a process."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None  # file for its output; None: our own output


class SupervisedProcess:
    """A process that is started again when it ends by itself."""

    def __init__(self, command: ProcessCommand) -> None:
        self.command = command
        self.process: asyncio.subprocess.Process | None = None
        self.log_begins = 0  # offset of this start's output in the log
        self._backoff_s = 0.0
        self._started = 0.0

    async def start(self) -> None:
        """Start the process."""
        self._started = time.monotonic()
        with contextlib.ExitStack() as files:
            output = None
            if self.command.log is not None:
                self.command.log.parent.mkdir(parents=True, exist_ok=True)
                output = files.enter_context(self.command.log.open("ab"))
                self.log_begins = output.tell()
            self.process = await asyncio.create_subprocess_exec(
                *self.command.words,
                env={**os.environ, **self.command.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C reaches only us; we pass it on
                preexec_fn=partial(follow_parent, parent=os.getpid()),  # if we are killed, it gets SIGTERM
            )

    def written(self) -> str | None:
        """Output of this start so far; None if it goes to no file."""
        log = self.command.log
        if log is None or not log.is_file():
            return None
        with log.open("rb") as file:
            file.seek(self.log_begins)
            return file.read().decode(errors="replace")

    async def ended(self) -> int:
        """Wait for the process to end, and kill child processes that it left behind; returns its exit code."""
        assert self.process is not None
        code = await self.process.wait()
        self.kill()  # such as an engine core whose server was killed while it started
        return code

    def pause_s(self) -> float:
        """Seconds to wait before the next start: 1, 2, 4 ... if the process keeps ending."""
        steady = time.monotonic() - self._started > STEADY_S
        self._backoff_s = 0.0 if steady else min(max(1.0, self._backoff_s * 2), LONGEST_BACKOFF_S)
        return self._backoff_s

    async def stop(self, within_s: float) -> None:
        """Send SIGTERM, and SIGKILL if the process has not ended after this many seconds."""
        if self.process is None or self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.process.wait()
        self.kill()  # the process, or child processes that it left behind
        await self.process.wait()

    def kill(self) -> None:
        """Kill the process and its own children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Service:
    """A server and, if wanted, a harvester and the Batch API; `run` returns once all have stopped."""

    def __init__(
        self,
        server: ProcessCommand,
        harvester: ProcessCommand | None,
        *,
        url: str,
        say: Callable[[str], None],
        drain_s: float = DRAIN_S,
        before_stop: Callable[[], Awaitable[None]] | None = None,
        batch_api: ProcessCommand | None = None,
    ) -> None:
        self._before_stop = before_stop
        self._drain_s = drain_s
        self._server = SupervisedProcess(server)
        self._harvester = SupervisedProcess(harvester) if harvester is not None else None
        self._batch_api = SupervisedProcess(batch_api) if batch_api is not None else None
        self._url = url
        self._say = say

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Serve until `stop` is set; raises `ServiceFailed` if the server does not come up the first time.

        Once it has come up, `before_stop` runs before anything is stopped.
        """
        stopping = asyncio.create_task(stop.wait())
        served = False
        try:
            await self._server.start()
            if self._batch_api is not None:
                await self._batch_api.start()  # up long before the server is
            if not await self._until(stopping, self._ready()):
                return
            await on_ready()
            served = True
            keepers = [self._keep_server()]
            if self._batch_api is not None:
                keepers.append(self._keep(self._batch_api))
            if self._harvester is not None:
                await self._harvester.start()
                keepers.append(self._keep(self._harvester))
            await self._until(stopping, asyncio.gather(*keepers))
        finally:
            stopping.cancel()
            if served and stop.is_set() and self._before_stop is not None:
                await self._before_stop()
            # The harvester first: it saves its progress while live requests are still served.
            if self._harvester is not None:
                await self._harvester.stop(HARVESTER_S)
            # The Batch API with the server, which would else wait for its streams of events.
            rest = filter(None, (self._server, self._batch_api))
            await asyncio.gather(*(child.stop(self._drain_s) for child in rest))

    @property
    def log(self) -> Path | None:
        """File of the server's output."""
        return self._server.command.log

    def process_ids(self) -> list[int]:
        """Process ids of the server and of those beside it, if they were started."""
        children = filter(None, (self._server, self._harvester, self._batch_api))
        return [child.process.pid for child in children if child.process is not None]

    async def harvest_by(self, command: ProcessCommand) -> None:
        """End the harvester, which saves its progress; the one that follows is started by this command."""
        if self._harvester is not None:
            self._harvester.command = command
            if self._harvester.process is not None and self._harvester.process.returncode is None:
                self._harvester.process.terminate()

    def kill(self) -> None:
        """Kill all processes at once."""
        for child in filter(None, (self._harvester, self._batch_api, self._server)):
            child.kill()

    async def _until(self, stopping: "asyncio.Task[bool]", work: Awaitable[object]) -> bool:
        """Do the work unless told to stop meanwhile; True if it was done."""
        working = asyncio.ensure_future(work)
        await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
            return False
        working.result()
        return not stopping.done()

    async def _ready(self) -> None:
        """Wait until the server answers, and say each step; raises `ServiceFailed` if its process ends first."""
        ending, begun, said = asyncio.create_task(self._server.ended()), time.monotonic(), None
        try:
            async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
                while not ending.done():
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"{self._url}/health")).status_code == httpx.codes.OK:
                            return
                    log = self._server.written()
                    if log is not None and (step := server_step(log)) != said:
                        self._say(f"{step}, after {time.monotonic() - begun:.0f} s" if said else step)
                        said = step
                    await asyncio.wait({ending}, timeout=READY_S)
        finally:
            ending.cancel()
        raise ServiceFailed(why_ended(self._server, ending.result()))

    async def _keep_server(self) -> None:
        while True:
            code = await self._server.ended()
            pause_s = self._server.pause_s()
            self._say(f"{why_ended(self._server, code)}; starting it again")
            await asyncio.sleep(pause_s)
            await self._server.start()
            try:
                await self._ready()
            except ServiceFailed:
                continue
            self._say(f"serving again at {self._url}")

    async def _keep(self, child: SupervisedProcess) -> None:
        while True:
            code = await child.ended()
            await self._start_again(child, f"ended ({code}){log_of(child.command)}")

    async def _start_again(self, child: SupervisedProcess, why: str) -> None:
        """Start a process beside the server, which serves on, until the machine has memory and processes for it."""
        while True:
            pause_s = child.pause_s()
            self._say(f"the {child.command.name} {why}; starting it again in {pause_s:.0f} s")
            await asyncio.sleep(pause_s)
            try:
                return await child.start()
            except OSError as error:
                why = f"could not be started ({error})"


def why_ended(child: SupervisedProcess, code: int) -> str:
    """One sentence on why a process ended, from the end of its log."""
    tail, command = "", child.command
    if command.log is not None and command.log.exists():
        with command.log.open("rb") as file:
            file.seek(max(child.log_begins, command.log.stat().st_size - 65_536))
            tail = file.read().decode(errors="replace")
    tail = plain(tail)
    ours = re.findall(r"^conserve: (.+)$", tail, re.MULTILINE)
    if ours:
        return str(ours[-1])
    if usage := re.findall(r"^vllm serve: error: (.+)$", tail, re.MULTILINE):
        return f"vLLM does not take these flags: {usage[-1]}"
    cause = last_error(tail)
    why = f": {cause[:300]}" if cause else ""
    killed = f" by signal {-code}" if code < 0 else ""
    return f"the {command.name} ended{killed or f' with code {code}'}{why}{log_of(command)}"


def log_of(command: ProcessCommand) -> str:
    """End of a sentence that names the file of a process's words; nothing if they are among ours."""
    return f"; its log is {command.log}" if command.log else ""


def python(module: str, *words: str) -> list[str]:
    """Command line that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *words]
