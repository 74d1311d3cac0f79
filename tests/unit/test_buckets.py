"""URLs of buckets: what they name, and that none carries credentials."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert

from conserve.config import Settings, load
from conserve.errors import SettingsError, StoreError
from conserve.store.database import data, schema
from conserve.store.database.store import Store
from conserve.store.files.bucket import Bucket, reason
from conserve.store.files.objects import ObjectPath, object_at
from tests.store_rows import add_job, select

SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.mark.parametrize(
    "url",
    ["s3://team", "s3://team/a/b", "gs://team/a", "az://team/a", "s3://team/a?endpoint=http://host:9000"],
)
def test_a_url_is_kept_as_it_was_given(url: str) -> None:
    assert Bucket.parse(url).url == url


def test_two_urls_are_one_place_whatever_address_leads_there() -> None:
    inside = Bucket.parse("s3://team/a?endpoint=http://minio:9000&region=eu-1")
    assert inside.is_at(Bucket.parse("s3://team/a"))
    assert not inside.is_at(Bucket.parse("s3://team/b"))


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAKEY:{SECRET}@team/a",
        f"s3://team/a?access_key=AKIAKEY&secret_key={SECRET}",
        f"s3://team/a?endpoint=http://AKIAKEY:{SECRET}@host:9000",
        f"s3://team/a?X-Amz-Signature={SECRET}",
        f"az://team/a?sig={SECRET}",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str, settings: Settings) -> None:
    with pytest.raises(SettingsError, match="credentials") as refused:
        Store.open(load({"home": settings.home, "data": url}, environ={}))
    assert "AKIAKEY" not in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["ftp://team", "s3://", "s3://team/a*b", "s3://team/a b", "s3://team/a?proxy=x"]
)
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        Bucket.parse(url)


def test_a_path_whose_slashes_were_joined_still_names_its_object() -> None:
    found = object_at(Path("s3://team/answers/day.parquet"))
    assert found == ObjectPath(Bucket.parse("s3://team"), "answers/day.parquet")
    assert object_at(Path("answers/s3.parquet")) is None


def test_the_reason_of_an_error_is_its_code_alone() -> None:
    said = (
        "When getting information for key 'a' in bucket 'team': AWS Error NETWORK_CONNECTION during HeadObject "
        "operation: curlCode: 7, Couldn't connect to server AKIAKEY"
    )
    assert reason(OSError(said)).startswith("network connection, couldn't connect to server")
    refused = "AWS Error INVALID_ACCESS_KEY_ID during PutObject operation: The key AKIAKEY does not exist"
    assert reason(OSError(refused)) == "invalid access key id"


def test_a_store_stays_where_its_files_are(settings: Settings, tmp_path: object) -> None:
    with_data = load({"home": settings.home, "data": str(settings.home / "elsewhere")}, environ={})
    store = Store.open(with_data)
    assert store.data == settings.home / "elsewhere"
    with store.write() as tx:
        store.check_place(tx)
    store.close()
    again = Store.open(settings)
    assert again.data == settings.home / "elsewhere"
    add_job(again)
    again.close()
    other = load({"home": settings.home, "data": str(settings.home / "other")}, environ={})
    for opening in (Store.open, Store.open_to_read):
        with pytest.raises(SettingsError, match="files of this store lie in"):
            opening(other)


BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


def opened(settings: Settings, place: object) -> Store:
    """The same store, with a place of its files given."""
    return Store.open(load({"home": settings.home, "store": settings.store, "data": str(place)}, environ={}))


def place_of(store: Store) -> list[str]:
    return [value for (value,) in select(store, "select value from meta where key = 'data'")]


@BOTH
def test_a_place_is_made_named_and_found_without_the_setting(settings: Settings, tmp_path: Path) -> None:
    with closing(opened(settings, tmp_path / "a" / "b")) as store:
        assert (store.data, store.local) == (tmp_path / "a" / "b",) * 2
        assert store.data.is_dir()
    with closing(Store.open(settings)) as store:
        assert store.data == tmp_path / "a" / "b"
        assert place_of(store) == [str(tmp_path / "a" / "b")]


@BOTH
def test_a_bucket_is_named_by_its_url_and_holds_the_store_under_its_id(settings: Settings) -> None:
    url = "s3://team/a?endpoint=http://minio:9000"
    with closing(opened(settings, url)) as store:
        assert store.data == ObjectPath(Bucket.parse(url), store.id)
        assert store.local == store.home
        assert place_of(store) == [url]
        with store.read() as tx:
            store.check_place(tx)
    assert data.text_of(settings.home, ObjectPath(Bucket.parse(url), "x")) == url


@BOTH
def test_the_place_of_a_store_without_jobs_is_the_last_one_given(settings: Settings, tmp_path: Path) -> None:
    for place, expected in (
        (tmp_path / "one", [str(tmp_path / "one")]),
        (tmp_path / "two", [str(tmp_path / "two")]),
        ("s3://team/a", ["s3://team/a"]),
        (settings.home, []),
        (tmp_path / "two", [str(tmp_path / "two")]),
    ):
        with closing(opened(settings, place)) as store:
            assert place_of(store) == expected
            assert data.text_of(store.home, store.data) == (expected[0] if expected else None)


@BOTH
def test_another_address_of_a_buckets_server_is_the_same_place(settings: Settings) -> None:
    """The address may differ between machines, of which each uses its own; another bucket is another place."""
    inside, outside = "s3://team/a?endpoint=http://minio:9000", "s3://team/a"
    with closing(opened(settings, inside)) as store:
        add_job(store)
    with closing(opened(settings, outside)) as store:
        assert store.data == ObjectPath(Bucket.parse(outside), store.id)
        assert place_of(store) == [inside]
        with store.read() as tx:
            store.check_place(tx)
    for other in ("s3://team/b", settings.home / "a", settings.home):
        with pytest.raises(SettingsError, match="files of this store lie in s3://team/a"):
            opened(settings, other)


def test_places_are_one_however_they_are_written(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("files", "~/files", str(tmp_path / "files")):
        assert data.normal(settings.home, given) == str(tmp_path / "files")
    assert data.normal(settings.home, None) is None
    assert data.normal(tmp_path / "files", "files") is None


@BOTH
def test_an_uploaded_file_settles_the_place_as_a_job_does(settings: Settings, tmp_path: Path) -> None:
    upload = {"id": "file-1", "project": "p", "purpose": "batch", "filename": "a", "bytes": 1, "num_lines": 1,
              "digest": "", "path": "uploads/a", "created_at": 0.0}  # fmt: skip
    with closing(Store.open(settings)) as store, store.write() as tx:
        tx.execute(insert(schema.file).values(**upload))
    with pytest.raises(SettingsError, match=f"lie in {settings.home}, not in {tmp_path / 'one'}"):
        opened(settings, tmp_path / "one")


@BOTH
def test_a_place_that_another_process_chose_meanwhile_is_noticed(settings: Settings, tmp_path: Path) -> None:
    with closing(Store.open(settings)) as store:
        opened(settings, tmp_path / "one").close()
        with pytest.raises(StoreError, match="run the command again"), store.read() as tx:
            store.check_place(tx)


def test_a_place_that_cannot_be_made_is_named_and_not_noted(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be used"):
        opened(settings, tmp_path / "file" / "place")
    with closing(Store.open(settings)) as store:
        assert place_of(store) == []


def test_a_place_that_is_named_already_is_not_written_again(settings: Settings, tmp_path: Path) -> None:
    opened(settings, tmp_path / "one").close()
    looking = sqlite3.connect(settings.home / "conserve.db")
    before = looking.execute("pragma data_version").fetchall()
    opened(settings, tmp_path / "one").close()
    assert looking.execute("pragma data_version").fetchall() == before
    looking.close()


def test_files_of_a_store_that_has_jobs_do_not_move(settings: Settings) -> None:
    store = Store.open(settings)
    add_job(store)
    store.close()
    with pytest.raises(SettingsError, match="correct CONSERVE_DATA"):
        Store.open(load({"home": settings.home, "data": "s3://team/a"}, environ={}))
