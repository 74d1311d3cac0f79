"""Findings on the place of the store's files, where that is not its home, and on the folders of jobs."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.cli import output
from conserve.cli.doctor_finding import Finding
from conserve.errors import SEE_DOCTOR, StoreError
from conserve.installation import install_line
from conserve.store.files.marks import MARK

if TYPE_CHECKING:
    from conserve.store.database.store import Store
    from conserve.store.files.objects import ObjectPath

SLOW_S = 5.0  # of three requests
EXTRA = "objects"
MOST_NAMED = 3


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
        cause = error.without(SEE_DOCTOR) if isinstance(error, StoreError) else str(error)
        yield Finding("files", cause, ok=False, fix=fix)
        return
    value = f"{store.data}: a file was written, read and deleted in {1e3 * took_s:,.0f} ms"
    slow = "use a bucket in this region: each shard waits for it"
    yield Finding.judged("files", value, slow, ok=took_s < SLOW_S)
    if isinstance(store.data, ObjectPath):
        yield from packages(store.data)


def folders(store: "Store") -> Iterator[Finding]:
    """Name the jobs whose folders this user may not write, as after a submit as root; nothing if there is none."""
    from conserve.store.books import catalog
    from conserve.store.files import layout, os_errors

    if not isinstance(store.data, Path):
        return
    with store.read() as tx:
        ids = catalog.ids(tx)
    closed = [job_id for job_id in ids if not is_open(layout.job_folder(store.data, job_id))]
    if not closed:
        return
    few = len(closed) <= MOST_NAMED
    named = (
        ", ".join(closed)
        if few
        else f"{', '.join(closed[:MOST_NAMED])} and {len(closed) - MOST_NAMED:,} more"
    )
    jobs = output.count(len(closed), "folder of a job", "folders of jobs")
    paths = (
        [layout.job_folder(store.data, job_id) for job_id in closed]
        if few
        else [layout.jobs_folder(store.data)]
    )
    value = f"{jobs} cannot be written by this user: {named}; results stay in the database"
    yield Finding("jobs", value, ok=False, fix=f"run: {os_errors.chown(*paths)}")


def is_open(folder: Path) -> bool:
    """True unless this user may not write a file or a folder that is right in a job's folder, or that itself."""
    try:
        paths = [folder, *folder.iterdir()]
    except FileNotFoundError:  # `conserve check` tells of it
        return True
    except OSError:
        return False
    return all(os.access(path, os.W_OK) for path in paths if path.is_dir() or path.name == MARK)


def packages(data: "ObjectPath") -> Iterator[Finding]:
    """Packages that a bucket needs."""
    from conserve.store.files.multipart import can_list

    if find_spec("fsspec") is None:
        yield Finding("files", "SQL over a bucket needs fsspec", ok=False, fix=install_line(EXTRA))
    if data.bucket.scheme == "s3" and not can_list():
        value = "unfinished uploads of killed processes stay in the bucket, since boto3 is not installed"
        rule = "or give the bucket a lifecycle rule that ends unfinished uploads"
        yield Finding("files", value, ok=False, fix=f"{install_line(EXTRA)}, {rule}")
