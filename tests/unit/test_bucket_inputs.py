"""Inputs in buckets: which objects a URL names, and what becomes of their copies. A folder plays the bucket."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.errors import InputError, UsageError
from conserve.jobs.inputs import remote
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.remote import FETCHED, fetch, is_url
from conserve.jobs.inputs.source import Input, Opened, open_input
from conserve.store.files import objects
from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import ObjectPath
from tests.played_bucket import play_with_folders

BUCKET = "s3://lake"


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts objects of one row, `q` = the object's key, into the bucket."""
    root = tmp_path / "service"
    (root / "lake").mkdir(parents=True)
    play_with_folders(root, monkeypatch)

    def put(*keys: str) -> None:
        for key in keys:
            path = root / "lake" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                pq.write_table(pa.table({"q": [key]}), path)
            else:
                path.write_text(f'{{"q": "{key}"}}\n')

    return put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The new job's folder."""
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def opened(folder: Path, *names: str, keep: Keep | None = None) -> Opened:
    return open_input(Input(names=names, keep=keep), folder, openai=False)


def rows(found: Opened, columns: Sequence[str] = ("q",)) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for batch in found.rows.batches(columns) for row in batch]


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (f"{BUCKET}/a", True),
        ("gs://b", True),
        ("az://b/c", True),
        ("s3", False),
        ("s3:/a", False),
        ("x://a", False),
    ],
)
def test_urls_of_buckets_are_told_from_paths(name: str, url: bool) -> None:
    assert is_url(name) is url


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("day=1/a.parquet", ["day=1/a.parquet"]),
        ("day=1", ["day=1/a.parquet", "day=1/deep/b.parquet"]),
        ("day=1/", ["day=1/a.parquet", "day=1/deep/b.parquet"]),
        ("day=1/?region=eu-1", ["day=1/a.parquet", "day=1/deep/b.parquet"]),
        ("day=*/?.parquet", ["day=1/a.parquet", "day=1/deep/b.parquet", "day=2/c.parquet"]),
        (
            "day=*/?.parquet?endpoint=http://there",
            ["day=1/a.parquet", "day=1/deep/b.parquet", "day=2/c.parquet"],
        ),
        ("day=[2-9]/*", ["day=2/c.parquet"]),
        ("*b.parquet", ["day=1/deep/b.parquet"]),
        ("day=1/_*.parquet", ["day=1/_SUCCESS.parquet"]),
        ("", ["day=1/a.parquet", "day=1/deep/b.parquet", "day=2/c.parquet"]),
    ],
)
def test_a_url_names_an_object_those_below_it_or_those_of_its_pattern(
    put: Callable[..., None], folder: Path, url: str, keys: list[str]
) -> None:
    put("day=2/c.parquet", "day=1/deep/b.parquet", "day=1/a.parquet")
    put("day=1/_SUCCESS.parquet", "day=1/.hidden/d.parquet", "day=1/readme.md")
    fetched = fetch([f"{BUCKET}/{url}"], folder)
    assert [fetched.urls[str(path.absolute())] for path in fetched.paths] == [
        f"{BUCKET}/{key}" for key in keys
    ]
    assert [pq.read_table(path)["q"].to_pylist() for path in fetched.paths] == [[key] for key in keys]


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        ([f"{BUCKET}/none.parquet"], InputError, "there is no object s3://lake/none.parquet"),
        ([f"{BUCKET}/n*.parquet"], InputError, "no object matches s3://lake/n"),
        ([f"{BUCKET}/a.parquet", f"{BUCKET}/*.parquet"], InputError, "named twice"),
        ([f"{BUCKET}/a.parquet", "here.parquet"], UsageError, "not both"),
    ],
)
def test_urls_that_name_nothing_or_one_object_twice_are_refused(
    put: Callable[..., None], folder: Path, names: list[str], error: type[Exception], said: str
) -> None:
    put("a.parquet")
    with pytest.raises(error, match=said):
        fetch(names, folder)


def test_an_object_whose_name_is_a_pattern_is_that_object(put: Callable[..., None], folder: Path) -> None:
    put("a[1].parquet", "a1.parquet")
    assert rows(opened(folder, f"{BUCKET}/a[1].parquet")) == [("a[1].parquet",)]


@pytest.mark.parametrize("keys", [["d/a.jsonl", "d/a.jsonl/b.jsonl"], ["d/a.jsonl/b.jsonl", "d/a.jsonl"]])
def test_objects_that_are_no_files_beside_each_other_are_named(
    put: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """All have the contents of another object: the folder that plays the bucket can hold none of these names."""
    put("other.jsonl")
    found = [ObjectPath(Bucket.parse(BUCKET), key) for key in keys]
    other = ObjectPath(found[0].bucket, "other.jsonl")
    monkeypatch.setattr(remote, "objects_of", lambda url: remote.NamedObjects(found, several=True))
    monkeypatch.setattr(ObjectPath, "open", lambda self: objects.ObjectFile(other))
    with pytest.raises(InputError, match=f"^{BUCKET}/{keys[1]} has a name that no file can have"):
        fetch([f"{BUCKET}/d"], folder)


def test_an_object_with_a_longer_name_than_files_have_is_named(
    put: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ObjectPath(Bucket.parse(BUCKET), f"{'x' * 300}/a.jsonl")
    monkeypatch.setattr(remote, "objects_of", lambda url: remote.NamedObjects([long], several=False))
    put("a.jsonl")
    with pytest.raises(InputError, match=f"^{BUCKET}/x+/a.jsonl has a name that no file can have"):
        fetch([f"{BUCKET}/d"], folder)


def test_several_objects_are_one_input_with_the_partitions_of_their_urls(
    put: Callable[..., None], folder: Path
) -> None:
    put("day=1/a.parquet", "day=2/b.parquet")
    found = opened(folder, f"{BUCKET}/day=*", keep=Keep.LINK)
    assert rows(found, ["q", "day"]) == [("day=1/a.parquet", 1), ("day=2/b.parquet", 2)]
    assert found.source.path == f"{BUCKET}/day=*"
    assert [part.path for part in found.source.parts] == [
        f"{BUCKET}/day=1/a.parquet",
        f"{BUCKET}/day=2/b.parquet",
    ]
    assert found.source.copied, "the copies go, so the rows stay"
    found.copy_text(folder)
    assert not (folder / FETCHED).exists()
    assert len(rows(found)) == 2


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("url", ["day=*", "", "day=*/a.*"])
def test_one_object_of_a_folder_or_pattern_has_its_partitions_too(
    put: Callable[..., None], folder: Path, url: str, form: str
) -> None:
    put(f"day=1/a.{form}")
    found = opened(folder, f"{BUCKET}/{url}")
    assert rows(found, ["q", "day"]) == [(f"day=1/a.{form}", 1)]
    assert found.source.path == f"{BUCKET}/{url}"
    assert [part.path for part in found.source.parts] == [f"{BUCKET}/day=1/a.{form}"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("b.jsonl", '{"q": ', "line 1 of s3://lake/d/b.jsonl is not JSON"),
        ("b.parquet", "PAR1", "s3://lake/d/b.parquet"),
        ("b.csv", "q\n1\n", "s3://lake/d/a.jsonl is JSONL and s3://lake/d/b.csv is CSV"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_errors_name_objects_by_their_urls(
    put: Callable[..., None], folder: Path, tmp_path: Path, alone: bool, name: str, text: str, said: str
) -> None:
    put("d/a.jsonl")
    (tmp_path / "service" / "lake" / "d" / name).write_text(text)
    with pytest.raises(InputError) as error:
        opened(folder, f"{BUCKET}/d" if not alone or name == "b.csv" else f"{BUCKET}/d/{name}")
    assert said.lower() in str(error.value).lower()
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("key", ["d/../../up.jsonl", "../up.jsonl", "d/./a.jsonl", "d//a.jsonl"])
def test_an_object_whose_name_leaves_the_folder_of_copies_is_refused(
    put: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    put("a.jsonl")
    odd = ObjectPath(Bucket.parse(BUCKET), key)
    monkeypatch.setattr(remote, "objects_of", lambda url: remote.NamedObjects([odd], several=True))
    with pytest.raises(InputError, match="rename the object"):
        fetch([f"{BUCKET}/d"], folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_folders_of_this_machine_are_no_partitions_of_objects(
    put: Callable[..., None], tmp_path: Path, form: str
) -> None:
    put(f"day=1/a.{form}", f"day=2/b.{form}")
    store = tmp_path / "team=eval" / "job"
    store.mkdir(parents=True)
    found = opened(store, f"{BUCKET}/day=*")
    assert set(found.rows.columns) == {"q", "day"}
    assert rows(found) == [(f"day=1/a.{form}",), (f"day=2/b.{form}",)]


@pytest.mark.parametrize("key", ["a.parquet", "a.jsonl"])
def test_one_object_is_an_input_whose_source_is_its_url(
    put: Callable[..., None], folder: Path, key: str
) -> None:
    put(f"deep/{key}")
    found = opened(folder, f"{BUCKET}/deep/{key}?endpoint=http://there")
    assert rows(found) == [(f"deep/{key}",)]
    assert (found.source.path, found.source.parts) == (f"{BUCKET}/deep/{key}", ())


def test_a_file_and_an_object_are_no_one_input(put: Callable[..., None], folder: Path) -> None:
    put("a.parquet")
    with pytest.raises(UsageError, match="not both"):
        opened(folder, "here.parquet", f"{BUCKET}/a.parquet")


@pytest.mark.parametrize("replaced", [True, False])
def test_an_object_that_changes_while_it_is_copied_is_refused(
    put: Callable[..., None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Its copy may have rows of both versions."""
    put("day.jsonl")
    there = tmp_path / "service" / "lake" / "day.jsonl"
    read_at = objects.ObjectFile.read_at

    def meanwhile(self: objects.ObjectFile, start: int, size: int) -> bytes:
        found = read_at(self, start, size)
        if replaced:
            there.write_bytes(there.read_bytes() * 2)
        else:
            there.unlink()
        return found

    monkeypatch.setattr(objects.ObjectFile, "read_at", meanwhile)
    with pytest.raises(
        InputError, match=r"^s3://lake/day\.jsonl was replaced or deleted while it was copied"
    ):
        opened(folder, f"{BUCKET}/day.jsonl")
