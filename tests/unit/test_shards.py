"""Shards: every result is in the journal or in one file, whatever was done and crashed meanwhile."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from sqlalchemy import text

from conserve.errors import JobRefused, StoreError, StoreForbidden, StoreFull
from conserve.store.books import batches, catalog, hooks, queue, results, shards
from conserve.store.books.events import Event
from conserve.store.books.states import FailedBy, JobState, OnLate
from conserve.store.books.unrendered import Unrendered, unrendered
from conserve.store.database.store import Store
from conserve.store.files import digests, folder_place, layout
from conserve.store.files.bucket import Bucket
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.marks import Mark
from conserve.store.files.objects import ObjectPath
from conserve.store.files.place import place_of
from conserve.store.sql.query import views
from tests.store_rows import add_job, finish, job, leased, positions, result, select


def files(store: Store, job_id: str = "job-1") -> list[Path]:
    """All files of its results folder."""
    return sorted((layout.job_folder(store.home, job_id) / layout.RESULTS).glob("*"))


def shard_rows(store: Store) -> list[tuple[str, list[int], bool]]:
    """Job and positions of each registered shard, and whether its rows failed."""
    found = select(store, "select job_id, file, failed from shard order by id")
    return [
        (job_id, pq.read_table(store.home / file)["position"].to_pylist(), bool(failed))
        for job_id, file, failed in found
    ]


def finished_job(store: Store, rows: int = 4, failed: tuple[int, ...] = (), job_id: str = "job-1") -> str:
    add_job(store, job_id, rows=rows)
    finish(store, leased(store, limit=rows, only=[job_id]), failed=failed)
    return job_id


def journalled(store: Store) -> list[int]:
    return [position for (position,) in select(store, "select position from journal order by 1")]


def test_compaction_moves_every_result_into_shards(store: Store) -> None:
    """Failed rows into one of their own, in the order of their positions."""
    finished_job(store, 6, failed=(1, 4))
    assert shards.compact(store, "job-1", now=7.0) == 6
    assert journalled(store) == []
    assert shard_rows(store) == [("job-1", [0, 2, 3, 5], False), ("job-1", [1, 4], True)]
    assert select(store, "select num_rows, created_at from shard order by id") == [(4, 7.0), (2, 7.0)]
    assert [store.home / file for (file,) in select(store, "select file from shard order by id")] == files(
        store
    )
    table = pq.read_table(files(store)[0])
    assert table["job_id"].to_pylist() == ["job-1"] * 4
    assert table["row_index"].to_pylist() == [0, 2, 3, 5]
    assert shards.compact(store, "job-1", now=8.0) == 0


def test_only_the_jobs_own_results_are_moved(store: Store) -> None:
    for job_id in ("one", "other"):
        finished_job(store, 2, job_id=job_id)
    assert shards.compact(store, "one", now=0.0) == 2
    assert select(store, "select distinct job_id from journal") == [("other",)]


def test_a_shard_takes_so_many_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    finished_job(store, 7)
    assert shards.compact(store, "job-1", now=0.0) == 7
    assert [rows for _, rows, _ in shard_rows(store)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_shard_takes_so_many_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that reaches them is its last."""
    finished_job(store, 5)
    ((size,),) = select(store, "select distinct length(payload) from journal")
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * size)
    assert shards.compact(store, "job-1", now=0.0) == 5
    assert [rows for _, rows, _ in shard_rows(store)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("limit", "moved"), [("rows", 6), ("bytes", 4)])
def test_less_than_a_shard_waits_where_only_full_ones_are_wanted(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, moved: int
) -> None:
    finished_job(store, 7)
    ((size,),) = select(store, "select distinct length(payload) from journal")
    monkeypatch.setattr(shards, "SHARD_ROWS", 3 if limit == "rows" else 100)
    monkeypatch.setattr(shards, "SHARD_BYTES", 4 * size if limit == "bytes" else 1 << 20)
    found: list[int] = []
    positions: list[int] = []
    while more := shards.compact_full(store, "job-1", now=0.0, positions=positions):
        found.append(more)
    assert positions == list(range(moved))
    assert sum(found) == moved
    assert len(found) == (2 if limit == "rows" else 1), "one shard a call"
    assert journalled(store) == list(range(moved, 7))


@pytest.mark.parametrize("damaged", [(0,), (0, 1, 2, 5)])
def test_damaged_rows_stay_and_make_no_shard_shorter(
    store: Store, monkeypatch: pytest.MonkeyPatch, damaged: tuple[int, ...]
) -> None:
    """Also more of them than a shard has rows."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    finished_job(store, 9)
    with store.write() as tx:
        tx.execute(
            text(f"update journal set checksum = 0 where position in ({str(damaged)[1:-1].strip(',')})")
        )
    whole = [position for position in range(9) if position not in damaged]
    assert shards.compact_full(store, "job-1", now=0.0) == 3
    assert shard_rows(store) == [("job-1", whole[:3], False)]
    assert journalled(store) == sorted({*damaged, *whole[3:]})


def test_of_two_compactors_the_second_withdraws(store: Store) -> None:
    finished_job(store, 3)
    rows = shards.oldest(store, "job-1", failed=False, at_least=1)
    assert shards.compact(store, "job-1", now=0.0) == 3
    assert not shards.write_shard(store, "job-1", rows, failed=False, now=0.0)
    assert shard_rows(store) == [("job-1", [0, 1, 2], False)]
    assert len(files(store)) == 1, "its file is gone"


def test_a_compactor_that_finds_some_of_its_rows_gone_moves_none(store: Store) -> None:
    finished_job(store, 3)
    rows = shards.oldest(store, "job-1", failed=False, at_least=1)
    assert shards.write_shard(store, "job-1", rows[:1], failed=False, now=0.0)
    assert not shards.write_shard(store, "job-1", rows, failed=False, now=0.0)
    assert journalled(store) == [1, 2]
    assert shard_rows(store) == [("job-1", [0], False)]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("fails_again", [False, True])
def test_a_compactor_that_slept_through_a_retry_does_not_bring_old_results_back(
    store: Store, fails_again: bool, checked: bool
) -> None:
    """Rows of earlier versions have no checksum."""
    finished_job(store, 2, failed=(1,))
    drop_checksums(store, unless=checked)
    slept = shards.oldest(store, "job-1", failed=True, at_least=1)
    assert shards.retry_failed(store, "job-1", now=1.0) == 1
    lease = leased(store, now=1.0)
    finish(store, lease, failed=positions(lease) if fails_again else (), attempts=9)
    drop_checksums(store, unless=checked)
    assert not shards.write_shard(store, "job-1", slept, failed=True, now=0.0)
    assert job(store).failed == fails_again
    shards.compact(store, "job-1", now=0.0)
    assert shard_rows(store) == [
        ("job-1", rows, failed)
        for rows, failed in ([([0], False), ([1], True)] if fails_again else [([0, 1], False)])
    ]
    attempts = [pq.read_table(file)["attempts"].to_pylist() for file in files(store)]
    assert attempts == ([[1], [9]] if fails_again else [[1, 9]])


def drop_checksums(store: Store, *, unless: bool) -> None:
    """Make the rows of the journal those of an earlier version."""
    if not unless:
        with store.write() as tx:
            tx.execute(text("update journal set checksum = null"))


def test_rows_with_and_without_checksums_go_into_one_shard(store: Store) -> None:
    finished_job(store, 4)
    with store.write() as tx:
        tx.execute(text("update journal set checksum = null where position in (1, 2)"))
    assert shards.compact(store, "job-1", now=0.0) == 4
    assert (journalled(store), shard_rows(store)) == ([], [("job-1", [0, 1, 2, 3], False)])


def test_what_was_moved_is_named(store: Store) -> None:
    finished_job(store, 4, failed=(2,))
    moved: list[int] = []
    shards.compact(store, "job-1", now=0.0, positions=moved)
    assert moved == [0, 1, 3, 2]


def test_a_shard_is_recorded_with_its_seal(store: Store) -> None:
    """Those of earlier versions have none."""
    for name in ("one", "other"):
        finished_job(store, 2, job_id=name)
        shards.compact(store, name, now=0.0)
    with store.write() as tx:
        tx.execute(text("update shard set digest = null where job_id = 'other'"))
    with store.read() as tx:
        (one,), found = shards.files(tx, ["one"]), shards.files(tx)
    assert one.seal == digests.seal(store.home / one.file)
    assert (one.job_id, one.failed, one.num_rows) == ("one", False, 2)
    assert [(file.job_id, file.seal) for file in found] == [("one", one.seal), ("other", None)]


def test_the_columns_of_a_shard_are_those_of_a_result(store: Store) -> None:
    """Other programs read these files, too."""
    finished_job(store, 1)
    shards.compact(store, "job-1", now=0.0)
    (path,) = files(store)
    times = dict.fromkeys(("submitted_at", "started_at", "finished_at"), "timestamp[us, tz=UTC]")
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "resumed_tokens", "attempts")
    special = {"position": "int64", "row_index": "int64", **dict.fromkeys(counts, "int32"), **times}
    names = ["job_id", "position", *results.COLUMNS]
    assert {field.name: str(field.type) for field in pq.read_schema(path)} == {
        name: special.get(name, "string") for name in names
    }
    row_group = pq.read_metadata(path).row_group(0)
    assert {row_group.column(n).compression for n in range(row_group.num_columns)} == {"ZSTD"}


def test_results_come_back_from_a_shard_as_they_were(store: Store) -> None:
    """A shard of an earlier version lacks columns."""
    wanted = [
        result(0, started_at=1.000001, finished_at=1e9 + 0.25, custom_id="a", logprobs="[]", cached_tokens=3),
        result(1, failed=True, attempts=2),
    ]
    table = results.to_arrow(["job-1", "job-1"], [0, 1], wanted)
    assert results.from_arrow(table) == wanted
    assert results.from_arrow(table.drop_columns(["custom_id", "cached_tokens"])) == [
        replace(wanted[0], custom_id=None, cached_tokens=0),
        wanted[1],
    ]


def test_a_home_that_is_away_is_not_made_anew(store: Store) -> None:
    finished_job(store, 2)
    jobs = layout.jobs_folder(store.home)
    away = jobs.rename(jobs.with_name("away"))
    with pytest.raises(StoreError):
        shards.compact(store, "job-1", now=0.0)
    assert not jobs.exists()
    away.rename(jobs)
    assert (journalled(store), shards.compact(store, "job-1", now=0.0)) == ([0, 1], 2)


def test_results_of_a_job_that_is_gone_are_written_nowhere(store: Store) -> None:
    """Neither into a folder of its own nor where all folders are away."""
    finished_job(store, 1)
    rows = shards.oldest(store, "job-1", failed=False, at_least=1)
    assert not shards.write_shard(store, "gone", rows, failed=False, now=0.0)
    jobs = layout.jobs_folder(store.home)
    assert [path.name for path in jobs.iterdir()] == ["job-1"]
    jobs.rename(jobs.with_name("away"))
    assert not shards.write_shard(store, "gone", rows, failed=False, now=0.0)
    assert not jobs.exists()


def test_a_folder_that_a_reader_deleted_is_made_again(store: Store) -> None:
    finished_job(store, 2)
    layout.job_folder(store.home, "job-1").rmdir()
    assert shards.compact(store, "job-1", now=0.0) == 2


def test_a_compaction_goes_on_beside_another_process_at_the_same_job(store: Store) -> None:
    """Another that writes a shard holds the mark of the folder as well."""
    finished_job(store, 2)
    marked = Mark(store_id=store.id, registered=True)
    moved: list[int] = []
    with place_of(layout.job_folder(store.home, "job-1")).held(marked, alone=False):
        compacting = threading.Thread(
            target=lambda: moved.append(shards.compact(store, "job-1", now=0.0)), daemon=True
        )
        compacting.start()
        compacting.join(60)
    assert moved == [2]


@pytest.mark.parametrize(("passed_s", "kept"), [(0.0, True), (43_199.0, True), (43_200.0, False)])
def test_an_object_is_registered_within_half_a_day_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, kept: bool
) -> None:
    """The sweep takes objects that no record names after a day."""
    path = ObjectPath(Bucket.parse("s3://team"), "jobs/job-1/results/1.parquet")
    monkeypatch.setattr(shards, "time", SimpleNamespace(time=lambda: 1e9 + passed_s))
    assert shards.is_kept(path, 1e9) is kept


def test_a_disk_that_is_full_leaves_the_journal_and_no_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    finished_job(store, 2)
    with monkeypatch.context() as patch:
        patch.setattr(folder_place, "sync", full)
        with pytest.raises(StoreFull):
            shards.compact(store, "job-1", now=0.0)
    assert (journalled(store), files(store)) == ([0, 1], [])


def test_a_folder_of_another_user_leaves_the_journal_and_names_the_command_that_mends_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    finished_job(store, 2)
    with monkeypatch.context() as patch:
        patch.setattr(FolderPlace, "make", closed)
        with pytest.raises(StoreForbidden, match="run: sudo chown -R ") as caught:
            shards.compact(store, "job-1", now=0.0)
    assert caught.value.job_id == "job-1"
    assert str(layout.job_folder(store.home, "job-1")) in str(caught.value)
    assert (journalled(store), files(store)) == ([0, 1], [])


def test_jobs_that_ended_with_results_in_the_journal_are_left_and_others_are_not(store: Store) -> None:
    for job_id in ("completed", "cancelled", "refused", "running"):
        add_job(store, job_id, rows=2)
        finish(store, leased(store, only=[job_id], limit=2 if job_id == "completed" else 1))
    with store.write() as tx:
        catalog.move(tx, "cancelled", "cancel", now=0.0)
        catalog.refuse(tx, "refused", "its input changed", FailedBy.INPUT, now=0.0)
    with store.read() as tx:
        left = shards.left(tx)
    for job_id in left:
        shards.compact(store, job_id, now=5.0)
    assert select(store, "select job_id from journal") == [("running",)]
    assert {job_id: rows for job_id, rows, _ in shard_rows(store)} == {
        "completed": [0, 1],
        "cancelled": [0],
        "refused": [0],
    }
    assert select(store, "select distinct created_at from shard") == [(5.0,)]


def test_rows_of_a_retry_run_at_once_whatever_the_clock_of_its_machine(store: Store) -> None:
    finished_job(store, 2, failed=(1,))
    assert shards.retry_failed(store, "job-1", now=200.0) == 1
    assert positions(leased(store, now=80.0)) == [1]


def test_a_retry_puts_back_the_failed_rows_and_no_others(store: Store) -> None:
    """The rows are of the journal and of shards; they start anew and wait for nothing."""
    finished_job(store, 6, failed=(1, 4))
    finished_job(store, 2, failed=(0,), job_id="other")
    shards.compact(store, "job-1", now=0.0)
    finish_again(store, now=1.0, failed=(4,))
    assert shard_rows(store) == [("job-1", [0, 2, 3, 5], False)]
    shards.compact(store, "job-1", now=2.0)
    assert shards.retry_failed(store, "job-1", now=3.0) == 1
    assert shards.retry_failed(store, "job-1", now=3.0) == 0
    assert select(store, "select job_id, position, epoch, attempts, failures, available_at from request") == [
        ("job-1", 4, None, 0, 0, -1.0)
    ]
    assert sorted(rows for _, rows, _ in shard_rows(store)) == [[0, 2, 3, 5], [1]]
    assert len(files(store)) == 2, "the file of the failed rows is gone"
    assert (job(store).failed, job(store).succeeded) == (0, 5)
    assert (job(store).state, job(store).finished_at) == (JobState.QUEUED, None)
    assert (job(store, "other").failed, job(store, "other").state) == (1, JobState.COMPLETED)
    assert [(row.position, row.attempts) for row in leased(store, now=3.0).rows] == [(4, 1)]


def finish_again(store: Store, *, now: float, failed: tuple[int, ...]) -> None:
    shards.retry_failed(store, "job-1", now=now)
    finish(store, leased(store, now=now), failed=failed)


def test_a_retry_leaves_a_paused_job_paused_and_refuses_a_cancelled_one(store: Store) -> None:
    for job_id, verb in (("paused", "pause"), ("cancelled", "cancel")):
        add_job(store, job_id, rows=2)
        finish(store, leased(store, only=[job_id], limit=1), failed=(0,))
        with store.write() as tx:
            catalog.move(tx, job_id, verb, now=0.0)
    assert shards.retry_failed(store, "paused", now=0.0) == 1
    assert job(store, "paused").state is JobState.PAUSED
    with pytest.raises(JobRefused, match="cancelled was cancelled; submit it again"):
        shards.retry_failed(store, "cancelled", now=0.0)


@pytest.mark.parametrize(
    ("state", "now", "on_late", "then", "deadline"),
    [
        ("queued", 1.0, None, JobState.QUEUED, 9.0),
        ("paused", 1.0, None, JobState.PAUSED, 9.0),
        ("failed", 1.0, None, JobState.QUEUED, 9.0),
        ("completed", 1.0, None, JobState.QUEUED, 9.0),
        ("expired", 1.0, None, JobState.QUEUED, None),
        ("completed", 9.0, None, JobState.QUEUED, None),
        ("failed", 9.0, OnLate.PUSH, JobState.QUEUED, None),
        ("paused", 9.0, OnLate.EXPIRE, JobState.PAUSED, None),
        ("completed", 9.0, OnLate.BEST_EFFORT, JobState.QUEUED, 9.0),
    ],
)
def test_a_retry_keeps_a_deadline_that_does_not_end_the_job(
    store: Store, state: str, now: float, on_late: OnLate | None, then: JobState, deadline: float | None
) -> None:
    add_job(store, rows=3, deadline=9.0)
    add_job(store, "other", deadline=5.0)
    finish(store, leased(store, limit=2, only=["job-1"]), failed=(0,))
    with store.write() as tx:
        catalog.set_deadline(tx, "job-1", 9.0, on_late)
        tx.execute(text(f"update job set state = '{state}' where id = 'job-1'"))
    assert shards.retry_failed(store, "job-1", now=now) == 1
    found = job(store)
    assert (found.state, found.deadline, found.failed, found.succeeded) == (then, deadline, 0, 1)
    assert job(store, "other").deadline == 5.0
    with store.read() as tx:
        assert "job-1" not in catalog.late(tx, now=now)


def test_a_retry_of_an_expired_job_without_failed_rows_takes_up_what_is_left(store: Store) -> None:
    add_job(store, rows=2)
    with store.write() as tx:
        tx.execute(text("update job set state = 'expired', finished_at = 1.0"))
    assert shards.retry_failed(store, "job-1", now=2.0) == 0
    assert (job(store).state, job(store).finished_at) == (JobState.QUEUED, None)


def test_hooks_hear_of_a_job_that_a_retry_takes_up_again(store: Store) -> None:
    """Those of a job that was queued all the time have nothing to hear."""
    with store.write() as tx:
        hooks.add(tx, "https://example.org/hook", events=tuple(Event), allow_private=True, now=0.0)
    for name, rows in (("done", 2), ("queued", 3)):
        add_job(store, name, rows=rows)
        with store.write() as tx:
            batches.of_submitted(tx, name, now=0.0)
        finish(store, leased(store, only=[name], limit=2), failed=(1,))
    before = len(messages(store))
    for name in ("done", "queued"):
        shards.retry_failed(store, name, now=3.0)
    assert [(job_id, body["data"]["job"]) for job_id, body in messages(store)[before:]] == [("done", "done")]


def messages(store: Store) -> list[tuple[str, dict[str, Any]]]:
    """Job and body of each message, in their order."""
    found = select(store, "select job_id, body from message order by seq")
    return [(job_id, json.loads(body)) for job_id, body in found]


def test_rows_that_a_retry_puts_back_start_anew(store: Store) -> None:
    finished_job(store, 2, failed=(0, 1))
    shards.retry_failed(store, "job-1", now=5.0)
    lease = leased(store, now=6.0)
    assert [(row.position, row.attempts, row.failures, row.started_at) for row in lease.rows] == [
        (0, 1, 0, 6.0),
        (1, 1, 0, 6.0),
    ]


def test_a_retry_of_a_refused_job_drops_the_reason(store: Store) -> None:
    add_job(store, rows=2)
    finish(store, leased(store, limit=1), failed=(0,))
    with store.write() as tx:
        catalog.refuse(tx, "job-1", "its input changed", FailedBy.INPUT, now=0.0)
    assert shards.retry_failed(store, "job-1", now=0.0) == 1
    assert (job(store).state, job(store).error, job(store).failed_by) == (JobState.QUEUED, None, None)


def test_shards_of_more_rows_than_a_list_takes_are_registered_whole(store: Store) -> None:
    finished_job(store, 1100, failed=tuple(range(0, 1100, 2)))
    assert shards.compact(store, "job-1", now=0.0) == 1100
    assert [len(rows) for _, rows, _ in shard_rows(store)] == [550, 550]
    with store.read() as tx:
        assert queue.backlog(tx).waiting == 0


def requests(store: Store, *payloads: str | None, statistics: bool = True) -> None:
    """The job's request file; None is a row that could not be rendered."""
    errors = [None if payload is not None else f"error {n}" for n, payload in enumerate(payloads)]
    rows = pa.table({"row_index": range(len(payloads)), "payload": payloads, "error": errors})
    path = layout.requests_file(store.home, "job-1")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, row_group_size=2, write_statistics=statistics)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_retry_leaves_rows_that_were_never_rendered(store: Store, compacted: bool) -> None:
    finished_job(store, 6, failed=(1, 3, 5))
    requests(store, "a", None, "c", "d", "e", None)
    before = failures(store)
    if compacted:
        shards.compact(store, "job-1", now=0.0)
    said: list[str] = []
    assert shards.retry_failed(store, "job-1", now=1.0, warn=said.append) == 1
    assert said == [
        "job-1: 2 rows could not be rendered at submit and would fail again (row 1: error 1); "
        "correct the prompt or the input and submit it again"
    ]
    assert select(store, "select position from request") == [(3,)]
    assert failures(store) == {1: before[1], 5: before[5]}
    assert (job(store).failed, job(store).succeeded) == (2, 3)
    assert len(files(store)) == int(compacted)
    finish(store, leased(store, now=1.0))
    shards.compact(store, "job-1", now=2.0)
    assert (job(store).state, job(store).failed, job(store).succeeded) == (JobState.COMPLETED, 2, 4)
    assert sorted(row for _, rows, _ in shard_rows(store) for row in rows) == list(range(6))


@pytest.mark.parametrize("compacted", [False, True])
def test_a_retry_says_of_rows_beyond_the_context_that_they_fail_again(store: Store, compacted: bool) -> None:
    add_job(store, rows=4)
    lease = leased(store)
    finish(store, lease, of=[0, 1], failed=(0, 1), error_type="too_long")
    finish(store, lease, of=[2, 3], failed=(2,))
    if compacted:
        shards.compact(store, "job-1", now=0.0)
    said: list[str] = []
    assert shards.retry_failed(store, "job-1", now=1.0, warn=said.append) == 3
    assert said == [
        "job-1: 2 rows were too long for the model's context (row 0), and they will fail again "
        "unless the next run's context is longer"
    ]
    finish(store, leased(store, now=1.0, limit=1), failed=(0,), error_type="too_long")
    shards.retry_failed(store, "job-1", now=2.0, warn=said.append)
    assert said[1].startswith("job-1: 1 row was too long for the model's context (row 0), and it will fail")


def failures(store: Store) -> dict[int, tuple[object, ...]]:
    """Failed results by position."""
    with views(store, now=0.0) as opened:
        rows = opened.duck.execute(
            "select * replace (epoch(submitted_at) as submitted_at, epoch(started_at) as started_at, "
            "epoch(finished_at) as finished_at) from results where error_type is not null"
        ).fetchall()
    return {row[1]: row for row in rows}


def test_a_retry_of_rows_that_were_never_rendered_changes_nothing(store: Store) -> None:
    finished_job(store, 2, failed=(1,))
    requests(store, "a", None)
    shards.compact(store, "job-1", now=0.0)
    assert shards.retry_failed(store, "job-1", now=1.0) == 0
    assert (job(store).state, job(store).failed) == (JobState.COMPLETED, 1)
    assert len(files(store)) == 2


@pytest.mark.parametrize("statistics", [True, False])
def test_rows_that_could_not_be_rendered_are_found_in_every_group(store: Store, statistics: bool) -> None:
    requests(store, "a", "b", None, "d", "e", None, statistics=statistics)
    path = layout.requests_file(store.home, "job-1")
    assert unrendered(path, range(6)) == {2: Unrendered(2, "error 2"), 5: Unrendered(5, "error 5")}
    assert unrendered(path, [5, 4]) == {5: Unrendered(5, "error 5")}


def test_rows_that_could_not_be_rendered_may_have_no_reason_and_another_place(store: Store) -> None:
    path = layout.requests_file(store.home, "job-1")
    rows = {"row_index": [7, 4], "payload": ["a", None], "error": pa.array([None, None], pa.string())}
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table(rows), path)
    assert unrendered(path, [0, 1]) == {1: Unrendered(4, "")}


@pytest.mark.parametrize("damage", ["missing", "cut", "no requests"])
def test_a_retry_without_readable_requests_puts_all_failed_rows_back(store: Store, damage: str) -> None:
    finished_job(store, 3, failed=(1, 2))
    if damage != "missing":
        requests(store, "a", None, "c")
    path = layout.requests_file(store.home, "job-1")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:50])
    elif damage == "no requests":
        pq.write_table(pa.table({"x": [1]}), path)
    assert shards.retry_failed(store, "job-1", now=1.0) == 2


def test_one_row_that_stays_failed_is_said_in_the_singular(store: Store) -> None:
    finished_job(store, 2, failed=(0, 1))
    requests(store, None, "b")
    said: list[str] = []
    shards.retry_failed(store, "job-1", now=1.0, warn=said.append)
    assert [text.partition(" could")[0] for text in said] == ["job-1: 1 row"]


def test_a_row_that_was_never_rendered_and_whose_result_is_lost_is_done_again(store: Store) -> None:
    finished_job(store, 3, failed=(1, 2))
    requests(store, "a", None, "c")
    shards.compact(store, "job-1", now=0.0)
    (failed,) = [store.home / file for (file,) in select(store, "select file from shard where failed")]
    failed.unlink()
    said: list[str] = []
    assert shards.retry_failed(store, "job-1", now=1.0, warn=said.append) == 2
    (warning,) = said
    assert warning.startswith(f"warning: {failed.relative_to(store.home)} is missing")
    assert warning.endswith("; its rows had failed, and go back into the queue too")
    assert select(store, "select position from request order by 1") == [(1,), (2,)]
