"""Batches in the store: their states, whose they are, how they become jobs, and when their files are written."""

from typing import Any

import pytest
from sqlalchemy import text

from conserve.errors import JobRefused
from conserve.store.books import batches, uploads
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import BatchRecord, InputFault, NewBatch, Overtaken
from conserve.store.books.states import JobState, OnLate
from conserve.store.books.uploads import NewFile
from conserve.store.database.store import Store
from tests.store_rows import add_job, finish, job, leased

FAULTS = (
    InputFault(code="empty_file", message="no rows"),
    InputFault(code="c", message="m", line=3, param="p"),
)


def new(**named: Any) -> NewBatch:
    values = {
        "file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "window_s": 60.0,
    }
    return NewBatch(**{**values, **named})


def asked(
    store: Store, project: str = "ann", *, job_id: str | None = None, rows: int = 4, **named: Any
) -> str:
    """A batch as a client asks for it, with its job if it is to have one."""
    with store.write() as tx:
        batch_id = batches.add(tx, project, new(**named), now=1.0)
    if job_id is not None:
        add_job(store, job_id, rows=rows)
        with store.write() as tx:
            batches.bind(tx, batch_id, job_id, now=2.0)
    return batch_id


def submitted(store: Store, job_id: str = "job-1", rows: int = 4) -> str:
    """The batch of a job that was not asked for as one."""
    add_job(store, job_id, rows=rows)
    with store.write() as tx:
        batches.of_submitted(tx, job_id, now=3.0)
    return ids(store, "default")[0]


def batch(store: Store, batch_id: str) -> BatchRecord:
    with store.read() as tx:
        found = batches.anywhere(tx, batch_id)
    assert found is not None
    return found


def ids(store: Store, project: str, before: int | None = None, limit: int = 9) -> list[str]:
    with store.read() as tx:
        return [found.id for found in batches.page(tx, project, before=before, limit=limit)]


def cancel(store: Store, batch_id: str, now: float = 5.0) -> None:
    found = batch(store, batch_id)
    with store.write() as tx:
        batches.cancel(tx, found, now=now)


def deliver(store: Store, batch_id: str, now: float = 9.0, **files: str | None) -> bool:
    found = batch(store, batch_id)
    with store.write() as tx:
        return batches.deliver(tx, found, now=now, **{"output": None, "errors": None, **files})


def deliverable(store: Store, *, asked: tuple[str, ...] = (), now: float = 9.0) -> list[str]:
    with store.read() as tx:
        return batches.deliverable(tx, asked=asked, now=now)


def end(store: Store, state: str, job_id: str = "job-1", at: float = 7.0) -> None:
    with store.write() as tx:
        values = {"state": state, "at": at, "id": job_id}
        tx.execute(text("update job set state = :state, finished_at = :at where id = :id"), values)


def test_a_batch_is_kept_as_it_was_asked_for(store: Store) -> None:
    given = new(
        metadata={"night": "1"},
        key_name="key",
        idempotency_key="k",
        output_expires_s=5.0,
        on_late=OnLate.PUSH,
    )
    with store.write() as tx:
        batch_id = batches.add(tx, "ann", given, now=1.5)
    found = batch(store, batch_id)
    assert {name: getattr(found, name) for name in NewBatch.__slots__} == {
        name: getattr(given, name) for name in NewBatch.__slots__
    }
    assert (found.id, found.project, found.created_at, found.errors) == (batch_id, "ann", 1.5, ())
    assert (found.job, found.job_id) == (None, None)
    plain = batch(store, asked(store))
    assert (plain.metadata, plain.on_late, plain.key_name) == (None, None, None)


def test_a_submitted_job_is_a_batch_of_the_default_project_without_a_file(store: Store) -> None:
    found = batch(store, submitted(store))
    assert (found.project, found.created_at, found.job_id, found.file_id) == ("default", 3.0, "job-1", None)
    assert found.job == job(store)
    assert not found.delivered


@pytest.mark.parametrize(
    ("state", "before", "after"),
    [
        ("queued", BatchState.IN_PROGRESS, BatchState.IN_PROGRESS),
        ("paused", BatchState.IN_PROGRESS, BatchState.IN_PROGRESS),
        ("failed", BatchState.FAILED, BatchState.FAILED),
        ("completed", BatchState.FINALIZING, BatchState.COMPLETED),
        ("expired", BatchState.FINALIZING, BatchState.EXPIRED),
        ("cancelled", BatchState.CANCELLING, BatchState.CANCELLED),
    ],
)
def test_a_batch_has_the_state_of_its_job_and_ends_with_its_files(
    store: Store, state: str, before: BatchState, after: BatchState
) -> None:
    batch_id = asked(store, job_id="job-1")
    end(store, state)
    found = batch(store, batch_id)
    assert (found.state, found.delivered) == (before, False)
    assert found.unfinished is (before is not after)
    assert found.state.final is (state == "failed")
    assert deliver(store, batch_id, output="file-2", errors="file-3")
    found = batch(store, batch_id)
    assert (found.state, found.delivered, found.unfinished) == (after, True, False)
    assert found.state.final is (after is not BatchState.IN_PROGRESS)
    assert (found.output_file_id, found.error_file_id, found.delivered_at) == ("file-2", "file-3", 9.0)
    assert not deliver(store, batch_id, output="file-4"), "the files are there"
    end(store, state, at=8.0)
    found = batch(store, batch_id)
    assert (found.state, found.delivered) == (before, False), "these are files of earlier results"


def test_a_batch_without_a_job_is_validated_refused_or_cancelled(store: Store) -> None:
    waiting, refused, cancelled = (asked(store) for _ in range(3))
    with store.write() as tx:
        assert batches.validating(tx) == [waiting, refused, cancelled]
        batches.refuse(tx, refused, FAULTS, now=4.0)
        batches.refuse(tx, refused, FAULTS[:1], now=6.0)
    cancel(store, cancelled)
    cancel(store, cancelled, now=6.0)
    with store.write() as tx:
        batches.refuse(tx, cancelled, FAULTS, now=7.0)
        assert batches.validating(tx) == [waiting]
    found = {batch_id: batch(store, batch_id) for batch_id in (waiting, refused, cancelled)}
    states = (BatchState.VALIDATING, BatchState.FAILED, BatchState.CANCELLED)
    assert tuple(each.state for each in found.values()) == states
    assert [each.state.final for each in found.values()] == [False, True, True]
    assert not any(each.unfinished or each.delivered for each in found.values())
    assert (found[refused].refused_at, found[refused].errors) == (4.0, FAULTS), "the first time counts"
    assert (found[cancelled].cancelling_at, found[cancelled].refused_at) == (5.0, None)
    with pytest.raises(JobRefused, match="has failed, so there is nothing to cancel"):
        cancel(store, refused)
    assert batch(store, refused).cancelling_at is None


def test_only_a_batch_that_still_needs_a_job_gets_one(store: Store) -> None:
    bound, refused, cancelled = asked(store, job_id="job-1"), asked(store), asked(store)
    with store.write() as tx:
        batches.refuse(tx, refused, FAULTS, now=4.0)
        batches.refuse(tx, bound, FAULTS, now=4.0)
    cancel(store, cancelled)
    add_job(store, "job-2")
    for batch_id in (bound, refused, cancelled, "batch-none"):
        with pytest.raises(Overtaken, match=f"the batch {batch_id} needs no job"), store.write() as tx:
            batches.bind(tx, batch_id, "job-2", now=5.0)
    assert batch(store, bound).job_id == "job-1"
    assert batch(store, bound).state is BatchState.IN_PROGRESS, "its input was no fault"


def test_a_batch_is_cancelled_with_its_job(store: Store) -> None:
    batch_id = asked(store, job_id="job-1")
    add_job(store, "job-2")
    cancel(store, batch_id)
    cancel(store, batch_id, now=6.0)
    assert (job(store).state, job(store).finished_at) == (JobState.CANCELLED, 5.0)
    assert batch(store, batch_id).cancelling_at == 5.0
    assert job(store, "job-2").state is JobState.QUEUED


def test_a_batch_that_became_a_job_meanwhile_is_cancelled_with_it(store: Store) -> None:
    batch_id = asked(store)
    seen = batch(store, batch_id)
    add_job(store)
    with store.write() as tx:
        batches.bind(tx, batch_id, "job-1", now=2.0)
        batches.cancel(tx, seen, now=5.0)
    assert job(store).state is JobState.CANCELLED


@pytest.mark.parametrize("state", ["completed", "failed", "expired"])
def test_an_end_that_a_client_was_told_of_is_not_taken_back(store: Store, state: str) -> None:
    batch_id = asked(store, job_id="job-1")
    end(store, state)
    with pytest.raises(JobRefused, match=f"the batch {batch_id} has ended"):
        cancel(store, batch_id)
    assert (job(store).state, batch(store, batch_id).cancelling_at) == (state, None)


def test_batches_are_found_in_their_project_alone(store: Store) -> None:
    made = [asked(store, "ann", idempotency_key=f"k{n}", job_id=f"job-{n}") for n in range(3)]
    theirs = asked(store, "ben", idempotency_key="k1")
    assert ids(store, "ann") == made[::-1]
    assert ids(store, "ann", limit=2) == made[:0:-1]
    assert ids(store, "ann", before=batch(store, made[1]).seq) == [made[0]]
    assert ids(store, "none") == []
    with store.read() as tx:
        found = batches.get(tx, "ann", made[1])
        assert found is not None
        assert found.job == job(store, "job-1")
        assert batches.get(tx, "ben", made[1]) is batches.get(tx, "ann", "batch-none") is None
        for project, key, wanted in (("ann", "k1", made[1]), ("ben", "k1", theirs), ("ben", "k0", None)):
            by_key = batches.of_idempotency_key(tx, project, key)
            assert (by_key.id if by_key else None) == wanted
        several = batches.several(tx, [made[0], theirs, "batch-none"])
        assert {each.id: each.job_id for each in several} == {made[0]: "job-0", theirs: None}
        assert batches.anywhere(tx, "batch-none") is None


def test_a_damaged_record_of_a_job_hides_no_batch(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    made = [asked(store, job_id=f"job-{n}") for n in (1, 2)]
    end(store, "completed")
    assert deliver(store, made[0], output="file-2")
    with store.write() as tx:
        tx.execute(text("update job set source = '{' where id = 'job-1'"))
    with store.read() as tx:
        second, first = batches.page(tx, "ann", before=None, limit=9)
    assert [first.id, second.id] == made
    assert (first.job, first.state, second.job is None) == (None, BatchState.IN_PROGRESS, False)
    assert not first.delivered
    (said,) = caplog.records
    assert said.getMessage().startswith("the record of job job-1 is damaged (")


def test_files_of_batches_are_written_once_no_row_is_in_flight(store: Store) -> None:
    uploaded, of_submit = asked(store, job_id="job-1"), submitted(store, "job-2")
    running = asked(store, job_id="job-3")
    assert deliverable(store, asked=(of_submit, running)) == []
    leased(store, lease_s=10.0, only=["job-1"])
    end(store, "cancelled", "job-1")
    end(store, "completed", "job-2")
    assert deliverable(store, now=9.9) == [], "a row is in flight"
    assert deliverable(store, now=10.0) == [uploaded], "the lease is over"
    assert deliverable(store, asked=(of_submit,), now=10.0) == [uploaded, of_submit]
    for batch_id in (uploaded, of_submit):
        assert deliver(store, batch_id)
    assert deliverable(store, asked=(of_submit,), now=10.0) == []
    end(store, "completed", "job-2", at=8.0)
    assert deliverable(store, asked=(of_submit,), now=10.0) == [of_submit], "it has ended again"


@pytest.mark.parametrize(
    ("state", "wanted"),
    [("completed", True), ("cancelled", True), ("expired", True), ("failed", False), ("paused", False)],
)
def test_a_job_that_failed_has_no_files(store: Store, state: str, wanted: bool) -> None:
    batch_id = asked(store, job_id="job-1")
    end(store, state)
    assert deliverable(store) == ([batch_id] if wanted else [])


def test_files_of_results_that_have_changed_since_are_not_recorded(store: Store) -> None:
    batch_id = asked(store, job_id="job-1")
    other = asked(store, job_id="job-2")
    end(store, "completed")
    end(store, "completed", "job-2")
    read = batch(store, batch_id)
    end(store, "completed", at=8.0)
    with store.write() as tx:
        assert not batches.deliver(tx, read, output="file-2", errors=None, now=9.0)
    found = batch(store, batch_id)
    assert (found.output_file_id, found.delivered_at) == (None, None)
    assert deliver(store, batch_id, output="file-2")
    assert batch(store, other).delivered_at is None


def test_leases_of_a_job_that_was_stopped_end(store: Store) -> None:
    for job_id in ("job-1", "job-2"):
        asked(store, job_id=job_id)
    stopped, other = (leased(store, only=[job_id]) for job_id in ("job-1", "job-2"))
    with store.write() as tx:
        batches.fence(tx, "job-1")
    assert len(finish(store, stopped).late) == 4
    assert len(finish(store, other).late) == 0


def test_unfinished_rows_of_a_key_are_those_of_its_open_jobs_and_of_its_files(store: Store) -> None:
    with store.write() as tx:
        for name, lines in {"file-1": 7, "file-2": 5}.items():
            file = NewFile(purpose="batch", filename=name, bytes=1, num_lines=lines, digest="d", path=name)
            uploads.add(tx, "ann", name, file, now=0.0)

    def unfinished(key: str = "key") -> int:
        with store.read() as tx:
            return batches.unfinished_rows(tx, key)

    assert unfinished() == 0
    asked(store, key_name="key")
    other = asked(store, key_name="other", file_id="file-2")
    assert (unfinished(), unfinished("other")) == (7, 5)
    cancel(store, other)
    assert unfinished("other") == 0
    asked(store, key_name="key", job_id="job-1", rows=9)
    finish(store, leased(store, limit=5), failed=[0])
    assert unfinished() == 7 + 4
    for state, rows in {"paused": 4, "cancelled": 0, "failed": 0}.items():
        end(store, state)
        assert unfinished() == 7 + rows


def test_tokens_of_a_key_are_counted_from_a_moment_on(store: Store) -> None:
    asked(store, key_name="key", job_id="job-1", rows=2)
    asked(store, key_name="other", job_id="job-2", rows=3)
    for job_id in ("job-1", "job-2"):
        finish(store, leased(store, only=[job_id]), prompt_tokens=10, completion_tokens=3)
    with store.read() as tx:
        assert batches.tokens_since(tx, "key", 1.0) == 26
        assert batches.tokens_since(tx, "key", 1.1) == batches.tokens_since(tx, "none", 0.0) == 0
