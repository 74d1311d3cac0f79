"""Results as tables of many files for other programs: Hive's folders, and Delta where deltalake is installed."""

import sys
from collections import Counter
from collections.abc import Iterator
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
from conserve.store.sql import tables
from conserve.store.sql.batches import RowBatches, rows_of
from conserve.store.sql.tables import CountedRows, plain, storage_options, write_dataset, write_delta
from tests.played_bucket import play_with_folders


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
    play_with_folders(tmp_path, monkeypatch)
    folder = tmp_path / "lake" / "table"
    place = ObjectPath(Bucket.parse("s3://lake"), "table") if in_bucket else folder
    write_dataset(rows("a", 1, 2), place, "a")
    cut = rows("a", *range(5000))
    batches = iter(cut.batches)

    def interrupted() -> Iterator[pa.RecordBatch]:
        yield next(batches)
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
    monkeypatch.setattr(tables, "FILE_ROWS", 4)
    monkeypatch.setattr(tables, "GROUP_ROWS", 2)
    assert write_dataset(rows("a", *range(10)), tmp_path, "a") == 10
    described = [pq.read_metadata(path) for path in tmp_path.rglob("*.parquet")]
    assert sorted(one.num_rows for one in described) == [2, 4, 4]
    assert all(one.row_group(n).num_rows == 2 for one in described for n in range(one.num_row_groups))


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
