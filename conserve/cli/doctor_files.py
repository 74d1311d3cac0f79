"""Findings on the place of the store's files, where that is not its home."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from conserve.cli.doctor_finding import Finding
from conserve.errors import StoreError
from conserve.installation import install_line

if TYPE_CHECKING:
    from conserve.store.database.store import Store
    from conserve.store.files.objects import ObjectPath

SLOW_S = 5.0  # of three requests
EXTRA = "objects"


def files(store: "Store") -> Iterator[Finding]:
    """Try the folder or the bucket with the store's files; nothing where these lie in the home."""
    from conserve.store.files.bucket import CREDENTIALS
    from conserve.store.files.objects import ObjectPath
    from conserve.store.files.probe import probe

    if store.data == store.home:
        return
    fix = "make it writable, or mount it"
    if isinstance(store.data, ObjectPath):
        keys = CREDENTIALS[store.data.bucket.scheme]
        fix = f"check the network, the name of the bucket, and that its credentials may write and delete: {keys}"
    try:
        took_s = probe(store.data)
    except (StoreError, OSError) as error:
        cause = str(error).removesuffix(", see: conserve doctor")
        yield Finding("files", cause, ok=False, fix=fix)
        return
    value = f"{store.data}: a file was written, read and deleted in {1e3 * took_s:,.0f} ms"
    slow = "use a bucket in this region: each shard waits for it"
    yield Finding.judged("files", value, slow, ok=took_s < SLOW_S)
    if isinstance(store.data, ObjectPath):
        yield from packages(store.data)


def packages(data: "ObjectPath") -> Iterator[Finding]:
    """Packages that a bucket needs."""
    from conserve.store.files.multipart import can_list

    if find_spec("fsspec") is None:
        yield Finding("files", "SQL over a bucket needs fsspec", ok=False, fix=install_line(EXTRA))
    if data.bucket.scheme == "s3" and not can_list():
        value = "unfinished uploads of killed processes stay in the bucket, since boto3 is not installed"
        rule = "or give the bucket a lifecycle rule that ends unfinished uploads"
        yield Finding("files", value, ok=False, fix=f"{install_line(EXTRA)}, {rule}")
