"""Objects as DuckDB reads them: by ranges, whose ends are fetched once. A folder plays the bucket."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.jobs.task import Kind, Task
from conserve.store.books import shards
from conserve.store.database.store import Store
from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import ObjectPath

pytest.importorskip("fsspec")

from conserve.store.sql import object_reader, query
from conserve.store.sql.object_reader import KeptTail, Objects, add_objects
from conserve.store.sql.snapshot import snapshot
from tests.conftest import WriteInput
from tests.played_bucket import play_with_folders
from tests.store_rows import finish, leased
from tests.submitting import submit

LAKE = Bucket.parse("s3://lake/team")
Put = Callable[[str, bytes], ObjectPath]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts an object into the bucket."""
    folder = tmp_path / "lake" / "team"
    folder.mkdir(parents=True)
    play_with_folders(tmp_path, monkeypatch)

    def put(name: str, content: bytes) -> ObjectPath:
        (folder / name).write_bytes(content)
        return ObjectPath(LAKE, name)

    return put


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the objects that are opened, each time."""
    names: list[str] = []
    opening = ObjectPath.open
    monkeypatch.setattr(ObjectPath, "open", lambda self: names.append(self.name) or opening(self))
    return names


def parquet(*numbers: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": numbers}), sink)
    return sink.getvalue().to_pybytes()


def test_duckdb_reads_objects_whose_ends_were_fetched_before(put: Put, opened: list[str]) -> None:
    paths = [put(f"{n}.parquet", parquet(n, n + 1)) for n in range(3)]
    with duckdb.connect(":memory:") as duck:
        add_objects(duck, LAKE, [*paths, ObjectPath(LAKE, "gone.parquet")])
        assert sorted(opened) == ["0.parquet", "1.parquet", "2.parquet", "gone.parquet"]
        for path in paths:
            found = duck.sql(f"select sum(n) from '{path}'").fetchall()
            assert found == [(2 * int(path.name[0]) + 1,)]
        assert len(opened) == 4, "all of a small object is in its end"
        with pytest.raises(duckdb.Error, match=r"gone\.parquet"):
            duck.sql(f"from '{LAKE.url}/gone.parquet'")


def test_objects_that_nobody_announced_are_read_too(put: Put, opened: list[str]) -> None:
    path = put("a.parquet", parquet(7))
    with duckdb.connect(":memory:") as duck:
        add_objects(duck, LAKE)
        assert not opened
        assert duck.sql(f"from '{path}'").fetchall() == [(7,)]
    assert opened == ["a.parquet"]


def test_bytes_before_the_kept_end_are_fetched(
    put: Put, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader, "TAIL_BYTES", 100)
    content = bytes(n % 251 for n in range(1000))
    path = put("a", content)
    objects = Objects(LAKE)
    objects.warm(path)
    file = objects.open(str(path))
    assert file.size == 1000
    for start, size in ((900, 100), (901, 5), (990, 10)):
        file.seek(start)
        assert file.read(size) == content[start : start + size]
    assert opened == ["a"]
    for start, size in ((0, 10), (899, 2), (500, 500)):
        file.seek(start)
        assert file.read(size) == content[start : start + size]
    assert opened == ["a", "a"], "once more, for all bytes before its end"


def test_the_end_of_a_short_object_is_all_of_it(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_reader, "TAIL_BYTES", 100)
    for length in (0, 99, 100, 101):
        content = bytes(range(length))
        tails: dict[str, bytes] = {}
        assert KeptTail(put("a", content), {}, tails).read() == content
        assert tails == {"a": content[-100:]}


def test_an_object_has_one_place_and_length_by_its_url_and_by_its_name(put: Put) -> None:
    path = put("a", b"four")
    for name in ("s3://lake/team/a", "lake/team/a"):
        objects = Objects(LAKE)
        assert objects.protocol == "s3"
        assert objects.path_of(name) == path
        assert objects.info(name) == {"name": "lake/team/a", "size": 4, "type": "file"}
        assert objects.glob(name) == ["lake/team/a"]
        assert objects.modified(name) == datetime.fromtimestamp(0, UTC)


def test_the_length_of_an_object_is_asked_for_once(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    path, objects = put("a", b"four"), Objects(LAKE)
    assert objects.size(str(path)) == 4
    monkeypatch.delattr(ObjectPath, "stat")
    assert objects.size(str(path)) == 4
    assert objects.open(str(put("b", b"seven.."))).size == objects.size("lake/team/b") == 7


def test_connections_share_no_objects_and_write_none(put: Put) -> None:
    """Memory that one keeps of an object would never be given back otherwise."""
    path = put("a", b"four")
    assert Objects(LAKE) is not Objects(LAKE)
    with pytest.raises(PermissionError, match="not written"):
        Objects(LAKE).open(str(path), "wb")
    with pytest.raises(FileNotFoundError):
        Objects(LAKE).info("lake/team/b")


@pytest.mark.parametrize(
    ("used", "counts"),
    [
        (None, {"results": 2, "inputs": 2, "requests": 2}),
        ({"results"}, {"results": 2}),
        ({"inputs", "jobs"}, {"inputs": 2, "jobs": 1}),
        ({"requests", "results"}, {"results": 2, "requests": 2}),
    ],
)
def test_of_a_store_in_a_bucket_only_the_files_of_views_in_use_are_opened(
    put: Put,
    opened: list[str],
    store: Store,
    write_input: WriteInput,
    tmp_path: Path,
    used: set[str] | None,
    counts: dict[str, int],
) -> None:
    job_id = submit(store, str(write_input(q=["a", "b"])), Task(kind=Kind.PROMPT, template="{{ q }}")).job_id
    finish(store, leased(store))
    shards.compact(store, job_id, now=0.0)
    (tmp_path / "lake" / "team" / "store").symlink_to(store.home)
    taken = replace(snapshot(store, now=0.0), data=ObjectPath(LAKE, "store"))
    other = put("other.parquet", parquet(1))
    with query.opened(taken, spill=tmp_path / "spill", uses=lambda empty: used) as views:
        (shard,) = (path.name for path in views.files["results"]) if "results" in counts else [None]
        found = {view: views.duck.execute(f"select count(*) from {view}").fetchall()[0][0] for view in counts}
        with pytest.raises(duckdb.Error, match="disabled"):
            views.duck.execute(f"from '{other}'")
    assert found == counts
    names = {"inputs": "inputs.parquet", "requests": "requests.parquet", "results": shard}
    assert set(opened) == {name for view, name in names.items() if view in counts}
