"""Two embedded engines that start at once in one process: one after the other, each with its own processes."""

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.vllm.launching import fork_server, launch
from conserve.engine.vllm.launching.launch import Launch

CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1))


class Core:
    """A process of an engine that starts."""

    name, pid, exitcode = "EngineCore_0", None, None

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    def kill(self) -> None:
        self.killed.set()


class Builder:
    """Stands for vLLM: an engine takes until the test says, or until its process is killed."""

    def __init__(self) -> None:
        self.cores: list[Core] = []
        self.may_end = asyncio.Event()
        self.redirections = 0

    async def build(self, *given: object) -> Core:
        assert self.redirections == 1, "its process inherits the redirection of this start alone"
        core = Core()
        self.cores.append(core)
        ends = [asyncio.create_task(event.wait()) for event in (self.may_end, core.killed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if core.killed.is_set():
            raise RuntimeError("its process was killed")
        return core

    def alive(self) -> list[Core]:
        return [core for core in self.cores if not core.killed.is_set()]

    @contextlib.contextmanager
    def output_to(self, descriptor: int) -> Iterator[None]:
        self.redirections += 1
        yield
        self.redirections -= 1


async def here(work: Callable[[], Any]) -> Any:
    """Stands for `on_thread`."""
    found = work()
    return await found if asyncio.iscoroutine(found) else found


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    for name in ("tell_steps", "load_chat_template"):
        monkeypatch.setattr(launch, name, lambda config: None)
    monkeypatch.setattr(fork_server, "prepare", lambda config: None)
    monkeypatch.setattr(launch, "gc", SimpleNamespace(freeze=lambda: None))
    monkeypatch.setattr(launch, "on_thread", here)
    monkeypatch.setattr(launch, "_build", builder.build)
    monkeypatch.setattr(launch, "output_to", builder.output_to)
    monkeypatch.setattr(multiprocessing, "active_children", builder.alive)
    return builder


def new_launch() -> Launch:
    arguments: Any = SimpleNamespace(create_engine_config=lambda _: CONFIG)
    return Launch(arguments, log_descriptor=2)


async def both_begun(builder: Builder) -> list[asyncio.Task[Any]]:
    """Two starts, of which the second has had every chance to go on."""
    starts = [asyncio.create_task(one.run()) for one in (new_launch(), new_launch())]
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(builder.cores) == 1
    return starts


def test_the_second_start_waits_for_the_first(builder: Builder) -> None:
    async def go() -> None:
        starts = await both_begun(builder)
        builder.may_end.set()
        assert await asyncio.gather(*starts) == builder.cores
        assert len(builder.cores) == 2

    asyncio.run(go())


def test_a_start_that_waits_is_cancelled_without_harm_to_the_first(builder: Builder) -> None:
    async def go() -> None:
        first, second = await both_begun(builder)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert builder.alive() == builder.cores
        builder.may_end.set()
        assert await first is builder.cores[0]

    asyncio.run(go())


def test_a_start_that_is_cancelled_ends_its_own_process_and_lets_the_next_begin(builder: Builder) -> None:
    async def go() -> None:
        first, second = await both_begun(builder)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert builder.cores[0].killed.is_set()
        builder.may_end.set()
        assert await second is builder.cores[1]
        assert builder.alive() == [builder.cores[1]]

    asyncio.run(go())


def test_a_child_that_is_forked_during_a_start_may_start_an_engine_itself() -> None:
    async def start() -> int:
        async with launch.one_at_a_time():
            assert launch.STARTING.locked()
            if (child := os.fork()) == 0:
                os._exit(int(launch.STARTING.locked()))
            return os.waitpid(child, 0)[1]

    assert asyncio.run(start()) == 0
    assert not launch.STARTING.locked()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from conserve.engine.vllm.launching.launch import without_main\n"
        "print('begun', flush=True)\n"
        "with without_main():\n"
        f"    child = multiprocessing.get_context({method!r}).Process(target=print, args=('child',))\n"
        "    child.start()\n"
        "child.join()\n"
        "print(child.exitcode)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["begun", "child", "0"], "")


def test_a_process_in_which_an_engine_started_ends_without_warnings_of_duckdb() -> None:
    """Objects that an engine's start has frozen are collected all the same."""
    script = (
        "import atexit, gc, duckdb\n"
        "from conserve.engine.vllm.launching.launch import thaw\n"
        "class Held: pass\n"
        "held = Held(); held.itself = held; held.relation = duckdb.sql('select 1')\n"
        "gc.freeze(); atexit.register(thaw)\n"
        "del held\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
