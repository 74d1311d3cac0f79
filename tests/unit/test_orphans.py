"""Answers on disk that the database does not name are taken in, if they can only be the job's own."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import insert

from conserve.store.books import catalog, shards
from conserve.store.books.results import to_arrow
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import digests, layout
from conserve.store.files.folder_place import modified_ns
from conserve.store.upkeep import orphans
from tests.store_rows import add_job, finish, leased, result, select

JOB = "job-1"
ROWS = 8
NOW = 2e9


@pytest.fixture
def folder(store: Store) -> Path:
    """Results of a job of eight rows, whose requests ask for the row indexes 10 to 17."""
    add_job(store, JOB, rows=ROWS)
    write_requests(store, range(10, 10 + ROWS))
    made = layout.job_folder(store.home, JOB) / layout.RESULTS
    made.mkdir()
    return made


def write_requests(store: Store, row_indexes: Sequence[int]) -> None:
    pq.write_table(
        pa.table({"row_index": pa.array(row_indexes, pa.int64())}), layout.requests_file(store.home, JOB)
    )


def lying(
    folder: Path, rows: Mapping[int, int], *, failed: Sequence[int] = (), name: str = "a", at: int = 100
) -> Path:
    """A file of results, position -> row index, that no transaction registered."""
    results = [result(index, failed=position in failed) for position, index in rows.items()]
    path = folder / f"{name}.parquet"
    pq.write_table(to_arrow([JOB] * len(rows), list(rows), results), path, write_page_checksum=True)
    os.utime(path, ns=(at, at))
    return path


def own(*positions: int) -> dict[int, int]:
    """Positions, and the row indexes that the requests have there."""
    return {position: 10 + position for position in positions}


def found(store: Store) -> list[tuple[str, list[int]]]:
    there = orphans.on_disk(store.home, JOB)
    with store.read() as tx:
        return [
            (each.path.name, each.positions.tolist())
            for each in orphans.among(tx, store.home, JOB, there, {})
            if isinstance(each.path, Path)
        ]


def test_files_are_listed_by_their_age_and_then_by_name(store: Store, folder: Path) -> None:
    for name, at in (("b", 300), ("c", 100), ("d", 200), ("a", 200)):
        lying(folder, own(0), name=name, at=at)
    lying(folder, own(0), name=".hidden")
    (folder / "half.tmp").write_bytes(b"")
    there = orphans.on_disk(store.home, JOB)
    assert [path.name for path in there] == ["c.parquet", "a.parquet", "d.parquet", "b.parquet"]
    assert orphans.on_disk(store.home, "missing") == []


def test_a_file_that_is_gone_is_the_oldest(tmp_path: Path) -> None:
    assert modified_ns(tmp_path / "gone") == 0


@pytest.mark.parametrize(
    ("rows", "failed", "taken"),
    [
        (own(0), (), True),
        (own(5, 2, 7), (), True),
        (own(), (), False),
        (own(2, 8), (), False),
        (own(2, -1), (), False),
        (own(2, 3), (3,), False),
        ({2: 12, 3: 14}, (), False),
    ],
    ids=["one", "several", "none", "beyond the job", "before the job", "with an error", "of other rows"],
)
def test_only_answers_to_the_jobs_own_requests_are_taken(
    store: Store, folder: Path, rows: Mapping[int, int], failed: Sequence[int], taken: bool
) -> None:
    lying(folder, rows, failed=failed)
    assert found(store) == ([("a.parquet", list(rows))] if taken else [])


def test_answers_that_cannot_be_read_are_not_taken(store: Store, folder: Path) -> None:
    path = lying(folder, own(0, 1))
    column = pq.read_metadata(path).row_group(0).column(1)
    assert column.path_in_schema == "position"
    content = bytearray(path.read_bytes())
    content[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 4
    path.write_bytes(content)
    (folder / "b.parquet").write_bytes(b"no file of results")
    assert found(store) == []


@pytest.mark.parametrize(("requests", "taken"), [(None, True), (range(10, 13), True), (range(10, 12), False)])
def test_requests_that_are_lost_forbid_nothing_and_shorter_ones_do(
    store: Store, folder: Path, requests: Sequence[int] | None, taken: bool
) -> None:
    if requests is None:
        layout.requests_file(store.home, JOB).unlink()
    else:
        write_requests(store, requests)
    lying(folder, own(1, 2))
    assert bool(found(store)) is taken


def test_nothing_of_a_job_that_was_removed_is_taken(store: Store, folder: Path) -> None:
    lying(folder, own(0))
    with store.write() as tx:
        tx.exec_driver_sql("delete from job")
    assert found(store) == []


@pytest.mark.parametrize("position", [-1, ROWS])
def test_positions_that_the_job_does_not_have_are_not_taken_without_its_requests_either(
    store: Store, folder: Path, position: int
) -> None:
    layout.requests_file(store.home, JOB).unlink()
    lying(folder, own(2, position))
    assert found(store) == []


def test_answers_that_the_database_has_are_no_orphans(store: Store, folder: Path) -> None:
    """A row in a shard is enough; of those in the journal one must lack."""
    finish(store, leased(store, limit=2))
    shards.compact(store, JOB, now=0.0)
    finish(store, leased(store, limit=2))
    lying(folder, own(1, 5), name="shares a row with a shard")
    lying(folder, own(2, 3), name="all in the journal")
    assert found(store) == []
    lying(folder, own(3, 4), name="one more than the journal")
    assert found(store) == [("one more than the journal.parquet", [3, 4])]


def test_a_registered_file_that_was_changed_since_is_no_orphan(store: Store, folder: Path) -> None:
    lying(folder, own(0))
    values = {"job_id": JOB, "file": f"jobs/{JOB}/results/a.parquet", "failed": False, "num_rows": 1}
    with store.write() as tx:
        tx.execute(insert(schema.shard).values(created_at=0.0, digest="another", bytes=1, **values))
    assert found(store) == []


def test_of_two_files_with_one_row_the_older_is_taken(store: Store, folder: Path) -> None:
    lying(folder, own(0, 1), name="newer", at=200)
    lying(folder, own(1, 2), name="older", at=100)
    lying(folder, own(4), name="other", at=300)
    assert found(store) == [("older.parquet", [1, 2]), ("other.parquet", [4])]


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((0,), ["1 answer that lay on disk was taken in"]),
        ((0, 1, 2), ["3 answers that lay on disk were taken in"]),
        ((), []),
    ],
)
def test_answers_are_registered_and_late_writers_stay_late(
    store: Store, folder: Path, positions: Sequence[int], said: list[str]
) -> None:
    add_job(store, "job-2", rows=2)
    held = [leased(store, only=[job_id], limit=2).epoch for job_id in (JOB, "job-2")]
    path = lying(folder, own(*positions)) if positions else folder / "none"
    there = orphans.on_disk(store.home, JOB)
    with store.write() as tx:
        lost = [each.sealed() for each in orphans.among(tx, store.home, JOB, there, {})]
        taken = orphans.take_in(tx, store.home, JOB, lost, {}, now=NOW)
    assert orphans.told(taken.values()) == said
    assert [*taken] == [number for (number,) in select(store, "select id from shard")]
    with store.read() as tx:
        registered = shards.files(tx, [JOB])
    assert [(file.file, file.failed, file.num_rows) for file in registered] == (
        [(f"jobs/{JOB}/results/a.parquet", False, len(positions))] * bool(positions)
    )
    assert [file.seal for file in registered] == ([digests.seal(path)] if positions else [])
    assert select(store, "select created_at from shard") == [(NOW,)] * bool(positions)
    leases = [epoch for (epoch,) in select(store, "select epoch from lease order by epoch")]
    assert leases == (held[1:] if positions else held), "only the leases of the job end"
    assert (leased(store, only=[JOB], limit=1).epoch > NOW * 1000) is bool(positions)


def test_answers_that_came_by_another_way_meanwhile_are_not_taken_in(store: Store, folder: Path) -> None:
    lying(folder, own(0, 1))
    there = orphans.on_disk(store.home, JOB)
    with store.read() as tx:
        lost = [each.sealed() for each in orphans.among(tx, store.home, JOB, there, {})]
    finish(store, leased(store, limit=2))
    with store.write() as tx:
        assert orphans.take_in(tx, store.home, JOB, lost, {}, now=NOW) == {}
    assert select(store, "select count(*) from shard") == [(0,)]


def test_a_registered_file_of_which_another_shard_has_rows_keeps_them(store: Store, folder: Path) -> None:
    """Rows beyond the job in a registered shard are damage, and do not disturb the search."""
    path = lying(folder, own(0, ROWS), name="registered")
    seal = digests.seal(path)
    values = {"job_id": JOB, "file": f"jobs/{JOB}/results/registered.parquet", "failed": False, "num_rows": 2}
    with store.write() as tx:
        assert catalog.taken(tx, JOB)
        tx.execute(
            insert(schema.shard).values(created_at=0.0, digest=seal.digest, bytes=seal.bytes, **values)
        )
    lying(folder, own(0), name="shares")
    lying(folder, own(1), name="free")
    assert found(store) == [("free.parquet", [1])]
