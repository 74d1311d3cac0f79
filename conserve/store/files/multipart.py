"""Unfinished uploads: parts of an object that a killed process left in S3, which keeps and charges them for good.

pyarrow cannot list them, so boto3 does where it is installed (the extra `objects`). A lifecycle rule of the bucket
serves as well. Google's and Azure's services drop unfinished uploads themselves, after a week.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from conserve.errors import SEE_DOCTOR, StoreUnreachable
from conserve.store.files.bucket import ATTEMPTS, CONNECT_S, REQUEST_S, Bucket, endpoint_of
from conserve.store.files.objects import ObjectPath


def can_list() -> bool:
    """True if boto3 is installed."""
    return find_spec("boto3") is not None


def abort_older(path: ObjectPath, *, before: float) -> int:
    """End the uploads below a path that began before this time (s since the epoch); returns how many."""
    if path.bucket.scheme != "s3" or not can_list():
        return 0
    prefix = f"{path.at.removeprefix(path.bucket.name).strip('/')}/"
    with answered(path.bucket):
        client, ended = client_of(path.bucket), 0
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=path.bucket.name, Prefix=prefix
        )
        for upload in (upload for page in pages for upload in page.get("Uploads", [])):
            if upload["Initiated"].timestamp() < before:
                client.abort_multipart_upload(
                    Bucket=path.bucket.name, Key=upload["Key"], UploadId=upload["UploadId"]
                )
                ended += 1
        return ended


def client_of(bucket: Bucket) -> Any:
    """Client of the service, by the same environment as pyarrow's."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=REQUEST_S,
        retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
        s3={"addressing_style": "path"} if endpoint_of(bucket) else None,
    )
    region = bucket.region or ("us-east-1" if endpoint_of(bucket) else None)
    return boto3.client("s3", endpoint_url=endpoint_of(bucket), region_name=region, config=config)


@contextmanager
def answered(bucket: Bucket) -> Iterator[None]:
    """Turn boto3's errors into `StoreUnreachable`, without their text."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        code = error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""
        said = code or type(error).__name__
        raise StoreUnreachable(
            f"unfinished uploads of {bucket.scheme}://{bucket.root} cannot be ended ({said})", step=SEE_DOCTOR
        ) from None
