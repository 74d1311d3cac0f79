"""Kills of the parts of `conserve serve`, whose server is scripted: no row is lost, and no process stays."""

import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from conserve.config import load
from conserve.jobs.task import Kind, Task
from conserve.store.books.readings import read_jobs
from tests import commands
from tests.acceptance.kill_harness import answer
from tests.commands import conserve
from tests.held_port import held_port

from .audit import audit
from .table import report

pytestmark = [pytest.mark.breakage, pytest.mark.full]

ROWS, TOKENS, KILLS = 500, 40, 6
PARTS = ("supervisor", "server", "harvester")
WAYS = (signal.SIGKILL, signal.SIGTERM)
TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


def test_no_kill_of_a_part_loses_or_doubles_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, seed: int
) -> None:
    for number in range(seed, seed + rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("CONSERVE_HOME", str(folder / "home"))
        play(folder, random.Random(f"{number} served"))


def play(folder: Path, dice: random.Random) -> None:
    """Serve a job, kill parts while it runs, and look at what came of it."""
    prompts = [f"served {n}" for n in range(ROWS)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": prompt}) + "\n" for prompt in prompts))
    words = ["submit", str(path), "--prompt", "{{ q }}", "--max-tokens", str(TOKENS)]
    job_id = conserve(*words).stdout.strip()
    kills = 0
    with held_port() as port:
        running = served(folder, port)
        while kills < KILLS and not completed():
            before = rows_done()
            commands.until(lambda: rows_done() > before or completed(), running)  # noqa: B023
            part, family = dice.choice(PARTS), family_of(running)
            kills += strike(running, part, dice.choice(WAYS))
            if part == "supervisor":
                end(running, family)
                running = served(folder, port)
        commands.until(completed, running)
        family = family_of(running)
        running.terminate()
        end(running, family)
    (found,) = audit(folder / "home").values()
    assert found.by_row() == {row: (answer(TASK, prompt, TOKENS), None) for row, prompt in enumerate(prompts)}
    assert found.id == job_id
    report("kill -9, -15: parts of serve", tried=kills, lost=found.lost, doubled=found.doubled)


def served(folder: Path, port: int) -> "subprocess.Popen[str]":
    """Start the supervisor and wait until it serves."""
    running = commands.start(["-m", "tests.break.served", str(folder / "home"), str(port)])
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n", commands.ended(running)
    return running


def strike(running: "subprocess.Popen[str]", part: str, number: int) -> bool:
    """Send a signal to the supervisor, or to one of its children if that runs now; True if one was sent."""
    pids = [running.pid] if part == "supervisor" else children(running.pid, part)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
    return False


def children(pid: int, part: str) -> list[int]:
    """Process ids of a part."""
    word = "harvest" if part == "harvester" else "server"
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children() if word in child.cmdline()]
    return []


def family_of(running: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Processes below the supervisor."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(running.pid).children(recursive=True)
    return []


def end(running: "subprocess.Popen[str]", family: Sequence[psutil.Process]) -> None:
    """Wait until the supervisor has ended, and those below it."""
    running.communicate(timeout=60)
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left


def completed() -> bool:
    """True if the job is done."""
    return all(job.unanswered == 0 for job in read_jobs(load(), now=0.0))


def rows_done() -> int:
    """Rows that have a result."""
    return sum(job.done for job in read_jobs(load(), now=0.0))
