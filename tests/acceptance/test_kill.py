"""No crash loses or repeats a row: the real command, killed at every step of its work, and started again."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked, Forks
from tests.acceptance.kill_harness import Harness
from tests.acceptance.phases import AIM, Phase
from tests.acceptance.record import Record
from tests.acceptance.scripted_server import Script, ScriptedServer
from tests.commands import ended, until

QUEUE, CHOICE, JOURNAL = (
    "conserve.store.books.queue",
    "conserve.store.books.choice",
    "conserve.store.books.journal",
)
LEASES, TOKENS = "conserve.store.books.leases", "conserve.store.books.saved_tokens"
SHARDS = "conserve.store.books.shards"
WRITE_FILE = "conserve.store.files.folder_place:FolderPlace.write"
WRITE = "conserve.jobs.harvest.recorder:Recorder.write"
LOAD = "conserve.jobs.harvest.workload:Workload.load"
PAUSE = "conserve.endpoints.fake:FakeEndpoint._pause"
"""Called once for a request and then before each token."""
OFTEN = {
    "conserve__jobs__harvest__flights__SAVE_EVERY_TOKENS": 16,
    "conserve__jobs__harvest__write_behind__FLUSH_S": 0.02,
    "conserve__jobs__harvest__ledger__RECOVER_S": 0.1,
    "conserve__jobs__harvest__harvester__WATCH_S": 0.05,
}
"""Saves tokens and looks for dead owners so often that a short answer is saved many times."""
SAVED = Shot(at=WRITE, since=f"{TOKENS}:save_tokens", after=True)
"""Tokens of rows in mid-generation are durable: the write that saves them has ended."""


def test_a_kill_between_claim_and_answer_loses_no_row_and_no_token(tmp_path: Path, forks: Forks) -> None:
    prompts = [f"question {n}" + (" REJECT" if n % 25 == 7 else "") for n in range(48)]
    script = "token_ms=2&tokens=100&capacity=16"
    harness = Harness(tmp_path / "home", prompts, script=script, forks=forks, constants=OFTEN)
    harness.submit()
    for shot in (
        Shot(at=f"{QUEUE}:claim", after=True),  # rows leased, not committed
        Shot(at=LOAD),  # leased, and no request of theirs was read
        Shot(at=f"{TOKENS}:save_tokens", after=True),  # not committed
        SAVED,
        Shot(at=f"{LEASES}:abandon", after=True),  # the next process, while it takes the rows back
        Shot(
            at="conserve.store.books.spans:write", after=True
        ),  # answered, gone from the queue, not committed
        Shot(at=f"{JOURNAL}:count", after=True),  # in the journal and counted, not committed
        Shot(at=WRITE, since=f"{JOURNAL}:count", after=True),  # committed, and the harvester was not told
    ):
        harness.kill(shot)
    harness.script = "tokens=100&capacity=16"
    assert harness.finish() == 5
    harness.check()
    assert harness.reading().resumed_tokens > 0, "rows went on from the tokens that were saved"


def test_a_kill_in_compaction_loses_and_doubles_no_row(tmp_path: Path, forks: Forks) -> None:
    prompts = [f"q{n}" for n in range(600)]
    few = {
        "conserve__jobs__harvest__write_behind__FLUSH_ROWS": 24
    }  # so that each process leaves rows to the next
    harness = Harness(tmp_path / "home", prompts, script="tokens=4&capacity=32", forks=forks, constants=few)
    harness.submit()
    for shot in (
        Shot(at=f"{SHARDS}:to_arrow"),  # before there is a file
        Shot(at=WRITE_FILE),  # the file has its scratch name
        Shot(at=WRITE_FILE, after=True),  # it has its name, and no record names it
        Shot(at=f"{SHARDS}:register", after=True),  # registered
    ):
        harness.kill(shot, conserve__store__books__shards__SHARD_ROWS=64)
    harness.kill(Shot(at=f"{SHARDS}:compact"))  # the job has just been completed
    harness.check()
    other = Harness(tmp_path / "home", ["one more"], script="tokens=4", seed=1, forks=forks)
    other.submit()
    other.kill(Shot(at="conserve.jobs.harvest.ledger:sweep"))
    other.kill(Shot(at=f"{SHARDS}:register", after=True))  # of a job that is complete, as the one before is
    assert other.finish() == 0
    harness.check()
    other.check()


def three_jobs(home: Path, rows: int, script: str, forks: Forks | None = None) -> list[Harness]:
    """Submit jobs of so many rows each, whose prompts share prefixes within a job and across them."""
    subjects = [f"{subject} " * 20 for subject in ("algebra", "anatomy", "law", "logic")]
    jobs = [
        Harness(
            home,
            [f"{subjects[(n * (job + 1)) % 4]}{job}.{n}" for n in range(rows)],
            script=script,
            seed=job,
            forks=forks,
        )
        for job in range(3)
    ]
    for job in jobs:
        job.submit()
    return jobs


def test_a_kill_while_rows_of_several_jobs_are_chosen_loses_no_row(tmp_path: Path, forks: Forks) -> None:
    jobs = three_jobs(tmp_path / "home", 300, "token_ms=1&tokens=8&capacity=64", forks)
    jobs[0].kill(Shot(at=f"{CHOICE}:choose", after=True))  # leased by the window, not committed
    jobs[0].kill(Shot(at=f"{CHOICE}:remember", call=2, after=True))  # nor is the window's place
    jobs[0].kill(Shot(at=WRITE, since=f"{CHOICE}:remember", call=2, after=True))
    assert jobs[0].finish() == 0
    for job in jobs:
        job.check()


def test_rows_of_a_run_that_was_killed_go_to_one_that_lives(tmp_path: Path, forks: Forks) -> None:
    prompts, script = [f"question {n}" for n in range(96)], "tokens=8&capacity=32"
    harness = Harness(tmp_path / "home", prompts, script=script, forks=forks, constants=OFTEN)
    harness.submit()
    killed = harness.fork(Shot(at=LOAD, number=signal.SIGSTOP, holds=True))
    stopped(killed)
    other = harness.fork()
    until(lambda: harness.reading().succeeded == 64, other)
    assert harness.reading().running > 0, "the third part is with the one that stands still"
    killed.send_signal(signal.SIGKILL)
    assert ended(killed).returncode == -signal.SIGKILL
    assert ended(other).returncode == 0
    harness.check()


def test_a_run_that_slept_past_its_lease_writes_nothing_twice(tmp_path: Path, forks: Forks) -> None:
    prompts, script = [f"question {n}" for n in range(96)], "tokens=8&capacity=32"
    harness = Harness(tmp_path / "home", prompts, script=script, forks=forks, constants=OFTEN)
    harness.submit()
    shot = Shot(at=WRITE, number=signal.SIGSTOP, holds=True)
    late = harness.fork(shot, words=[*harness.arguments(), "--lease-s", "1"])
    stopped(late)
    assert harness.finish() == 0
    late.send_signal(signal.SIGCONT)
    done = ended(late)
    assert "Traceback" not in done.stderr
    harness.check()


def stopped(running: Forked) -> None:
    """Wait until a process has sent itself SIGSTOP."""
    stat = Path(f"/proc/{running.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", running)


def test_a_killed_harvest_leaves_its_tokens_to_the_next(tmp_path: Path, forks: Forks) -> None:
    with ScriptedServer(Script(tokens=40, pause_at=30)) as server:
        prompts = [f"question {n}" for n in range(20)]
        harness = Harness(
            tmp_path / "home", prompts, script="tokens=40", server=server.url, forks=forks, constants=OFTEN
        )
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
    jobs = three_jobs(tmp_path / "home", 20_000, "token_ms=1&tokens=8&capacity=256")
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


PHASES = (
    (Phase.STARTING, Shot(at="conserve.store.database.store:Store.open")),
    (Phase.CLAIMING, Shot(at=f"{QUEUE}:claim", after=True)),
    (Phase.RECOVERING, Shot(at=f"{LEASES}:abandon", after=True)),
    (Phase.LOADING, Shot(at="conserve.jobs.requests.file:RequestFile.read")),
    (Phase.ANSWERING, Shot(at=PAUSE, call=32 * 20)),  # too few tokens to be saved, and no room to claim
    (Phase.SAVING, Shot(at=f"{TOKENS}:save_tokens", after=True)),
    (Phase.COMMITTING, Shot(at=f"{JOURNAL}:count", after=True)),
    (Phase.WRITING, Shot(at=WRITE_FILE)),
    (Phase.REGISTERING, Shot(at=f"{SHARDS}:as_read", since=f"{SHARDS}:register")),
    (Phase.ENDING, Shot(at="conserve.jobs.harvest.ledger:Ledger.close")),
)


@pytest.mark.full
def test_a_kill_is_recorded_in_the_phase_of_the_work_that_it_hits(tmp_path: Path, forks: Forks) -> None:
    record = killed_in_every_phase(tmp_path, forks)
    assert record.aimed == dict.fromkeys(AIM, 1)
    assert record.rows == 96


def killed_in_every_phase(folder: Path, forks: Forks) -> Record:
    """Work on a job, with one kill in each phase."""
    harness = Harness(
        folder / "home",
        [f"question {n}" for n in range(96)],
        script="token_ms=2&tokens=200&capacity=32",
        forks=forks,
        constants={"conserve__store__books__shards__SHARD_ROWS": 32},
    )
    harness.submit()
    for phase, shot in PHASES:
        harness.kill_in(phase, shot)
    harness.check()
    return harness.account()


def test_tokens_that_a_kill_loses_are_counted_as_redone(tmp_path: Path, forks: Forks) -> None:
    harness = Harness(tmp_path / "home", ["a question"], script="token_ms=1&tokens=100", forks=forks)
    harness.submit()
    harness.kill_in(Phase.ANSWERING, Shot(at=PAUSE, call=32))  # before the 31st token
    assert harness.finish() == 0
    harness.check()
    record = harness.account()
    assert (record.answer_tokens, record.redone_tokens, record.resumed_tokens) == (100, 30, 0)
    assert (record.rows, record.attempts) == (1, 2)


KILLS = 1_000
STORMS = 20  # each with an equal share of the kills
STORES = 4  # at once: a process that waits for its kill computes little


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun, total = time.monotonic(), Record()
    pool = ThreadPoolExecutor(STORES)
    try:
        for record in pool.map(lambda number: stormed(tmp_path, number, KILLS // STORMS), range(STORMS)):
            total.add(record)
            total.seconds = time.monotonic() - begun
            with capsys.disabled():
                print(f"\n{total.all_kills:,} kills after {total.seconds:,.0f} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    with capsys.disabled():
        print(f"\n{total.table()}\n{total.save().name} in .bench/")
    assert total.all_kills == KILLS
    assert not total.missed, f"no kill hit: {', '.join(total.missed)}"


def stormed(parent: Path, number: int, kills: int) -> Record:
    """Kill so many processes that work on one job after the other: few long rows, then many short ones."""
    total = Record()
    with closing(Forks()) as forks:
        if number == 0:
            folder = parent / "every-phase"
            folder.mkdir()
            total.add(killed_in_every_phase(folder, forks))
        while total.all_kills < kills:
            folder = parent / f"storm-{number}-{total.jobs}"
            folder.mkdir()
            long = (number + total.jobs) % 2 == 0
            harness = Harness(
                folder / "home",
                [f"question {n}" for n in range(200 if long else 10_000)],
                script="token_ms=4&tokens=200&capacity=16" if long else "request_ms=20&tokens=4&capacity=64",
                seed=number * KILLS + total.jobs,
                forks=forks,
                constants={"conserve__store__books__shards__SHARD_ROWS": 100 if long else 1_000},
                hangs_s=1_800,
            )
            harness.submit()
            harness.storm(kills - total.all_kills, longest_s=1.0)
            assert harness.finish() == 0
            harness.check()
            total.add(harness.account())
    return total
