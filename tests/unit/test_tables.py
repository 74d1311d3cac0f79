"""Results as tables of many files for other programs: Hive's folders, and Delta where deltalake is installed."""

import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from conserve.errors import PackageMissing, StoreError, StoreUnreachable
from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import ObjectPath
from conserve.store.sql import batches, tables
from conserve.store.sql.batches import RowBatches, rows_of
from conserve.store.sql.tables import CountedRows, plain, storage_options, write_dataset, write_delta
from tests.played_bucket import play_with_folders


def table_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_bucket: bool
) -> tuple[Path, Path | ObjectPath]:
    """Folder of a data set, and the place that is named for it: the folder, or one in a bucket that it plays."""
    play_with_folders(tmp_path, monkeypatch)
    folder = tmp_path / "lake" / "table"
    return folder, ObjectPath(Bucket.parse("s3://lake"), "table") if in_bucket else folder


def rows(job_id: str, *numbers: int, **columns: list[Any]) -> RowBatches:
    """Rows of a job; the interval is of a type that Parquet lacks."""
    table = pa.table({"job_id": [job_id] * len(numbers), "n": numbers, **columns})
    return rows_of(duckdb.connect(":memory:").from_arrow(table).project("*, interval 1 month as took"))


def files(folder: Path) -> dict[str, int]:
    """Number of files in each folder of a part."""
    return Counter(path.parent.name for path in folder.rglob("part-*.parquet"))


def read(folder: Path) -> list[tuple[Any, ...]]:
    """Rows as another program reads them, in order."""
    found = dataset.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist()
    return sorted((row["job_id"], row["n"], row["took"]) for row in found)


TOOK = "1 month 0:00:00"


def test_a_data_set_has_a_folder_for_each_job_whose_files_a_second_export_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "table"
    assert write_dataset(rows("a", 1, 2, 3), folder, "a") == 3
    assert write_dataset(rows("b", 7), folder, "b") == 1
    before = {path.name for path in folder.glob("job_id=a/*")}
    assert write_dataset(rows("a", 4, 5), folder, "a") == 2
    assert before.isdisjoint(path.name for path in folder.glob("job_id=a/*")), "readers may have kept a file"
    assert read(folder) == [("a", 4, TOOK), ("a", 5, TOOK), ("b", 7, TOOK)]
    assert files(folder) == {"job_id=a": 1, "job_id=b": 1}
    (path,) = folder.glob("job_id=b/*.parquet")
    described = pq.read_metadata(path)
    assert described.schema.names == ["n", "took"]
    assert described.row_group(0).column(0).compression == "ZSTD"


def test_a_data_set_in_a_bucket_is_replaced_by_jobs_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_with_folders(tmp_path, monkeypatch)
    folder = tmp_path / "lake" / "team" / "table"
    place = ObjectPath(Bucket.parse("s3://lake/team"), "table")
    for job_id, numbers in (("a", [1, 2]), ("b", [7]), ("a", [3])):
        assert write_dataset(rows(job_id, *numbers), place, job_id) == len(numbers)
    assert read(folder) == [("a", 3, TOOK), ("b", 7, TOOK)]
    (folder / "file").touch()
    with pytest.raises(StoreUnreachable, match="s3://lake/team cannot be reached"):
        write_dataset(rows("a", 1), place / "file", "a")


@pytest.mark.parametrize("in_bucket", [False, True])
def test_an_export_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bucket: bool
) -> None:
    folder, place = table_of(tmp_path, monkeypatch, in_bucket=in_bucket)
    write_dataset(rows("a", 1, 2), place, "a")
    cut = rows("a", *range(5000))
    parts = iter(cut.batches)

    def interrupted() -> Iterator[pa.RecordBatch]:
        yield next(parts)
        raise StoreError("out of memory")

    with pytest.raises(StoreError, match="out of memory"):
        write_dataset(replace(cut, batches=interrupted()), place, "a")
    assert [path.name for path in folder.iterdir() if any(path.rglob("*.parquet"))] == ["job_id=a"]
    assert read(folder) == [("a", 1, TOOK), ("a", 2, TOOK)]
    assert write_dataset(rows("a"), place, "a") == 0
    assert files(folder) == {}


def test_rows_are_counted_as_they_are_read() -> None:
    counted = CountedRows(rows("a", *range(5000)))
    assert counted.rows == 0
    reader = counted.reader()
    first = reader.read_next_batch().num_rows
    assert counted.rows == first < 5000
    assert first + reader.read_all().num_rows == counted.rows == 5000


def test_files_and_groups_of_a_data_set_have_so_many_rows_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rows(monkeypatch, FILE_ROWS=4, GROUP_ROWS=2)
    assert write_dataset(rows("a", *range(10)), tmp_path, "a") == 10
    described = [pq.read_metadata(path) for path in sorted(tmp_path.rglob("*.parquet"))]
    assert [one.num_rows for one in described] == [4, 4, 2]
    assert all(one.row_group(n).num_rows == 2 for one in described for n in range(one.num_row_groups))


@pytest.mark.parametrize(
    ("bounds", "groups"),
    [
        ({"GROUP_ROWS": 3, "FILE_BYTES": 1}, [[3], [3], [3], [1]]),
        ({"GROUP_BYTES": 1, "FILE_ROWS": 9}, [[1] * 9, [1]]),
    ],
)
def test_files_and_groups_of_a_data_set_have_so_many_bytes_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, int], groups: list[list[int]]
) -> None:
    few_rows(monkeypatch, **bounds)
    assert write_dataset(rows("a", *range(10)), tmp_path, "a") == 10
    described = [pq.read_metadata(path) for path in sorted(tmp_path.rglob("*.parquet"))]
    assert [[one.row_group(n).num_rows for n in range(one.num_row_groups)] for one in described] == groups


def few_rows(monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    """Let rows come one by one, and these be the bounds of files and groups."""
    for name in ("READ_ROWS", "BATCH_ROWS"):
        monkeypatch.setattr(batches, name, 1)
    for name, value in bounds.items():
        monkeypatch.setattr(tables, name, value)


def test_a_data_set_has_the_rows_in_order_by_the_names_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FILE_ROWS", "GROUP_ROWS"):
        monkeypatch.setattr(tables, name, 8192)
    write_dataset(rows("a", *range(100_000)), tmp_path, "a")
    paths = sorted(tmp_path.rglob("*.parquet"))
    assert len(paths) == 13, "more than ten, whose numbers have one digit or two"
    assert [n for path in paths for n in pq.ParquetFile(path).read()["n"].to_pylist()] == list(range(100_000))


def beside(whole: RowBatches, other: Callable[[], object]) -> RowBatches:
    """Rows in the middle of which something else happens."""

    def interrupted() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(whole.batches):
            if number == 1:
                other()
            yield batch

    return replace(whole, batches=interrupted())


@pytest.mark.parametrize("in_bucket", [False, True])
def test_of_two_exports_at_a_time_the_one_that_ends_last_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bucket: bool
) -> None:
    folder, place = table_of(tmp_path, monkeypatch, in_bucket=in_bucket)
    write_dataset(rows("a", 1), place, "a")
    met: list[Any] = []

    def other() -> None:
        write_dataset(rows("a", 2), place, "a")
        met.extend(read(folder))

    assert write_dataset(beside(rows("a", *range(5000)), other), place, "a") == 5000
    assert met == [("a", 2, TOOK)]
    assert [n for _, n, _ in read(folder)] == list(range(5000))
    assert files(folder) == {"job_id=a": 1}
    assert [path.name for path in folder.iterdir()] == ["job_id=a"], "no empty folder of each export"


def test_exports_that_copy_at_one_time_leave_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has no locks, so that neither knows which files are the other's and which are earlier ones."""
    play_with_folders(tmp_path, monkeypatch)
    place = ObjectPath(Bucket.parse("s3://lake"), "table")
    write_dataset(rows("a", 1), place, "a")
    copy = ObjectPath.copy_to
    foreign = place / "job_id=a" / "part-00000-other.parquet"

    def both(self: ObjectPath, other: ObjectPath) -> None:
        copy(self, other)
        copy(self, foreign)

    monkeypatch.setattr(ObjectPath, "copy_to", both)
    with pytest.raises(StoreError, match=r"another export writes s3://lake/table/job_id=a .*; run it again"):
        write_dataset(rows("a", 2), place, "a")
    foreign.unlink()
    assert read(tmp_path / "lake" / "table") == [("a", 1, TOOK)]
    assert files(tmp_path) == {"job_id=a": 1}


@pytest.mark.parametrize("in_bucket", [False, True])
def test_an_export_whose_files_cannot_be_put_in_place_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bucket: bool
) -> None:
    folder, place = table_of(tmp_path, monkeypatch, in_bucket=in_bucket)
    write_dataset(rows("a", 1, 2), place, "a")
    rename, copy = Path.rename, ObjectPath.copy_to

    def not_renamed(self: Path, to: Path) -> Path:
        if self.name == tables.NEW:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    def half_copied(self: ObjectPath, to: ObjectPath) -> None:
        copy(self, to)
        raise StoreUnreachable("s3://lake cannot be reached")

    monkeypatch.setattr(Path, "rename", not_renamed)
    monkeypatch.setattr(ObjectPath, "copy_to", half_copied)
    with pytest.raises(StoreError, match="cannot be"):
        write_dataset(rows("a", 3), place, "a")
    assert read(folder) == [("a", 1, TOOK), ("a", 2, TOOK)]
    assert files(tmp_path) == {"job_id=a": 1}


@pytest.mark.parametrize("in_bucket", [False, True])
def test_what_killed_exports_left_goes_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bucket: bool
) -> None:
    folder, place = table_of(tmp_path, monkeypatch, in_bucket=in_bucket)
    for name, hours in (("_a.killed", 25), ("_a.at-work", 23), ("_ab.killed", 25), ("_a", 25)):
        path = folder / name / tables.NEW / "part-00000.parquet"
        path.parent.mkdir(parents=True)
        path.touch()
        for one in (path, *path.parents[:2]):
            os.utime(one, (time.time() - hours * 3600,) * 2)
    if in_bucket:  # which knows no time of an export without files
        write_dataset(rows("a"), place, "a")
        assert len(list(folder.glob("_*/*/*"))) == 4
    write_dataset(rows("a", 1), place, "a")
    left = {path.parts[-3] for path in folder.glob("_*/*/*")}
    assert left == {"_a.at-work", "_ab.killed"}


def test_a_place_where_no_data_set_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"{tmp_path}/file/table cannot be used"):
        write_dataset(rows("a", 1), tmp_path / "file" / "table", "a")


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Place of a Delta table."""
    pytest.importorskip("deltalake")
    return tmp_path / "table"


def of_delta(place: Path) -> list[dict[str, Any]]:
    from deltalake import DeltaTable

    return sorted(
        pa.table(DeltaTable(str(place)).to_pyarrow_table()).to_pylist(),
        key=lambda row: (row["job_id"], row["n"]),
    )


def test_a_delta_table_replaces_the_rows_of_one_job_and_takes_new_columns(delta: Path) -> None:
    assert write_delta(rows("it's", 1, 2), delta, "it's") == 2
    assert write_delta(rows("b", 7), delta, "b") == 1
    assert write_delta(rows("it's", 3, more=["x"]), delta, "it's") == 1
    assert of_delta(delta) == [
        {"job_id": "b", "n": 7, "took": TOOK, "more": None},
        {"job_id": "it's", "n": 3, "took": TOOK, "more": "x"},
    ]
    assert {path.name for path in delta.iterdir()} > {"_delta_log", "job_id=b"}


def test_a_place_where_no_delta_table_can_be_is_a_sentence(delta: Path) -> None:
    delta.touch()
    with pytest.raises(
        StoreError, match=f"the table {delta} cannot be written .*; nothing of it changed"
    ) as error:
        write_delta(rows("a", 1), delta, "a")
    assert "\n" not in str(error.value)


def test_delta_without_its_library_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(PackageMissing, match=r"needs deltalake; run: .*install .*delta"):
        write_delta(rows("a", 1), tmp_path, "a")


PATIENT = {"connect_timeout": "5s", "max_retries": "3", "retry_timeout": "30s"}


@pytest.mark.parametrize(
    ("url", "variables", "options"),
    [
        ("gs://b", {"AWS_ENDPOINT_URL": "http://here:9"}, {}),
        ("s3://b", {}, {}),
        (
            "s3://b?endpoint=http://here:9",
            {},
            {"AWS_ENDPOINT_URL": "http://here:9", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"},
        ),
        (
            "s3://b?endpoint=https://here",
            {"AWS_REGION": "eu-west-1"},
            {"AWS_ENDPOINT_URL": "https://here", "AWS_ALLOW_HTTP": "false", "AWS_REGION": "eu-west-1"},
        ),
        (
            "s3://b?region=eu-north-1",
            {"AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "https://here"},
            {"AWS_ENDPOINT_URL": "https://here", "AWS_ALLOW_HTTP": "false", "AWS_REGION": "eu-north-1"},
        ),
    ],
)
def test_delta_reaches_the_server_that_the_store_reaches(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], options: dict[str, str]
) -> None:
    for name in ("AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert storage_options(Bucket.parse(url)) == PATIENT | options


def test_a_message_of_deltas_is_one_short_line_without_colours() -> None:
    assert plain(ValueError("\x1b[31mno\x1b[0m\n  ↳ way")) == "no way"
    assert len(plain(ValueError("x" * 1000))) == 300
