"""Kills of the Batch API's process and of the harvester while OpenAI's client waits for its batch."""

import os
import signal
import subprocess
from pathlib import Path

import httpx
import openai

from conserve.config import load
from conserve.store.books.readings import read_jobs
from tests import commands
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked, Forks
from tests.acceptance.kill_harness import Harness
from tests.batch_rig import answered, client, create

TEXTS = [f"q{n}" for n in range(24)]
SLOW = "request_ms=100&capacity=4"
WRITTEN = Shot(at="conserve.jobs.harvest.recorder:Recorder.write", after=True)
"""The first results are durable."""


def serve(home: Path, port: int) -> "subprocess.Popen[str]":
    """A real `conserve api` that answers."""
    running = commands.start(["-m", "conserve", "--home", str(home), "api", "--port", str(port)])
    commands.until(lambda: answers(port), running)
    return running


def forked_api(harness: Harness, port: int) -> Forked:
    """Start the API as a fork, and wait until it answers."""
    running = harness.fork(words=["api", "--port", str(port)], conserve__batch_api__workers__LOOK_S=0.05)
    commands.until(lambda: answers(port), running)
    return running


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def kill(running: "subprocess.Popen[str] | Forked") -> None:
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()


def test_a_batch_is_answered_once_through_kills_of_every_part(
    tmp_path: Path, forks: Forks, port: int
) -> None:
    home = tmp_path / "home"
    harness = Harness(home, TEXTS, script=SLOW, forks=forks)
    api = client(f"http://127.0.0.1:{port}/v1")
    serving = forked_api(harness, port)
    batch = create(api, TEXTS)
    kill(serving)  # with the input validated, half validated, or not begun
    serving = forked_api(harness, port)
    commands.until(lambda: api.batches.retrieve(batch.id).status == "in_progress", serving)
    killed = commands.ended(harness.fork(WRITTEN))
    assert killed.returncode == -signal.SIGKILL
    assert 0 < done(api, batch.id) < len(TEXTS)
    kill(serving)
    working, serving = harness.fork(), forked_api(harness, port)
    commands.until(lambda: api.batches.retrieve(batch.id).status in ("finalizing", "completed"), working)
    kill(serving)  # with the files written, half written, or not begun
    serving = forked_api(harness, port)
    commands.until(lambda: api.batches.retrieve(batch.id).status == "completed", serving)
    found = api.batches.retrieve(batch.id)
    assert answered(api, found.output_file_id).keys() == {f"r-{n}" for n in range(len(TEXTS))}
    assert found.error_file_id is None
    assert [file.purpose for file in api.files.list().data] == ["batch_output", "batch"]
    assert len(read_jobs(load({"home": home}), now=0.0)) == 1, "one batch is one job"
    serving.send_signal(signal.SIGTERM)
    ended = commands.ended(serving)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)


def done(api: openai.OpenAI, batch_id: str) -> int:
    """Rows of a batch that have a result."""
    counts = api.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed + counts.failed
