"""URLs of buckets: what they name, and that none carries credentials."""

import pytest

from conserve.config import Settings, load
from conserve.errors import SettingsError
from conserve.store.database.store import Store
from conserve.store.files.bucket import Bucket, reason
from conserve.store.files.objects import ObjectPath, object_at
from tests.store_rows import add_job

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
    from pathlib import Path

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


def test_files_of_a_store_that_has_jobs_do_not_move(settings: Settings) -> None:
    store = Store.open(settings)
    add_job(store)
    store.close()
    with pytest.raises(SettingsError, match="correct CONSERVE_DATA"):
        Store.open(load({"home": settings.home, "data": "s3://team/a"}, environ={}))
