"""Deadlines: a job that is late ends with the results it has, and can be taken up again."""

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import Connection

from conserve.batch_api import workers
from conserve.batch_api.workers import Deliveries
from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.control import move
from conserve.cli.deadline import clock_time, length_s
from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.errors import JobRefused, UsageError
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.store.books import batches, catalog, hooks, outbox, shards
from conserve.store.books.events import Event
from conserve.store.books.journal import Committed
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import JobState, OnLate
from conserve.store.database.store import Store
from tests import virtual_time
from tests.batch_rig import answered, client, compute, create, live, reaches
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.store_rows import add_job, claim, finish, job, leased
from tests.submitting import submit
from tests.virtual_time import BEGIN_S

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


def harvest(store: Store, endpoint: FakeEndpoint) -> None:
    async def run() -> None:
        clock = asyncio.get_running_loop().time
        await Harvester(store, endpoint, clock=clock).run(asyncio.Event())

    virtual_time.run(run())


def expire(store: Store, *, now: float) -> list[str]:
    with store.write() as tx:
        return catalog.expire(tx, now=now)


def test_a_job_expires_at_its_deadline_and_not_before(store: Store) -> None:
    add_job(store, deadline=10.0)
    assert expire(store, now=9.9) == []
    assert expire(store, now=10.0) == ["job-1"]
    assert (job(store).state, job(store).finished_at) == (JobState.EXPIRED, 10.0)
    assert claim(store, now=11.0) is None
    assert expire(store, now=12.0) == [], "once"


def test_only_jobs_that_were_locked_in_order_expire(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose deadline is set meanwhile waits for the next time: it has not been locked."""
    for job_id in ("job-1", "job-2"):
        add_job(store, job_id)
    with store.write() as tx:
        catalog.set_deadline(tx, "job-2", 5.0)
    lock_jobs = catalog.lock_jobs

    def lock(tx: Connection, job_ids: Sequence[str]) -> None:
        lock_jobs(tx, job_ids)
        catalog.set_deadline(tx, "job-1", 5.0)

    monkeypatch.setattr(catalog, "lock_jobs", lock)
    assert expire(store, now=10.0) == ["job-2"]
    monkeypatch.undo()
    assert expire(store, now=10.0) == ["job-1"]


def test_a_completed_job_does_not_expire(store: Store) -> None:
    add_job(store, deadline=10.0)
    finish(store, leased(store))
    assert expire(store, now=11.0) == []
    assert job(store).state is JobState.COMPLETED


def test_a_paused_job_expires_too(store: Store) -> None:
    add_job(store, deadline=10.0)
    with store.write() as tx:
        catalog.move(tx, "job-1", "pause", now=1.0)
    assert expire(store, now=10.0) == ["job-1"]


def test_a_job_whose_last_rows_are_answered_after_its_deadline_is_completed(store: Store) -> None:
    """Another process ended it while they were in flight."""
    add_job(store, deadline=10.0)
    lease = leased(store)
    finish(store, lease, of=[0, 1, 2])
    assert expire(store, now=10.0) == ["job-1"]
    assert finish(store, lease, of=[3], now=11.0).completed == ["job-1"]
    assert (job(store).state, job(store).finished_at) == (JobState.COMPLETED, 11.0)


def test_a_completed_job_is_not_counted_as_expired() -> None:
    tally = Tally(cancelled=dict.fromkeys(["job-1", "job-2"]))
    tally.count(Committed([], [], ["job-1"]))
    assert ([*tally.completed], [*tally.cancelled]) == (["job-1"], ["job-2"])


@pytest.mark.parametrize("verb", ["resume", "retry"])
def test_an_expired_job_without_a_row_left_is_completed_when_it_is_taken_up(store: Store, verb: str) -> None:
    """Earlier versions left such jobs; no claim would end them."""
    add_job(store)
    finish(store, leased(store))
    with store.write() as tx:
        hooks.add(tx, "https://example.com/", events=tuple(Event), now=0.0)
        tx.exec_driver_sql("update job set state = 'expired'")
        batches.of_submitted(tx, "job-1", now=1.0)
    done = conserve(verb, "job-1")
    assert done.returncode == 0, done.stderr
    assert job(store).state is JobState.COMPLETED
    with store.read() as tx:
        told = [each.event for each in outbox.page(tx, limit=9)]
    assert told == ["completed", "expired"], "and never in progress"


@pytest.mark.parametrize("on_late", [None, OnLate.PUSH])
def test_the_harvester_ends_a_late_job_with_the_rows_it_has(
    store: Store, write_input: WriteInput, on_late: OnLate | None
) -> None:
    rows = str(write_input(q=[f"q{n}" for n in range(200)]))
    job_id = submit(store, rows, TASK, deadline=BEGIN_S + 5.0, on_late=on_late).job_id
    in_time = submit(store, rows, TASK).job_id
    harvest(store, FakeEndpoint(Script(request_ms=1000.0, capacity=16)))
    late = job(store, job_id)
    assert late.state is JobState.EXPIRED
    assert 0 < late.succeeded < 200
    assert job(store, in_time).state is JobState.COMPLETED
    with store.read() as tx:
        assert late.finished_at is not None
        assert 5.0 <= late.finished_at - BEGIN_S < 8.0
        assert catalog.late(tx, now=1e12) == []


def test_retry_takes_up_what_an_expired_job_left(store: Store, write_input: WriteInput) -> None:
    rows = str(write_input(q=["a", "REJECT", *(f"q{n}" for n in range(40))]))
    job_id = submit(store, rows, TASK, deadline=BEGIN_S + 2.5).job_id
    harvest(store, FakeEndpoint(Script(request_ms=1000.0, capacity=8)))
    assert job(store, job_id).state is JobState.EXPIRED
    assert shards.retry_failed(store, job_id, now=10.0) in (0, 1)
    again = job(store, job_id)
    assert (again.state, again.deadline, again.failed) == (JobState.QUEUED, None, 0)
    harvest(store, FakeEndpoint())
    done = job(store, job_id)
    assert (done.state, done.succeeded, done.failed) == (JobState.COMPLETED, 41, 1)


@pytest.mark.parametrize("on_late", [OnLate.EXPIRE, OnLate.PUSH])
def test_an_expired_batch_delivers_its_answers_and_names_the_rows_left(store: Store, on_late: OnLate) -> None:
    with live(store) as url:
        api = client(url)
        batch = create(api, ["REJECT", "one", "two", "three"])
        reaches(api, batch.id, "in_progress")
        (found,) = read_jobs(load(), now=0.0)
        assert api.batches.retrieve(batch.id).expires_at == batch.created_at + 86_400
        lease = leased(store, now=time.time(), lease_s=600.0, limit=2)
        finish(store, lease, failed=[lease.rows[0].position])
        with store.write() as tx:
            catalog.set_deadline(tx, found.id, time.time() - 1.0, on_late)
        done = reaches(api, batch.id, "expired")
        assert done.to_dict()["conserve"]["on_late"] == on_late  # type: ignore[index]
        assert done.expired_at is not None
        assert done.completed_at is None
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 4, "completed": 1, "failed": 1}
        errors = answered(api, done.error_file_id)
        assert sorted(line["error"]["code"] for line in errors.values()) == [
            "batch_expired",
            "batch_expired",
            "scripted",
        ]
        assert not errors.keys() & answered(api, done.output_file_id).keys()
        assert "2 rows left and 1 failed row back" in conserve("retry", found.id).stdout
        assert api.batches.retrieve(batch.id).expires_at is None
        compute(store)
        assert reaches(api, batch.id, "completed").expired_at is None


def test_the_api_ends_late_jobs_where_no_harvester_runs(store: Store) -> None:
    add_job(store, deadline=10.0)
    workers.expire(store, 9.0)
    assert job(store).state is JobState.QUEUED
    Deliveries(store).step(10.0)
    assert job(store).state is JobState.EXPIRED


def test_only_a_job_that_has_not_ended_gets_another_deadline(store: Store) -> None:
    add_job(store)
    with store.write() as tx:
        assert catalog.set_deadline(tx, "job-1", 5.0).deadline == 5.0
        assert catalog.set_deadline(tx, "job-1", None).deadline is None
        catalog.set_deadline(tx, "job-1", 5.0)
    expire(store, now=5.0)
    with pytest.raises(JobRefused, match="conserve retry job-1"), store.write() as tx:
        catalog.set_deadline(tx, "job-1", 9.0)


@pytest.mark.parametrize(
    ("state", "on_late", "deadline"),
    [
        ("expired", None, None),
        ("failed", None, None),
        ("paused", OnLate.PUSH, None),
        ("failed", OnLate.BEST_EFFORT, 5.0),
    ],
)
def test_resume_takes_a_passed_deadline_away_and_says_so(
    store: Store,
    capsys: pytest.CaptureFixture[str],
    state: str,
    on_late: OnLate | None,
    deadline: float | None,
) -> None:
    for name, due, now in (("job-1", 5.0, state), ("job-2", 1e10, "paused")):
        add_job(store, name, deadline=due)
        with store.write() as tx:
            catalog.set_deadline(tx, name, due, on_late)
            tx.exec_driver_sql(f"update job set state = '{now}' where id = '{name}'")
    move(Context(), ["job-1", "job-2"], "resume")
    assert [job(store, name).deadline for name in ("job-1", "job-2")] == [deadline, 1e10]
    assert expire(store, now=7.0) == []
    said = capsys.readouterr().err
    assert ("job-1: its deadline (" in said) is (deadline is None)
    assert ("conserve deadline job-1 --within 24h" in said) is (deadline is None)
    assert "job-2" not in said


def test_the_command_line(store: Store, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "a"}\n')
    words = ("submit", str(tmp_path / "rows.jsonl"), "--prompt", "{{ q }}")
    job_id = conserve(*words, "--within", "2h").stdout.strip()
    assert conserve("deadline", job_id).stdout.startswith(f"{job_id}: expires ")
    assert conserve("deadline", job_id, "--none").stdout == f"{job_id}: no deadline\n"
    with store.write() as tx:
        catalog.set_deadline(tx, job_id, 1.0)
    done = conserve("run", job_id, "--endpoint", "fake:")
    assert done.returncode == 3
    again = conserve("run", job_id, "--endpoint", "fake:")
    assert f"conserve retry {job_id}" in again.stderr
    assert "1 row left and 0 failed rows" in conserve("retry", job_id).stdout
    assert conserve("run", job_id, "--endpoint", "fake:").returncode == 0
    for flags in (
        ["--within", "soon"],
        ["--by", "25:00"],
        ["--by", "2001-01-01"],
        ["--by", "0001-01-01"],
        ["--by", "9999-12-31"],
        ["--within", "366d"],
        ["--within", "9" * 400 + "d"],
        ["--by", "6:00", "--within", "1h"],
    ):
        wrong = conserve(*words, *flags)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "Traceback" not in wrong.stderr
    with store.read() as tx:
        assert len(catalog.ids(tx)) == 1
        assert len(batches.page(tx, "default", before=None, limit=9)) == 1


def test_a_deadline_beyond_any_calendar_can_be_shown() -> None:
    assert output.moment(1e300) == output.moment(1e12)
    assert output.iso(1e300) == output.iso(1e12)


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400.0), ("1.5h", 5400.0), ("2d", 172_800.0)])
def test_a_length_of_time(text: str, seconds: float) -> None:
    assert length_s(text) == seconds


def test_a_time_of_the_day_is_the_next_one() -> None:
    now = time.mktime((2026, 11, 23, 5, 0, 0, 0, 0, -1))
    assert clock_time("06:00", now=now) == now + 3600
    assert clock_time("05:00", now=now) - now in (86_400.0 - 3600, 86_400.0, 86_400.0 + 3600)  # by the zone
    assert clock_time("2026-11-23 07:30", now=now) == now + 9000
    with pytest.raises(UsageError, match="has passed"):
        clock_time("2026-11-23 04:00", now=now)


@pytest.mark.parametrize(
    ("now", "by", "hours"),
    [
        ("2027-10-31T01:50+02:00", "02:30", 40 / 60),
        ("2027-10-31T02:45+02:00", "02:30", 45 / 60),  # the clock shows it once more
        ("2027-10-31T02:45+02:00", "2027-10-31 02:30", 45 / 60),
        ("2027-10-31T02:45+01:00", "02:30", 23.75),
        ("2027-10-31T02:45+01:00", "02:50", 5 / 60),
        ("2027-03-28T00:30+01:00", "02:30", 2.0),  # which no clock shows
        ("2027-03-28T00:30+01:00", "03:30", 2.0),
    ],
)
def test_a_deadline_is_the_next_moment_at_which_the_clock_shows_it(
    now: str, by: str, hours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        begun = datetime.fromisoformat(now).timestamp()
        assert (clock_time(by, now=begun) - begun) / 3600 == pytest.approx(hours)
    finally:
        monkeypatch.undo()
        time.tzset()
