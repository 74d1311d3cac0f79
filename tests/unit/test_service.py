"""Supervisor of the processes of `conserve serve`."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from conserve.engine import service
from conserve.engine.service import ProcessCommand, Service, SupervisedProcess
from conserve.engine.vllm.launching.phases import CONVERTING, IMPORTING, server_step
from conserve.engine.vllm.model.demo_model import DEMO_MODEL
from conserve.engine.vllm.server import process
from conserve.errors import ServiceFailed

LOG = (
    "(APIServer) Resolved architecture",
    "(EngineCore) Initializing a V1 LLM engine (v0.32.0) with config",
    "(Worker) Starting to load model",
    "(Worker) Loading weights took 4.87 seconds",
    "(Worker) 30 safepoints between layers",
    "(APIServer) learning how long iterations take",
)


class StartingServer:
    """A process that writes a line to its log each time the log is read, and ends after the last one."""

    def __init__(self, command: ProcessCommand) -> None:
        self.command = command
        self.log_begins = 0
        self._lines, self._ends = 0, asyncio.Event()

    def written(self) -> str:
        self._lines += 1
        if self._lines == len(LOG):
            self._ends.set()
        return "\n".join(LOG[: self._lines])

    async def ended(self) -> int:
        await self._ends.wait()
        return 3


def test_a_harvester_that_is_started_again_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "harvester.log"
    command = ProcessCommand(name="harvester", words=service.python("conserve", "--nonsense"), log=log)

    async def first_sentence() -> str:
        said = asyncio.Queue[str]()
        child = SupervisedProcess(command)
        await child.start()
        kept = Service(command, None, url="http://127.0.0.1:1", say=said.put_nowait)
        keeping = asyncio.create_task(kept._keep(child))
        sentence = await said.get()
        keeping.cancel()
        assert said.empty()
        return sentence

    assert asyncio.run(first_sentence()) == (
        f"the harvester ended (2); its log is {log}; starting it again in 1 s"
    )
    assert "--nonsense" in log.read_text()


def test_a_harvester_that_cannot_be_started_again_is_tried_again_and_the_server_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, said = ProcessCommand(name="harvester", words=("/bin/sh", "-c", "exit 2")), list[str]()
    monkeypatch.setattr(SupervisedProcess, "pause_s", lambda _: 0.0)

    async def keep() -> None:
        child, started = SupervisedProcess(command), asyncio.Event()
        await child.start()
        errors = iter([OSError(11, "no process is left"), OSError(12, "no memory is left")])

        async def start() -> None:
            for error in errors:
                raise error
            started.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(child, "start", start)
        kept = Service(command, None, url="http://127.0.0.1:1", say=said.append)
        keeping, starting = asyncio.create_task(kept._keep(child)), asyncio.create_task(started.wait())
        await asyncio.wait({keeping, starting}, return_when=asyncio.FIRST_COMPLETED)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(keep())
    assert said == [
        "the harvester ended (2); starting it again in 0 s",
        "the harvester could not be started ([Errno 11] no process is left); starting it again in 0 s",
        "the harvester could not be started ([Errno 12] no memory is left); starting it again in 0 s",
    ]


def test_a_start_says_its_steps_and_where_its_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(service, "READY_S", 0.0)
    said: list[str] = []
    command = ProcessCommand(name="server", words=(), log=tmp_path / "8000.log")
    starting = Service(command, None, url=f"http://127.0.0.1:{port}", say=said.append)
    assert starting.log == command.log

    async def start() -> None:
        monkeypatch.setattr(starting, "_server", StartingServer(command))
        await starting._ready()

    with pytest.raises(ServiceFailed, match="the server ended with code 3"):
        asyncio.run(start())
    assert [words.partition(",")[0] for words in said] == [
        "importing vLLM",
        "starting its processes",
        "loading the weights",
        "preparing the model",
        "learning the machine's speed",
    ]


def test_a_server_that_is_killed_while_it_starts_leaves_no_process_behind(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an engine core, which would hold the GPUs' memory."""
    monkeypatch.setattr(service, "READY_S", 0.0)
    held = tmp_path / "held"
    os.mkfifo(held)
    begins = f"(echo holding; exec sleep 600) > {held} & read word < {held}; kill -9 $$"
    server = ProcessCommand(name="server", words=("/bin/sh", "-c", begins))

    async def on_ready() -> None:
        pytest.fail("a server that is dead was ready")

    async def go() -> None:
        starting = Service(server, None, url=f"http://127.0.0.1:{port}", say=lambda _: None)
        await starting.run(asyncio.Event(), on_ready=on_ready)

    with pytest.raises(ServiceFailed, match="ended by signal 9"):
        asyncio.run(go())
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    assert os.read(reading, 1) == b"", "the end comes once the process has ended"
    os.close(reading)


def test_a_server_that_passes_the_batch_apis_streams_on_is_stopped_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends once they do, and they end with the Batch API."""
    stream = tmp_path / "stream"
    os.mkfifo(stream)
    passes_on = (
        "import signal, sys\n"
        "stream = open(sys.argv[1], 'rb')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(stream.read())))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    streams = "import signal, sys; stream = open(sys.argv[1], 'wb'); signal.pause()"
    server = ProcessCommand(
        name="server", words=(sys.executable, "-c", passes_on, str(stream)), log=tmp_path / "server.log"
    )
    beside = ProcessCommand(name="Batch API", words=(sys.executable, "-c", streams, str(stream)))

    async def go() -> int | None:
        stop = asyncio.Event()
        serving = Service(server, None, url="http://127.0.0.1:1", say=lambda _: None, batch_api=beside)

        async def ready() -> None:
            while "ready" not in (serving._server.written() or ""):
                await asyncio.sleep(0.01)

        async def on_ready() -> None:
            stop.set()

        monkeypatch.setattr(serving, "_ready", ready)
        await serving.run(stop, on_ready=on_ready)
        assert serving._server.process is not None
        return serving._server.process.returncode

    assert asyncio.run(go()) == 0


def test_a_start_is_read_from_its_own_beginning_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "8000.log"
    server = SupervisedProcess(ProcessCommand(name="server", words=("/bin/sh", "-c", "echo new"), log=log))
    assert server.written() is None
    log.write_text("of an earlier start\n")

    async def run() -> None:
        await server.start()
        await server.ended()

    asyncio.run(run())
    assert server.written() == "new\n"


def test_a_start_says_that_it_converts_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []

    def converts(model: str, folder: Path) -> str:
        steps.append(server_step(capsys.readouterr().err))
        return str(folder / model)

    monkeypatch.setattr(process, "resolve_model", converts)
    assert process.at_hand(DEMO_MODEL, tmp_path) == str(tmp_path / DEMO_MODEL)
    assert process.at_hand("org/other", tmp_path) == str(tmp_path / "org/other")
    assert steps == [CONVERTING, IMPORTING]
