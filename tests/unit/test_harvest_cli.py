"""`conserve harvest` as a user meets it: what it says, when it ends, what it exits with."""

import asyncio
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve import logs
from conserve.cli import harvest
from conserve.config import Settings, load
from conserve.jobs.harvest.tally import Tally
from conserve.store.books.readings import JobReading, read_jobs
from tests.acceptance.aimed import Shot
from tests.acceptance.scripted_server import Script, ScriptedServer
from tests.commands import conserve, ended, threads_of, until
from tests.conftest import StartForked, WriteInput
from tests.tiers import in_full


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def submit(path: Path) -> str:
    done = conserve("submit", str(path), "--prompt", "{{ q }}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def states() -> list[str]:
    return [reading.state.value for reading in read_jobs(load(), now=time.time())]


def test_until_empty_ends_with_the_queue(
    server: ScriptedServer, write_input: WriteInput, forked: StartForked
) -> None:
    job_id = submit(write_input(q=["a", "b"]))
    done = ended(forked("harvest", "--endpoint", server.url, "--until-empty", "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["jobs"] == {job_id: "completed"}
    assert f"{server.url} co-serves served: at most 16 rows at once" in done.stderr
    assert f"{job_id}: completed, 2 of 2 rows done" in done.stderr
    again = conserve("harvest", "--endpoint", server.url, "--until-empty", "--json")
    assert (again.returncode, "nothing to run" in again.stderr) == (0, True)
    assert json.loads(again.stdout)["jobs"] == {}


@pytest.mark.parametrize(
    "words", [("run",), ("run", "--dry-run"), ("harvest", "--until-empty"), ("harvest",)], ids=" ".join
)
def test_of_a_server_of_several_models_one_must_be_named(
    write_input: WriteInput, words: tuple[str, ...]
) -> None:
    job_id = submit(write_input(q=["a", "b"]))
    with ScriptedServer(Script(models=("embedder", "chat"), coserves=False)) as server:
        done = conserve(*words, "--endpoint", server.url)
        assert (done.returncode, f"{server.url} serves 2 models (embedder, chat); name" in done.stderr) == (
            2,
            True,
        )
        assert (server.requests, states()) == ([], ["queued"])
        done = conserve("run", "--endpoint", server.url, "--model", "chat")
        assert (done.returncode, f"chat at {server.url} answers the rows\n" in done.stderr) == (0, True)
    assert json.loads(conserve("status", job_id, "--json").stdout)["model"] == "chat"


@pytest.mark.parametrize("ours", [True, False])
def test_until_empty_leaves_jobs_of_other_models_to_other_harvesters(
    server: ScriptedServer, write_input: WriteInput, ours: bool
) -> None:
    """A queue of several models has one for each; a job that is named must be answered."""
    path = str(write_input(q=["a"]))
    theirs = conserve("submit", path, "--prompt", "{{ q }}", "--model", "one").stdout.strip()
    if ours:
        submit(Path(path))
    done = conserve("harvest", "--endpoint", server.url, "--until-empty")
    assert done.returncode == 0, done.stderr
    said = f"job {theirs} is bound to one and this run has served"
    assert done.stderr.count(said) == 1
    assert f"left alone: {said}" in done.stderr
    assert states() == ["queued", *["completed"] * ours]
    named = conserve("harvest", theirs, "--endpoint", server.url, "--until-empty", "--model", "served")
    assert (named.returncode, f"refused: {said}" in named.stderr) == (1, True)


def test_a_server_without_a_list_of_models_answers_the_jobs_of_one_model(write_input: WriteInput) -> None:
    """Several such servers may have several models, of which none tells its own."""
    path = str(write_input(q=["a"]))
    conserve("submit", path, "--prompt", "{{ q }}", "--model", "one")
    with ScriptedServer(Script(models=(), coserves=False)) as server, ScriptedServer() as other:
        both = ["--endpoint", server.url, "--endpoint", other.url]
        done = conserve("harvest", *both, "--until-empty")
        assert (server.requests, states()) == ([], ["queued"]), done.stderr
        done = conserve("harvest", "--endpoint", server.url, "--until-empty")
        assert (done.returncode, states()) == (0, ["completed"]), done.stderr
    assert {request.body["model"] for request in server.requests} == {"one"}


def test_a_harvester_may_have_as_many_connections_as_the_system_lets_it(
    server: ScriptedServer, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    submit(write_input(q=["a"]))
    assert conserve("harvest", "--endpoint", server.url, "--until-empty").returncode == 0
    assert limits == [(resource.RLIMIT_NOFILE, (4096, 4096))]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_a_harvester_takes_the_processor_from_no_server_for_being_woken(
    server: ScriptedServer, forked: StartForked
) -> None:
    """Live requests would wait for it on a machine with few cores."""
    running = forked("harvest", "--endpoint", server.url)
    try:
        until(
            lambda: {os.sched_getscheduler(number) for number in threads_of(running.pid)} == {os.SCHED_BATCH},
            running,
        )
    finally:
        running.send_signal(signal.SIGTERM)
        ended(running)


@pytest.mark.parametrize("number", [signal.SIGTERM, *in_full(signal.SIGINT)])
def test_one_that_follows_takes_later_jobs_and_a_signal_is_its_normal_end(
    server: ScriptedServer, write_input: WriteInput, forked: StartForked, number: signal.Signals
) -> None:
    first = submit(write_input(q=["a"]))
    running = forked("harvest", "--endpoint", server.url, "--window", "1")
    until(lambda: states() == ["completed"], running)
    second = submit(write_input("later.parquet", q=["b", "c"]))
    until(lambda: states() == ["completed", "completed"], running)
    running.send_signal(number)
    code, _, stderr = ended(running)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    for job_id in (first, second):
        assert f"{job_id}: completed" in stderr
    assert server.most_in_flight == 1


def test_jobs_that_ended_are_read_alone_and_in_another_thread(
    write_input: WriteInput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_job, _ = submit(write_input(q=["a"])), submit(write_input(q=["b"]))
    read: list[tuple[list[str], threading.Thread]] = []

    def noted(settings: Settings, *, now: float, only: list[str]) -> list[JobReading]:
        read.append((only, threading.current_thread()))
        return read_jobs(settings, now=now, only=only)

    monkeypatch.setattr(harvest, "read_jobs", noted)
    tally = Tally(jobs={ended_job: None}, completed={ended_job: None})
    harvester: Any = SimpleNamespace(endpoint=SimpleNamespace(notice=None), tally=tally)

    async def announced() -> None:
        announcing = asyncio.create_task(harvest.Announcer(harvester, load()).announce())
        await asyncio.sleep(0)  # the announcer begins its first look
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)

    asyncio.run(announced())
    assert {thread is threading.current_thread() for _, thread in read} == {False}
    assert [only for only, _ in read] == [[ended_job]] * len(read)
    assert f"{ended_job}: queued, 0 of 1 rows done" in capsys.readouterr().err


def test_an_expired_job_that_is_retried_is_announced_anew(
    write_input: WriteInput, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submit(write_input(q=["a"]))
    tally = Tally()
    harvester: Any = SimpleNamespace(endpoint=SimpleNamespace(notice=None), tally=tally)

    async def announced() -> None:
        announcer = harvest.Announcer(harvester, load())
        for those in (tally.cancelled, tally.completed):
            tally.begin(job_id)
            await announcer._look()
            those[job_id] = None
            await announcer._look()

    asyncio.run(announced())
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if job_id in line] == [
        f"{job_id}: harvesting",
        f"{job_id}: queued, 0 of 1 rows done",
    ] * 2


def test_a_stop_saves_progress(server: ScriptedServer, write_input: WriteInput, forked: StartForked) -> None:
    server.script.tokens, server.script.pause_at = 300, 40
    submit(write_input(q=["a", "b"]))
    both_have_40 = Shot(
        at="conserve.endpoints.stream:AnswerPieces.add", call=80, after=True, number=signal.SIGTERM
    )
    code, _, stderr = ended(forked("harvest", "--endpoint", server.url, shots=[both_have_40]))
    assert code == 0, stderr
    assert "saving progress" in stderr
    server.script.pause_at = None
    assert conserve("harvest", "--endpoint", server.url, "--until-empty").returncode == 0
    assert server.continued == [40, 40]


def test_a_server_that_is_not_there_is_waited_for_or_named(
    write_input: WriteInput, forked: StartForked
) -> None:
    submit(write_input(q=["a"]))
    url = "http://127.0.0.1:9"
    done = conserve("harvest", "--endpoint", url, "--until-empty")
    assert done.returncode == 1
    assert "no OpenAI-compatible server answers" in done.stderr
    running = forked("harvest", "--endpoint", url)
    until(lambda: running.errors.exists() and "harvesting waits" in running.errors.read_text(), running)
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    assert ended(running).returncode == 0


def test_in_json_an_outage_is_a_warning_and_its_end_is_not(
    server: ScriptedServer, write_input: WriteInput, forked: StartForked
) -> None:
    submit(write_input(q=["a"]))
    server.down()
    running = forked("harvest", "--endpoint", server.url, "--log-format", "json")
    until(lambda: running.errors.exists() and "harvesting waits" in running.errors.read_text(), running)
    server.up()
    until(lambda: "harvesting goes on" in running.errors.read_text(), running)
    running.send_signal(signal.SIGTERM)
    lines = ended(running).stderr.splitlines()
    said = [json.loads(line) for line in lines if logs.is_line(line)]  # not what libraries of the tests print
    levels = [one["level"] for one in said if "harvesting " in one["message"]]
    assert levels == ["warning", "info"]


def test_without_a_server_the_next_command_is_named() -> None:
    done = conserve("harvest")
    assert done.returncode == 2
    assert "conserve harvest --endpoint http" in done.stderr


def test_a_job_that_is_not_there_is_a_usage_error(server: ScriptedServer) -> None:
    assert conserve("harvest", "nowhere", "--endpoint", server.url).returncode == 2


def test_the_variable_names_the_server_too(server: ScriptedServer, write_input: WriteInput) -> None:
    server.script.coserves = False
    submit(write_input(q=["a"]))
    done = conserve("harvest", "--until-empty", CONSERVE_ENDPOINT=server.url)
    assert done.returncode == 0
    assert "without ConServe's scheduler" in done.stderr


def test_run_speaks_to_a_server_that_coserves_too(server: ScriptedServer, write_input: WriteInput) -> None:
    submit(write_input(q=["a"]))
    assert conserve("run", "--endpoint", server.url).returncode == 0
    assert server.requests[0].body["priority"] == 1000
