"""Ctrl-C while vLLM is imported, which cannot be interrupted; a stand-in for vLLM takes for ever."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.engine.vllm.launching.launch import Launch
from tests.commands import HANGS_S, conserve, ended, start, until
from tests.conftest import WriteInput
from tests.installed import needs
from tests.tiers import in_full

pytestmark = needs("vllm")

ENDLESS = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, *in_full(signal.SIGTERM)])
def test_a_run_ends_at_once_while_vllm_is_imported(
    write_input: WriteInput, tmp_path: Path, number: int
) -> None:
    assert conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}").returncode == 0
    library, model = tmp_path / "library" / "vllm", tmp_path / "model"
    for folder in (library, model):
        folder.mkdir(parents=True)
    (library / "__init__.py").write_text(ENDLESS)
    (model / "config.json").write_text("{}")
    ignored = signal.signal(number, signal.SIG_DFL)  # as `nohup` leaves one, which the command would heed
    try:
        path = os.pathsep.join([str(library.parent), os.environ.get("PYTHONPATH", "")])
        running = start(["-m", "conserve", "run", "--model", str(model)], {"PYTHONPATH": path})
        until((library / "begun").exists, running)
        running.send_signal(number)
        done = ended(running)
    finally:
        signal.signal(number, ignored)
    assert done.returncode == 130, done.stderr
    assert "stopping: saving progress" in done.stderr
    assert "stopped before any row was sent" in done.stderr
    assert "Traceback" not in done.stderr
    assert conserve("status", "last", "--json").stdout.count('"queued"') == 1


def test_a_launch_without_processes_is_left_at_once() -> None:
    begun, hangs = threading.Event(), threading.Event()

    def create_engine_config(_: Any) -> Any:
        begun.set()
        hangs.wait(HANGS_S)
        return None

    async def go() -> None:
        arguments: Any = SimpleNamespace(create_engine_config=create_engine_config)
        launch = asyncio.create_task(Launch(arguments, log_descriptor=2).run())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch
        assert any(thread.name == "engine" for thread in threading.enumerate()), (
            "it does not wait for its thread"
        )

    try:
        asyncio.run(go())
    finally:
        hangs.set()
