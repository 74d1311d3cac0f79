"""Checking over the store alone: what is damaged, in which words, and what is not."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.config import Settings
from conserve.errors import DatabaseDamaged, StoreError, StoreUnreachable
from conserve.store.books import catalog, shards
from conserve.store.books.catalog import Source
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.saved_tokens import SavedTokens, save_tokens
from conserve.store.database.store import Store
from conserve.store.files import digests, job_folders, layout, marks
from conserve.store.files.place import place_of
from conserve.store.upkeep import checking, mending
from conserve.store.upkeep.damage import StorePart
from tests.store_rows import add_job, finish, leased, select


def queued(store: Store, job_id: str = "job-1", rows: int = 4) -> str:
    """A job with requests, a copy of its inputs and a mark, as a submit leaves it."""
    folder = layout.job_folder(store.home, job_id)
    folder.mkdir(parents=True)
    for name, length in ((layout.REQUESTS, rows), (layout.INPUTS, rows + 1)):  # of which one is left out
        table = pa.table({"row_index": list(range(length)), "text": ["a question"] * length})
        pq.write_table(
            table, folder / name, compression="none", use_dictionary=False, write_page_checksum=True
        )
    with store.write() as tx:
        catalog.add(
            tx,
            job_id,
            JobTerms(),
            source=Source(path=None, format="jsonl", copied=True),
            task='{"kind":"prompt"}',
            num_rows=rows,
            now=0.0,
            files=digests.seals(folder / name for name in (layout.REQUESTS, layout.INPUTS)),
        )
        job_folders.register(folder, store.id, catalog.record(tx, job_id))
    return job_id


def shard_files(store: Store, job_id: str) -> list[Path]:
    found = select(store, f"select file from shard where job_id = '{job_id}' order by id")
    return [store.home / file for (file,) in found]


def change(store: Store, *statements: str) -> None:
    with store.write() as tx:
        for statement in statements:
            tx.exec_driver_sql(statement)


def flip(path: Path, at: int) -> None:
    """Turn one bit of a byte round."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def damaged(store: Store) -> dict[str, tuple[str, str, str]]:
    """Damage of each part, and what repairing does."""
    found = checking.check(store).damages
    assert len({damage.part for damage in found}) == len(found)
    return {damage.part: (damage.file, damage.what, damage.fix) for damage in found}


def repairs(job_id: str, does: str) -> str:
    return f"run: conserve check --repair {job_id} ({does})"


BOOKS = {
    "update job set succeeded = succeeded + 1": ["its record says succeeded 12 instead of 11"],
    "update job set failed = 7": ["its record says failed 7 instead of 0"],
    "update job set prompt_tokens = 5": ["its record says prompt_tokens 5 instead of 2"],
    "update job set next_position = 12": [
        "its record says that no row from 12 on was leased, and there are 12, 13"
    ],
    "update job set next_position = 9": [
        "its record says that no row from 9 on was leased, and there are 9, 10, 11, 12, 13"
    ],
    "update job set next_position = 0": [
        "its record says that no row from 0 on was leased, and there are 0, 1, 2, 3, 4 and 9 others"
    ],
    "delete from request where position = 11": ["the queue lacks rows 11 (+1 beyond its damaged files)"],
    "delete from journal where position = 2": [
        "the queue lacks rows 13 (+1 beyond its damaged files)",
        "its record says succeeded 11 instead of 10, prompt_tokens 2 instead of 0",
    ],
    "update request set position = 14 where position = 11": [
        "its record says that no row from 14 on was leased, and there are 14"
    ],
    "update request set position = 99 where position = 11": [
        "the queue lacks rows 11 (+1 beyond its damaged files)"
    ],
    "insert into request select job_id, 3, epoch, attempts, failures, available_at, suspect, started_at, "
    "tokens, tokens_by, checksum, deaths, losses from request where position = 11": [
        "the queue has rows 3 twice"
    ],
    "delete from span": ["the queue lacks rows 10, 12 (+2 beyond its damaged files)"],
    "update span set stop = 12, held = 1": ["the queue lacks rows 12 (+1 beyond its damaged files)"],
    "update span set gone = x'00', held = 3": ["the queue has rows 11 twice"],
    "update span set start = 9, held = 4": [
        "the queue lacks rows 10 (+1 beyond its damaged files)",
        "the queue has rows 9, 11 twice",
    ],
    "update job set state = 'completed'": ["its record says the state completed with 11 of 16 rows"],
}
"""Changes of the books of a job with 16 rows, and what is wrong then."""


@pytest.mark.parametrize(("statement", "said"), list(BOOKS.items()), ids=list(BOOKS))
def test_books_that_do_not_add_up_are_found(store: Store, statement: str, said: list[str]) -> None:
    """Each position is in exactly one place, and the counters are the sums over the results."""
    job_id = queued(store, rows=16)
    finish(store, leased(store, limit=10))
    held = leased(store, limit=3)
    with store.write() as tx:  # so that row 11 has a record, and 10 and 12 are in a span
        save_tokens(tx, [SavedTokens(held.epoch, job_id, 11, b"", "model")])
    shards.compact(store, job_id, now=0.0)
    finish(store, leased(store, limit=1), prompt_tokens=2)
    assert checking.check(store).damages == []
    change(store, statement, *["delete from journal"] * ("journal" in statement))
    found = checking.check(store).damages
    assert [f"{damage.file} {damage.what}" for damage in found] == said
    assert {damage.part for damage in found} <= {StorePart.ROWS, StorePart.COUNTERS}


def test_the_first_five_faults_of_the_database_are_named(store: Store) -> None:
    """Rows of a table whose rows have no numbers are named once."""
    add_job(store, rows=9)
    finish(store, leased(store, limit=1))
    shards.compact(store, "job-1", now=0.0)
    finish(store, leased(store, limit=8))
    raw: Any = store.engine.raw_connection()
    raw.execute("pragma foreign_keys = off")
    raw.execute("update journal set job_id = 'missing' where position < 7")
    raw.execute("update shard set job_id = 'missing'")
    for number in range(4):
        raw.execute(
            "insert into shard (job_id, file, failed, num_rows, created_at) values ('missing', ?, 0, 1, 0)",
            [number],
        )
    raw.commit()
    raw.close()
    said = {f"is damaged (row {number} of shard names no job)" for number in range(1, 6)}
    found = checking.database_damage(store)
    assert len(found) == 5
    assert {damage.what for damage in found} < said | {"is damaged (a row of journal names no job)"}
    assert {(damage.job_id, damage.part, damage.file) for damage in found} == {
        (None, StorePart.DATABASE, "conserve.db")
    }
    assert {damage.fix for damage in found} == {"stop what runs, and run: conserve check --repair"}
    assert checking.check(store).damages[:5] == found


def test_an_index_that_lacks_rows_is_a_fault_of_the_database(store: Store, settings: Settings) -> None:
    add_job(store)
    store.close()
    path = settings.home / "conserve.db"
    connection = sqlite3.connect(path)
    connection.execute("pragma wal_checkpoint(truncate)")
    (size,), (root,) = (
        connection.execute("pragma page_size").fetchone(),
        connection.execute("select rootpage from sqlite_master where name = 'lease_by_job'").fetchone(),
    )
    connection.execute("insert into lease values (1, 'job-1', 'x', 0, 0, 0)")
    connection.commit()
    connection.close()
    content = bytearray(path.read_bytes())
    start = (root - 1) * size
    content[start + 3 : start + 5] = b"\0\0"  # the number of its entries
    path.write_bytes(content)
    again = Store.open(settings)
    said = [damage.what for damage in checking.database_damage(again)]
    assert "is damaged (row 1 missing from index lease_by_job)" in said
    assert mending.mend_database(again) == ["the indexes of the database were made anew"]
    assert checking.database_damage(again) == []
    again.close()


def test_a_database_that_cannot_be_read_is_one_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One out of reach says nothing about the files, so it ends the check."""
    add_job(store)

    def fails(error: Exception) -> Callable[..., Any]:
        def ids(tx: object) -> Any:
            raise error

        return ids

    with monkeypatch.context() as patch:
        patch.setattr(checking, "foreign_keys", fails(DatabaseDamaged("no page 6", step="call it a day")))
        assert checking.check(store).damages[0].what == "is damaged (no page 6)"
    monkeypatch.setattr(catalog, "ids", fails(DatabaseDamaged("no page 7", step="call it a day")))
    (found,) = checking.check(store).damages
    assert (found.part, found.what) == (StorePart.DATABASE, "is damaged (no page 7)")
    monkeypatch.setattr(catalog, "ids", fails(StoreUnreachable("no answer")))
    with pytest.raises(StoreUnreachable):
        checking.check(store)


@pytest.mark.parametrize("name", ["read_table", "ParquetFile"])
def test_a_machine_without_memory_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job_id = queued(store, rows=2)
    finish(store, leased(store))
    shards.compact(store, job_id, now=0.0)
    monkeypatch.setattr(pq, name, Mock(side_effect=pa.ArrowMemoryError("malloc of size 7 failed")))
    with pytest.raises(StoreError, match=r"since there is no memory .*; free some and run the command again"):
        checking.check(store)


def test_each_part_that_is_damaged_is_named_with_what_repairing_does(store: Store) -> None:
    job_id = queued(store, rows=9)
    finish(store, leased(store, limit=1))
    shards.compact(store, job_id, now=0.0)
    finish(store, leased(store, limit=2))
    (one,) = shard_files(store, job_id)
    (layout.job_folder(store.home, job_id) / marks.MARK).unlink()
    one.rename(one.with_name("other.parquet"))
    layout.requests_file(store.home, job_id).unlink()
    flip(layout.inputs_file(store.home, job_id), 60)
    leased(store, limit=2)
    change(store, "update journal set checksum = 1 where position = 1", "delete from span")
    of = f"jobs/{job_id}"
    assert damaged(store) == {
        "requests": (
            f"{of}/requests.parquet",
            "is missing",
            repairs(job_id, "they are rendered again if the input is as it was"),
        ),
        "inputs": (
            f"{of}/inputs.parquet",
            "is not what was written",
            repairs(job_id, "they are copied again if the input is as it was"),
        ),
        "mark": (f"{of}/job.json", "is missing", repairs(job_id, "it is written anew")),
        "shard": (
            str(one.relative_to(store.home)),
            "is missing",
            repairs(job_id, "its 1 row is computed again"),
        ),
        "orphan": (
            f"{of}/results/other.parquet",
            "has 1 answer, and the database does not name it: it went back in time",
            repairs(job_id, "its answers are taken in"),
        ),
        "journal": (
            "row 1 of the journal",
            "is not what was written",
            repairs(job_id, "the row is computed again"),
        ),
        "rows": (
            "the queue",
            "lacks rows 0, 3, 4 (+2 beyond its damaged files)",
            repairs(job_id, "rows that are nowhere are computed again"),
        ),
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "num_rows = 1",
            ["it says 1 rows, and there are 4 requests", "it says 1 rows, and row 1 has a result"],
        ),
        ("num_rows = 2", ["it says 2 rows, and there are 4 requests"]),
        ("num_rows = 5", ["it says 5 rows, and there are 4 requests"]),
        ("state = 'x'", ["the record of job job-1 is damaged (Invalid enum value 'x' - at `$.state`)"]),
    ],
)
def test_what_is_wrong_with_a_record_is_said(store: Store, wrong: str, said: list[str]) -> None:
    job_id = queued(store, rows=4)
    finish(store, leased(store, limit=2))
    shards.compact(store, job_id, now=0.0)
    (layout.job_folder(store.home, job_id) / marks.MARK).unlink()
    change(store, f"update job set {wrong}")
    found = [damage for damage in checking.check(store).damages if damage.part is StorePart.RECORD]
    assert [damage.what for damage in found] == [f"is damaged ({each})" for each in said]
    assert {damage.file for damage in found} == {"its record"}


@pytest.mark.parametrize(("cursor", "mended"), [(-1, 3), (5, 4), (4_000_000_000_000, 4)])
def test_a_cursor_outside_its_job_is_damage_of_the_record(store: Store, cursor: int, mended: int) -> None:
    """All rows up to the mended one have a place again."""
    job_id = queued(store, rows=4)
    finish(store, leased(store, limit=3))
    change(store, f"update job set next_position = {cursor}")
    said = f"is damaged (it says that {cursor:,} of its 4 rows were leased)"
    assert damaged(store)[StorePart.RECORD][1] == said
    mending.mend_rows(store, job_id, now=1.0)
    assert select(store, "select next_position from job") == [(mended,)]
    assert checking.check(store).damages == []


def test_a_record_of_fewer_rows_than_have_results_is_damaged_if_they_can_be_read(store: Store) -> None:
    job_id = queued(store)
    queued(store, "none-done", rows=1)
    for limit in (3, 1):
        finish(store, leased(store, limit=limit))
        shards.compact(store, job_id, now=0.0)

    def said() -> list[str]:
        found = [damage.what for damage in checking.check(store).damages if damage.part is StorePart.RECORD]
        return [what for what in found if "has a result" in what]

    change(store, "update job set num_rows = 3")
    assert said() == ["is damaged (it says 3 rows, and row 3 has a result)"]
    change(store, "update job set num_rows = 1")
    for path in shard_files(store, job_id):
        path.write_bytes(b"damaged")
    assert said() == []


def test_what_the_caller_finds_wrong_with_a_task_is_damage_of_the_record(store: Store) -> None:
    for job_id in ("one", "two"):
        queued(store, job_id)
    found = checking.check(store, judge=lambda job: "nonsense" if job.id == "two" else None)
    assert [(damage.job_id, damage.part, damage.what) for damage in found.damages] == [
        ("two", StorePart.RECORD, "is damaged (nonsense)")
    ]


def test_a_record_is_counted_again_or_taken_from_the_folder(store: Store) -> None:
    job_id = queued(store, rows=4)
    change(store, "update job set succeeded = 1, submitted_at = 1, tags = '{}'")
    assert damaged(store) == {
        "record": (
            "its record",
            "is damaged (not what was submitted: submitted_at, tags)",
            repairs(job_id, "it is taken from the job's folder"),
        ),
        "counters": ("its record", "says succeeded 1 instead of 0", repairs(job_id, "it is counted again")),
    }


@pytest.mark.parametrize(
    ("state", "rows", "said"),
    [
        ("completed", 3, "says the state completed with 3 of 4 rows"),
        ("queued", 4, "says the state queued with 4 of 4 rows"),
        ("paused", 4, "says the state paused with 4 of 4 rows"),
        ("completed", 4, None),
        ("queued", 3, None),
        ("cancelled", 4, None),
        ("expired", 4, None),
        ("cancelled", 3, None),
    ],
)
def test_a_state_that_does_not_follow_from_the_rows_is_said(
    store: Store, state: str, rows: int, said: str | None
) -> None:
    queued(store, rows=4)
    finish(store, leased(store, limit=rows), failed=[2])
    change(store, f"update job set state = '{state}'")
    assert [damage.what for damage in checking.check(store).damages] == ([said] if said else [])


def test_a_state_is_judged_once_the_counters_are_right(store: Store) -> None:
    queued(store, rows=4)
    finish(store, leased(store, limit=4))
    change(store, "update job set state = 'queued', succeeded = 1234, failed = 5")
    assert damaged(store)["counters"][1] == "says succeeded 1,234 instead of 4, failed 5 instead of 0"


def test_a_mark_is_not_missed_in_a_job_of_an_earlier_version(store: Store) -> None:
    job_id = queued(store)
    (layout.job_folder(store.home, job_id) / marks.MARK).write_text("{")
    assert damaged(store)["mark"][1] == "is not what was written"
    place_of(layout.job_folder(store.home, job_id)).set_mark(marks.Mark(store_id="another"))
    assert damaged(store)["mark"][1] == "is of another store (another)"
    change(store, "update job set files = null")
    assert damaged(store) == {}


def test_rows_and_counters_that_a_damaged_file_explains_are_not_told(store: Store) -> None:
    job_id = queued(store)
    finish(store, leased(store, limit=2))
    shards.compact(store, job_id, now=0.0)
    (path,) = shard_files(store, job_id)
    path.write_bytes(b"damaged")
    found = damaged(store)
    assert set(found) == {"shard"}
    assert found["shard"][2] == repairs(job_id, "its 2 rows are computed again")


def test_a_row_of_the_journal_that_is_no_result_is_damage(store: Store) -> None:
    queued(store)
    finish(store, leased(store, limit=2))
    change(store, "update journal set payload = x'00' where position = 1")
    found = damaged(store)
    assert set(found) == {"journal"}
    assert found["journal"][0] == "row 1 of the journal"


def test_a_shard_of_an_earlier_version_has_as_many_rows_as_were_registered(store: Store) -> None:
    """Its length and digest were not kept; all of its columns are read."""
    job_id = queued(store, rows=4)
    finish(store, leased(store, limit=4), prompt_tokens=5)
    shards.compact(store, job_id, now=0.0)
    change(store, "update shard set digest = null, bytes = null")
    assert damaged(store) == {}
    (path,) = shard_files(store, job_id)
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pq.read_table(path), path, **options)
    assert damaged(store) == {}
    content = path.read_bytes()
    flip(path, content.index(b"yes\3\0\0\0yes"))
    assert damaged(store)["shard"][1].startswith("is damaged (")
    path.write_bytes(content)
    change(store, "update shard set num_rows = 5")
    assert damaged(store)["shard"][1] == "has 4 of its 5 rows"


def test_requests_of_an_earlier_version_are_read_to_their_end(store: Store) -> None:
    """Nothing but the checksums of their pages tells that a letter is another."""
    job_id = queued(store)
    change(store, "update job set files = null")
    assert damaged(store) == {}
    path = layout.requests_file(store.home, job_id)
    flip(path, path.read_bytes().rindex(b"a question\n\0\0\0a question"))
    assert damaged(store)["requests"][1].startswith("is damaged (")


def test_files_and_bytes_that_were_read_are_counted_once(store: Store) -> None:
    """Though the files of a damaged job are looked at twice; one that is missing is not read."""
    one, two = queued(store, rows=4), queued(store, "two")
    finish(store, leased(store, only=[one], limit=4))
    shards.compact(store, one, now=0.0)
    files = [*layout.jobs_folder(store.home).rglob("*.parquet")]
    checked = checking.check(store)
    assert (checked.jobs, checked.files, checked.damages) == (2, 5, [])
    assert checked.bytes == sum(path.stat().st_size for path in files)
    layout.inputs_file(store.home, two).unlink()
    checked = checking.check(store, only=[two])
    assert (checked.jobs, checked.files, len(checked.damages)) == (1, 1, 1)
    assert checked.bytes == layout.requests_file(store.home, two).stat().st_size


def test_a_damage_that_is_gone_at_the_second_look_is_none(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`conserve retry` may remove a shard after its name was read."""
    job_id = queued(store, rows=4)
    finish(store, leased(store, limit=4), failed=[0, 1, 2, 3])
    shards.compact(store, job_id, now=0.0)
    (path,) = shard_files(store, job_id)
    kept = path.read_bytes()
    real, looks = checking.audit, iter([b"", kept])

    def audit(*arguments: Any, **named: Any) -> Any:
        path.write_bytes(next(looks))
        return real(*arguments, **named)

    monkeypatch.setattr(checking, "audit", audit)
    assert checking.check_job(store, job_id, checking.Checked()) == []
    assert list(looks) == []
