"""URLs of buckets: what they name, and that none carries credentials."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from sqlalchemy import insert

from conserve.config import Settings, load
from conserve.errors import SettingsError, StoreError, StoreUnreachable
from conserve.store.database import data, schema
from conserve.store.database.store import Store
from conserve.store.files.bucket import CREDENTIALS, Bucket, connected, reached, reason
from conserve.store.files.objects import ObjectPath, object_at
from tests.store_rows import add_job, select

SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://team",
            "s3://team/a/b",
            "gs://team/a",
            "az://team/a",
            "s3://team/a?endpoint=http://host:9000",
        ),
        *("s3://team/a?endpoint=https://host&region=eu-1", "s3://team/a?region=a%26b"),
    ],
)
def test_a_url_is_kept_as_it_was_given(url: str) -> None:
    assert Bucket.parse(url).url == url


def test_a_bucket_has_the_parts_of_its_url() -> None:
    found = Bucket.parse("s3://team/a/b/?region=eu-1&endpoint=http://host:9000")
    parts = {"scheme": "s3", "root": "team/a/b", "endpoint": "http://host:9000", "region": "eu-1"}
    assert found == Bucket(**parts)
    assert found.name == "team"
    plain = Bucket(scheme="gs", root="team")
    assert Bucket.parse("gs://team?endpoint=&region=") == Bucket.parse("gs://team/") == plain
    assert (plain.name, plain.endpoint, plain.region) == ("team", None, None)


def test_two_urls_are_one_place_whatever_address_leads_there() -> None:
    inside = Bucket.parse("s3://team/a?endpoint=http://minio:9000&region=eu-1")
    assert inside.is_at(Bucket.parse("s3://team/a"))
    assert not inside.is_at(Bucket.parse("s3://team/b"))
    assert not inside.is_at(Bucket.parse("gs://team/a"))


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAKEY:{SECRET}@team/a",
        f"s3://team/a?access_key=AKIAKEY&secret_key={SECRET}",
        f"s3://team/a?endpoint=http://AKIAKEY:{SECRET}@host:9000",
        f"s3://team/a?X-Amz-Signature={SECRET}&zone=x",
        f"az://team/a?sig={SECRET}",
        f"s3://team/a?endpoint=http://AKIAKEY@host:9000&region={SECRET}",
        f"s3://team/a?endpoint=http://:{SECRET}%40host",
        *(
            f"gs://team/a?{name}={SECRET}"
            for name in ("Password", "access_key", "client-secret", "TOKEN", "sig")
        ),
        f"s3://AKIAKEY@team/{SECRET}",
        f"s3://AKIAKEY:{SECRET}",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str, settings: Settings) -> None:
    with pytest.raises(SettingsError, match="credentials") as refused:
        Store.open(load({"home": settings.home, "data": url}, environ={}))
    assert "AKIAKEY" not in str(refused.value)
    assert SECRET not in str(refused.value)
    assert str(refused.value).endswith(CREDENTIALS[url[:2]]), "where they come from instead"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://team", "files of a store lie in a folder, or in s3://, gs:// or az://BUCKET/PREFIX"),
        ("team/a", "files of a store lie in a folder"),
        *[
            (url, "a s3:// URL names a bucket and a prefix of letters")
            for url in ("s3://", "s3:///", "s3://team/a*b", "s3://team/a b", "s3://_team", "s3://team//a")
        ],
        ("s3://team/a?proxy=", "a s3:// URL takes endpoint and region, not 'proxy'"),
        ("s3://team/a?zone=x&proxy=y", "a s3:// URL takes endpoint and region, not 'proxy'"),
        (f"s3://team/a?{'x' * 50}=y", f"not '{'x' * 40}'"),
        ("gs://team/a?endpoint=host:9000", "the endpoint of a gs:// URL begins with http:// or https://"),
        ("gs://team/a?endpoint=ftp://host", "the endpoint of a gs:// URL begins with http:// or https://"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused(url: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Bucket.parse(url)
    assert said in str(refused.value)


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
    slow = "AWS Error SLOW_DOWN (HTTP status 503) during HeadObject operation: reduce your rate"
    assert reason(OSError(slow)) == "slow down, HTTP 503"
    assert reason(OSError(28, "No space left on device")) == "No space left on device"
    assert reason(TimeoutError()) == "TimeoutError"


def test_what_a_service_refuses_is_told_from_what_is_not_there() -> None:
    bucket = Bucket.parse("s3://team/a?endpoint=http://host")
    with pytest.raises(FileNotFoundError), reached(bucket):
        raise FileNotFoundError(2, "No such file or directory")
    with pytest.raises(StoreUnreachable) as said, reached(bucket):
        raise PermissionError(13, "Permission denied")
    assert str(said.value).startswith("s3://team/a cannot be reached (Permission denied); nothing that")
    assert said.value.__cause__ is None


def options(bucket: Bucket) -> Any:
    """Options of the connection to a bucket."""
    connection = bucket.filesystem()
    assert connection is bucket.filesystem(), "one for all of a process"
    return connection.__reduce__()[1][0]


@pytest.mark.parametrize(
    ("url", "environ", "found"),
    [
        ("region=eu-1", {}, ("eu-1", "", "https")),
        ("region=eu-1&endpoint=http://host:9000", {"AWS_REGION": "us-9"}, ("eu-1", "host:9000", "http")),
        ("endpoint=http://host:9000", {}, ("us-east-1", "host:9000", "http")),
        ("endpoint=https://host", {"AWS_REGION": "us-9"}, ("us-9", "host", "https")),
        ("endpoint=https://host", {"AWS_DEFAULT_REGION": "us-8"}, ("us-8", "host", "https")),
        ("region=r", {"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_ENDPOINT_URL": "http://any"}, ("r", "s3", "http")),
        ("region=eu-1", {"AWS_ENDPOINT_URL": "http://any:1"}, ("eu-1", "any:1", "http")),
        ("region=eu-1&endpoint=http://url", {"AWS_ENDPOINT_URL_S3": "http://s3"}, ("eu-1", "url", "http")),
    ],
)  # fmt: skip
def test_the_url_goes_before_the_environment_and_that_before_the_service_of_amazon(
    monkeypatch: pytest.MonkeyPatch, url: str, environ: dict[str, str], found: tuple[str, ...]
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    connected.cache_clear()
    opened = options(Bucket.parse(f"s3://team?{url}"))
    assert tuple(opened[name] for name in ("region", "endpoint_override", "scheme")) == found
    assert (opened["connect_timeout"], opened["request_timeout"]) == (3.0, 10.0), "before a lease ends"
    assert opened["allow_delayed_open"] is True


def test_without_any_region_the_bucket_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(fs, "resolve_s3_region", {"team": "ap-2"}.__getitem__)
    assert options(Bucket.parse("s3://team/a/b"))["region"] == "ap-2"


def test_google_and_azure_are_reached_by_their_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    connected.cache_clear()
    azure = options(Bucket.parse("az://team"))
    assert (azure["account_name"], azure["account_key"]) == ("account", "a2V5")
    google = options(Bucket.parse("gs://team?endpoint=http://host:1"))
    assert (google["endpoint_override"], google["scheme"]) == ("host:1", "http")
    assert options(Bucket.parse("gs://team"))["scheme"] == "https"


def test_a_bucket_to_which_no_connection_is_possible_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(5, "no such account")

    monkeypatch.setattr(fs, "AzureFileSystem", refuse)
    connected.cache_clear()
    with pytest.raises(StoreUnreachable, match=r"az://team cannot be reached \(no such account\)"):
        Bucket.parse("az://team").filesystem()


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
    """Settings of the same store with a place of its files."""
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
