"""Mending brings each row of a job into exactly one place, counts again, and says what it changed."""

import shutil
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import insert

from conserve.errors import StoreFull
from conserve.store.books import batches, hooks, queue, shards
from conserve.store.books.events import Event
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import digests, layout, trash
from conserve.store.files.folder_place import FolderPlace
from conserve.store.upkeep import checking, mending
from tests.store_rows import add_job, finish, job, leased, live, select, while_writing

NOW = 50.0
JOB = "job-1"


def queued(store: Store, rows: int) -> None:
    """A job of so many rows, with requests."""
    add_job(store, JOB, rows=rows)
    pq.write_table(pa.table({"row_index": list(range(rows))}), layout.requests_file(store.home, JOB))


def rows_of(store: Store, table: str) -> list[dict[str, Any]]:
    with store.read() as tx:
        return [dict(row) for row in tx.exec_driver_sql(f"select * from {table}").mappings()]


def positions(store: Store, table: str) -> list[int]:
    return [position for (position,) in select(store, f"select position from {table} order by position")]


def change(store: Store, *statements: str) -> None:
    with store.write() as tx:
        for statement in statements:
            tx.exec_driver_sql(statement)


def without_foreign_keys(store: Store, *statements: str) -> None:
    raw: Any = store.engine.raw_connection()
    for statement in ("pragma foreign_keys = off", *statements):
        raw.execute(statement)
    raw.commit()
    raw.close()


def put(store: Store, table: str, rows: Sequence[dict[str, Any]]) -> None:
    with store.write() as tx:
        tx.execute(insert(schema.metadata.tables[table]), rows)


def finished(store: Store, rows: int, *, failed: Sequence[int] = (), **values: Any) -> Path:
    """Finish the next rows into a shard; returns its file."""
    finish(store, leased(store, limit=rows), failed=failed, **values)
    before = {file for (file,) in select(store, "select file from shard")}
    shards.compact(store, JOB, now=0.0)
    (file,) = {file for (file,) in select(store, "select file from shard")} - before
    return store.home / str(file)


def mend(store: Store) -> list[str]:
    said = mending.mend_rows(store, JOB, now=NOW)
    assert checking.check(store).damages == []
    assert mending.mend_rows(store, JOB, now=NOW) == [], "nothing is left to mend"
    return said


def test_of_a_row_in_several_places_the_one_furthest_on_its_way_stays(store: Store) -> None:
    """A shard comes before the journal, the journal before `request`, and `request` before a span."""
    queued(store, rows=8)
    finish(store, leased(store, limit=2))
    in_journal = rows_of(store, "journal")
    shards.compact(store, JOB, now=0.0)
    finish(store, leased(store, limit=2))
    held = leased(store, limit=4).epoch
    put(store, "journal", in_journal)
    put(store, "request", [queue.waiting_row(JOB, position, 0.0) for position in (-1, 0, 2, 4, 8)])
    change(store, "update span set start = 0, stop = 10, held = 10, gone = x'0000'")
    assert mend(store) == []
    assert positions(store, "journal") == [2, 3]
    assert live(store) == {4: None, 5: held, 6: held, 7: held}
    assert select(store, "select held from span") == [(3,)]


def test_a_job_whose_record_lost_its_model_is_bound_to_that_of_its_latest_answer(store: Store) -> None:
    """In a shard or in the journal."""
    queued(store, rows=8)
    finished(store, 2, model="A")
    bound = "it is bound to {}, the model of its answers"
    assert mend(store) == [bound.format("A")]
    finish(store, leased(store, limit=2), model="B", finished_at=3.0)
    assert mending.mend_rows(store, JOB, now=NOW) == [], "a model that the record names stays"
    change(store, "update job set model = null")
    assert mend(store) == [bound.format("B")]
    assert select(store, "select model, bound_by_run from job") == [("B", 1)]


def test_a_lease_of_which_no_row_stays_ends(store: Store) -> None:
    queued(store, rows=4)
    finished(store, 2)
    leased(store, limit=2)
    change(store, "update span set start = 0, stop = 2")
    assert mend(store) == ["2 rows are back in the queue"]
    assert live(store) == {2: None, 3: None}
    assert rows_of(store, "lease") == rows_of(store, "span") == []


def test_rows_of_two_leases_stay_in_the_first_and_those_of_none_go_back(store: Store) -> None:
    queued(store, rows=6)
    first, second = leased(store, limit=2).epoch, leased(store, limit=2).epoch
    lost = leased(store, limit=2).epoch
    change(store, f"update span set start = 1, stop = 4, held = 3 where epoch = {second}")
    without_foreign_keys(store, f"delete from lease where epoch = {lost}")
    assert mend(store) == ["2 rows are back in the queue"]
    assert live(store) == {0: first, 1: first, 2: second, 3: second, 4: None, 5: None}


def test_a_row_that_goes_back_is_as_if_never_tried(store: Store) -> None:
    queued(store, rows=4)
    leased(store, limit=3)
    change(store, "delete from span", "delete from lease")
    assert mend(store) == ["3 rows are back in the queue"]
    asked = "select position, epoch, attempts, failures, available_at from request order by position"
    assert select(store, asked) == [(position, None, 0, 0, -1.0) for position in range(3)]
    assert job(store).next_position == 3


def test_a_job_goes_on_behind_the_last_row_that_is_in_a_place(store: Store) -> None:
    queued(store, rows=6)
    finished(store, 3)
    change(store, "update job set next_position = 0")
    assert mend(store) == ["the counters were counted again"]
    assert job(store).next_position == 3
    change(store, "update job set next_position = 1", f"delete from shard where job_id = '{JOB}'")
    put(store, "request", [queue.waiting_row(JOB, 4, 0.0)])
    said = mending.mend_rows(store, JOB, now=NOW)
    assert said == ["3 answers that lay on disk were taken in", "1 row is back in the queue", *COUNTED]
    assert positions(store, "request") == [3, 4]
    assert (job(store).next_position, job(store).succeeded) == (5, 3)


COUNTED = ["the counters were counted again"]


def test_a_shard_whose_rows_are_in_an_earlier_one_is_taken_out(store: Store) -> None:
    """Only the rows that are nowhere else go back."""
    queued(store, rows=4)
    finish(store, leased(store, limit=1), prompt_tokens=5)
    again = rows_of(store, "journal")
    shards.compact(store, JOB, now=0.0)
    finish(store, leased(store, limit=2), prompt_tokens=5)
    put(store, "journal", again)
    assert shards.compact(store, JOB, now=0.0) == 3
    first, second = (file for (file,) in select(store, "select file from shard order by id"))
    assert mend(store) == [
        f"{second} was taken out of the store",
        "2 rows are back in the queue",
        "the counters were counted again",
    ]
    assert select(store, "select file from shard") == [(first,)]
    assert (job(store).succeeded, job(store).prompt_tokens) == (1, 5)
    assert [path.name for path in trash.found(store.home, second)] == [Path(second).name]
    assert not (store.home / second).exists()


def test_files_are_read_to_their_ends_while_nobody_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of answers that the database lost."""
    queued(store, rows=6)
    finished(store, 2)
    lost = finished(store, 2)
    change(store, f"delete from shard where file = 'jobs/{JOB}/results/{lost.name}'")
    read = while_writing(monkeypatch, (digests, "damage"), (digests, "seal"))
    assert mending.mend_rows(store, JOB, now=NOW) == ["2 answers that lay on disk were taken in"]
    assert read == []


def test_damaged_rows_of_the_journal_are_counted(store: Store) -> None:
    queued(store, rows=4)
    lease = leased(store, limit=4)
    finish(store, lease, of=[0, 2, 3], completion_tokens=3)
    finish(store, lease, of=[1], failed=[1])
    change(store, "update journal set checksum = 0 where position = 0")
    assert mend(store) == [
        "1 damaged row was taken out of the journal",
        "1 row is back in the queue",
        "the counters were counted again",
    ]
    assert job(store).completion_tokens == 6
    change(store, "update journal set checksum = 0 where position > 1")
    assert mend(store)[0] == "2 damaged rows were taken out of the journal"
    assert positions(store, "journal") == [1]
    counted = job(store)
    assert (counted.succeeded, counted.failed, counted.completion_tokens) == (0, 1, 0)


@pytest.mark.parametrize(
    ("state", "rows", "becomes", "finished_at", "told"),
    [
        ("queued", 4, "completed", NOW, ["completed"]),
        ("completed", 4, "completed", 7.0, []),
        ("completed", 3, "queued", None, ["in_progress"]),
        ("queued", 3, "queued", None, []),
        ("paused", 3, "paused", 7.0, []),
        ("cancelled", 4, "cancelled", 7.0, []),
        ("expired", 4, "expired", 7.0, []),
        ("failed", 3, "failed", 7.0, []),
    ],
)
def test_the_state_follows_from_the_rows_and_a_change_is_told(
    store: Store, state: str, rows: int, becomes: str, finished_at: float | None, told: list[str]
) -> None:
    queued(store, rows=4)
    with store.write() as tx:
        batches.of_submitted(tx, JOB, now=0.0)
        hooks.add(tx, "https://example.com/", events=tuple(Event), now=0.0)
    finish(store, leased(store, limit=rows), failed=[2], cached_tokens=2, resumed_tokens=1)
    at = "null" if state == "queued" else "7"
    change(
        store,
        "delete from message",
        f"update job set state = '{state}', finished_at = {at}, cached_tokens = 0",
    )
    assert mend(store) == COUNTED
    found = job(store)
    assert (found.state, found.finished_at) == (becomes, finished_at)
    assert (found.succeeded, found.failed, found.cached_tokens, found.resumed_tokens) == (
        rows - 1,
        1,
        2 * rows,
        rows,
    )
    assert select(store, "select event, created_at from message") == [(event, NOW) for event in told]


def test_a_file_comes_back_from_its_newest_whole_copy_in_the_trash(store: Store) -> None:
    """Also where the folder is gone; a damaged copy is passed over, and no scratch file stays."""
    queued(store, rows=2)
    file = finished(store, 2)
    content, folder = file.read_bytes(), file.parent
    for moment, copy in ((1e9, content), (2e9, content), (3e9, b"damaged")):
        file.write_bytes(copy)
        trash.throw_away(store.home, file, now=moment)
    shutil.rmtree(folder)
    assert mend(store) == [f"{file.relative_to(store.home)} was found in the trash"]
    assert file.read_bytes() == content
    assert list(folder.iterdir()) == [file]
    assert len(trash.contents(store.home)) == 3
    assert job(store).succeeded == 2


def test_a_full_disk_leaves_nothing_of_a_file_that_was_to_come_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(place: FolderPlace, scratch: Path) -> None:
        raise OSError(ENOSPC, "No space left on device")

    queued(store, rows=2)
    file = finished(store, 2)
    trash.throw_away(store.home, file, now=1e9)
    monkeypatch.setattr(FolderPlace, "write", full)
    with pytest.raises(StoreFull, match=f"no space left in {store.home}"):
        mending.mend_rows(store, JOB, now=NOW)
    assert list(file.parent.iterdir()) == []
    assert len(rows_of(store, "shard")) == 1


def test_a_whole_file_is_not_fetched_from_the_trash(store: Store) -> None:
    """Nor is one of an earlier version, which has no seal to compare it with."""
    queued(store, rows=2)
    file = finished(store, 2)
    copy = trash.folder(store.home) / "9-copy" / file.relative_to(store.home)
    copy.parent.mkdir(parents=True)
    shutil.copy(file, copy)
    assert mend(store) == []
    change(store, "update shard set digest = null, bytes = null")
    file.unlink()
    assert mending.mend_rows(store, JOB, now=NOW)[0] == (
        f"{file.relative_to(store.home)} was taken out of the store"
    )


def test_requests_and_inputs_come_back_from_the_trash(store: Store) -> None:
    folder = layout.job_folder(store.home, JOB)
    folder.mkdir(parents=True)
    for name in (layout.REQUESTS, layout.INPUTS):
        (folder / name).write_bytes(name.encode())
    files = digests.seals(folder / name for name in (layout.REQUESTS, layout.INPUTS))
    (folder / layout.REQUESTS).rename(store.home / layout.REQUESTS)
    (folder / layout.INPUTS).rename(store.home / layout.INPUTS)
    folder.rmdir()
    add_job(store, files=files)
    for name in files:
        (store.home / name).rename(folder / name)
        trash.throw_away(store.home, folder / name, now=1e9)
    assert mending.mend_rows(store, JOB, now=NOW) == [
        f"jobs/{JOB}/{name} was found in the trash" for name in files
    ]
    assert (folder / layout.REQUESTS).read_bytes() == layout.REQUESTS.encode()


def test_results_that_can_be_read_say_which_rows_they_answer(store: Store) -> None:
    """Requests that are rendered anew must fit them."""
    queued(store, rows=9)
    lease = leased(store, limit=9)

    def answer(*of: int, row_index: int) -> None:
        finish(store, lease, of=of, row_index=row_index)

    def answers() -> list[tuple[int, int]]:
        with store.read() as tx:
            found, rows = mending.answered(tx, store.home, JOB)
        return list(zip(found.tolist(), rows.tolist(), strict=True))

    assert answers() == []
    answer(0, 3, row_index=70)
    shards.compact(store, JOB, now=0.0)
    answer(1, row_index=80)
    shards.compact(store, JOB, now=0.0)
    answer(2, 4, row_index=90)
    add_job(store, "job-2")
    finish(store, leased(store, only=["job-2"]))
    assert answers() == [(0, 70), (3, 70), (1, 80), (2, 90), (4, 90)]
    change(store, "update journal set checksum = 1 where position = 2")
    (store.home / select(store, "select file from shard order by id")[0][0]).write_bytes(b"damaged")
    assert answers() == [(1, 80), (4, 90)]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (("request",), ["1 row of no job was dropped"]),
        (("request", "journal", "shard", "lease"), ["4 rows of no job were dropped"]),
        ((), []),
    ],
)
def test_rows_that_name_no_job_are_dropped(store: Store, tables: Sequence[str], said: list[str]) -> None:
    queued(store, rows=6)
    add_job(store, "job-2", rows=6)
    finished(store, 1)
    finish(store, leased(store, only=[JOB], limit=1))
    leased(store, only=[JOB], limit=1)
    put(store, "request", [queue.waiting_row(JOB, 5, 0.0)])
    before = {table: len(rows_of(store, table)) for table in ("request", "journal", "shard", "lease")}
    assert before == {"request": 1, "journal": 1, "shard": 1, "lease": 1}
    without_foreign_keys(store, *(f"update {table} set job_id = 'missing'" for table in tables))
    assert mending.mend_database(store) == ["the indexes of the database were made anew", *said]
    after = {table: len(rows_of(store, table)) for table in before}
    assert after == {table: 0 if table in tables else 1 for table in before}
