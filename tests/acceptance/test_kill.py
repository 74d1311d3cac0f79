"""No crash loses or repeats a row: the real command, killed at every step of its work, and started again."""

import os
import signal
from pathlib import Path

import pytest

from tests.acceptance.aimed import Shot
from tests.acceptance.kill_harness import Harness
from tests.acceptance.scripted_server import Script, ScriptedServer
from tests.commands import ended, until

QUEUE, CHOICE, JOURNAL = "conserve.store.queue", "conserve.store.choice", "conserve.store.journal"
SHARDS, HOME = "conserve.store.shards", "conserve.store.home"
WRITE = "conserve.jobs.recorder:Recorder.write"
LOAD = "conserve.jobs.workload:Workload.load"
SAVED = Shot(at=WRITE, since=f"{QUEUE}:save_tokens", after=True)
"""Tokens of rows in mid-generation are durable: the write that saves them has ended."""


def test_a_kill_between_claim_and_answer_loses_no_row_and_no_token(tmp_path: Path) -> None:
    prompts = [f"question {n}" + (" REJECT" if n % 50 == 7 else "") for n in range(96)]
    harness = Harness(tmp_path / "home", prompts, script="token_ms=2&tokens=200&capacity=32")
    harness.submit()
    for shot in (
        Shot(at=f"{QUEUE}:claim", after=True),  # rows leased, not committed
        Shot(at=LOAD),  # leased, and no request of theirs was read
        Shot(at=f"{QUEUE}:save_tokens", after=True),  # not committed
        SAVED,
        Shot(at=f"{QUEUE}:abandon", after=True),  # the next process, while it takes the rows back
        Shot(at=f"{JOURNAL}:end_requests", after=True),  # answered, gone from the queue, not committed
        Shot(at=f"{JOURNAL}:count", after=True),  # in the journal and counted, not committed
        Shot(at=WRITE, since=f"{JOURNAL}:count", after=True),  # committed, and the harvester was not told
    ):
        harness.kill(shot)
    assert harness.finish() == 5
    harness.check()
    assert harness.reading().resumed_tokens > 0, "rows went on from the tokens that were saved"


def test_a_kill_in_compaction_loses_and_doubles_no_row(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(5_000)], script="tokens=4")
    harness.submit()
    for shot in (
        Shot(at=f"{SHARDS}:to_arrow"),  # before there is a file
        Shot(at=f"{HOME}:write_durably"),  # the file has its scratch name
        Shot(at=f"{HOME}:write_durably", after=True),  # it has its name, and nobody knows of it
        Shot(at=f"{SHARDS}:register", after=True),  # registered
    ):
        harness.kill(shot, conserve__store__shards__SHARD_ROWS=600)
    harness.kill(Shot(at=f"{SHARDS}:compact"))  # the job has just been completed
    harness.check()
    other = Harness(tmp_path / "home", ["one more"], script="tokens=4", seed=1)
    other.submit()
    other.kill(Shot(at=f"{SHARDS}:register", after=True))  # in the recovery, which compacts what is left
    other.kill(Shot(at=f"{SHARDS}:sweep"))
    assert other.finish() == 0
    harness.check()
    other.check()


def test_a_kill_while_rows_of_several_jobs_are_chosen_loses_no_row(tmp_path: Path) -> None:
    subjects = [f"{subject} " * 20 for subject in ("algebra", "anatomy", "law", "logic")]
    jobs = [
        Harness(
            tmp_path / "home",
            [f"{subjects[(n * (job + 1)) % 4]}{job}.{n}" for n in range(300)],
            script="token_ms=1&tokens=8&capacity=64",
            seed=job,
        )
        for job in range(3)
    ]
    for job in jobs:
        job.submit()
    jobs[0].kill(Shot(at=f"{CHOICE}:choose", after=True))  # leased by the window, not committed
    jobs[0].kill(Shot(at=f"{CHOICE}:remember", call=2, after=True))  # nor is the window's place
    jobs[0].kill(Shot(at=WRITE, since=f"{CHOICE}:remember", call=2, after=True))
    assert jobs[0].finish() == 0
    for job in jobs:
        job.check()


def test_rows_of_a_run_that_was_killed_go_to_one_that_lives(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"question {n}" for n in range(96)], script="tokens=8&capacity=32")
    harness.submit()
    killed = harness.start(Shot(at=LOAD, number=signal.SIGSTOP, holds=True))
    stopped(killed.pid)
    other = harness.start()
    until(lambda: harness.reading().succeeded == 64, other)
    assert harness.reading().running > 0, "the third part is with the one that stands still"
    killed.kill()
    assert ended(killed).returncode == -signal.SIGKILL
    assert ended(other).returncode == 0
    harness.check()


def test_a_run_that_slept_past_its_lease_writes_nothing_twice(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"question {n}" for n in range(96)], script="tokens=8&capacity=32")
    harness.submit()
    late = harness.start(Shot(at=WRITE, number=signal.SIGSTOP, holds=True), options=["--lease-s", "1"])
    stopped(late.pid)
    assert harness.finish() == 0
    late.send_signal(signal.SIGCONT)
    done = ended(late)
    assert "Traceback" not in done.stderr
    harness.check()


def stopped(pid: int) -> None:
    """Wait until a process has sent itself SIGSTOP."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status


def test_a_killed_harvest_leaves_its_tokens_to_the_next(tmp_path: Path) -> None:
    with ScriptedServer(Script(tokens=150, pause_at=100, max_num_seqs=16)) as server:
        prompts = [f"question {n}" for n in range(40)]
        harness = Harness(tmp_path / "home", prompts, script="tokens=150", server=server.url)
        harness.submit()
        harness.kill(SAVED)
        server.script.pause_at = None
        assert harness.finish() == 0
        harness.check()
    assert server.continued, "rows in mid-generation were killed"
    assert harness.reading().resumed_tokens == sum(server.continued)


@pytest.mark.full
def test_long_rows_survive_random_kills_and_continue_from_their_tokens(tmp_path: Path) -> None:
    prompts = [f"question {n}" + (" REJECT" if n % 50 == 7 else "") for n in range(1500)]
    harness = Harness(tmp_path / "home", prompts, script="token_ms=10&tokens=200&capacity=64", seed=1)
    harness.submit()
    harness.storm(15, longest_s=1.6)
    assert harness.finish() in (0, 5), "0 if a storm left nothing to do"
    harness.check()


@pytest.mark.full
def test_many_short_rows_survive_random_kills_in_commit_and_compaction(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(150_000)], script="tokens=4", seed=2)
    harness.submit()
    harness.storm(10, longest_s=1.4)
    assert harness.finish() == 0
    harness.check()


@pytest.mark.full
def test_rows_of_several_jobs_that_share_prefixes_survive_random_kills(tmp_path: Path) -> None:
    subjects = [f"{subject} " * 20 for subject in ("algebra", "anatomy", "law", "logic")]
    jobs = [
        Harness(
            tmp_path / "home",
            [f"{subjects[(n * (job + 1)) % 4]}{job}.{n}" for n in range(20_000)],
            script="token_ms=1&tokens=8&capacity=256",
            seed=job,
        )
        for job in range(3)
    ]
    for job in jobs:
        job.submit()
    jobs[0].storm(8, longest_s=2.0)
    assert jobs[0].finish() == 0
    for job in jobs:
        job.check()


@pytest.mark.full
def test_a_harvest_survives_random_kills(tmp_path: Path) -> None:
    with ScriptedServer(Script(tokens=150, token_s=0.01, max_num_seqs=16)) as server:
        prompts = [f"question {n}" for n in range(320)]  # half a minute's work, more than three kills allow
        harness = Harness(tmp_path / "home", prompts, script="tokens=150", server=server.url, seed=3)
        harness.submit()
        harness.storm(3, longest_s=3.0)
        assert harness.finish() == 0
        harness.check()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills(tmp_path: Path) -> None:
    kills = round_number = 0
    while kills < 1000:
        long = round_number % 2 == 0
        folder = tmp_path / f"round-{round_number}"
        folder.mkdir()
        harness = Harness(
            folder / "home",
            [f"question {n}" for n in range(2_000 if long else 100_000)],
            script="token_ms=10&tokens=200&capacity=64" if long else "tokens=4",
            seed=round_number,
        )
        harness.submit()
        harness.storm(1000 - kills, longest_s=2.0)
        assert harness.finish() == 0
        harness.check()
        kills, round_number = kills + harness.kills, round_number + 1
