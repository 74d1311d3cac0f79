"""Folders of jobs: each is built under a name of its own, appears whole under the job's id, and goes as a whole."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from conserve.errors import StoreUnreachable
from conserve.store.files.layout import JOBS, job_folder
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, ListedObject, ObjectPath
from conserve.store.files.os_errors import explained
from conserve.store.files.place import place_of


@contextmanager
def new(local: Path, store_id: str) -> Iterator[Path]:
    """Yield a folder to build a job in, held by this process; it is deleted unless `adopt` renamed it."""
    folder = local / JOBS / f".new-{uuid.uuid4().hex}"
    with ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        with explained(local):
            place_of(folder.parent).make_with_parents()
            folder.mkdir()
            held.enter_context(place_of(folder).held(Mark(store_id=store_id), alone=True))
        yield folder


def adopt(folder: Path, data: FilePath, job_id: str) -> None:
    """Rename a finished folder to the job's own, durably; for a bucket, upload it."""
    with explained(data):
        place_of(job_folder(data, job_id)).adopt(folder)


def register(folder: FilePath, store_id: str, record: Mapping[str, Any]) -> None:
    """Mark a folder as named by the store's database; a full disk, or a bucket out of reach, is no error."""
    with suppress(OSError, StoreUnreachable):
        place_of(folder).set_mark(Mark(store_id=store_id, registered=True, record=record))


def discard(data: FilePath, job_id: str) -> None:
    """Remove the folder of a job that the database does not name."""
    with suppress(StoreUnreachable):  # then the sweep takes it
        place_of(job_folder(data, job_id)).remove_tree()


def objects(data: ObjectPath) -> Iterator[tuple[str, str, ListedObject]]:
    """Yield the objects of jobs by one listing, each with the job's id and its part of the job's folder.

    Objects right below jobs/ are of other programs, as `_SUCCESS` of Spark and `<name>_$folder$` of Hadoop.
    """
    for entry in (data / JOBS).entries():
        parts = entry.path.relative_to(data).parts
        if len(parts) > 2:
            yield parts[1], parts[2], entry
