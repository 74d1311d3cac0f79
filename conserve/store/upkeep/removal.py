"""Removal of jobs, and the disk space that the store takes.

First one transaction forgets a job, then its files are deleted. A crash between the two leaves files that no record
names, which the sweep takes, and never a record without its files.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, select, true

from conserve.errors import JobRefused, StoreError, StoreFull, StoreUnreachable
from conserve.store.books import catalog, leases
from conserve.store.books.mounted import require_folders
from conserve.store.books.states import REMOVABLE, stored
from conserve.store.database import schema
from conserve.store.database.connection import chunks
from conserve.store.database.store import Store
from conserve.store.database.wakeup import wake
from conserve.store.files import job_folders, layout, os_errors, trash
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, ObjectPath, P, below
from conserve.store.files.place import place_of

log = logging.getLogger(__name__)
job, request, journal, shard = schema.job, schema.request, schema.journal, schema.shard
lease, span = schema.lease, schema.span
ALL = (true(),)
"""Conditions of which each job meets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """A job and the bytes of its files."""

    job_id: str
    state: str
    rows: int
    finished_at: float | None
    requests_bytes: int
    inputs_bytes: int
    results_bytes: int
    bytes: int

    @property
    def finished(self) -> bool:
        """True if the job is completed or cancelled."""
        return self.state in REMOVABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that a home takes on disk."""

    jobs: list[DiskUsage]
    database_bytes: int
    trash_bytes: int
    unknown_bytes: int
    """Bytes of job folders that this database does not name: another database's, or of a submit under way."""
    total_bytes: int


def room(store: Store) -> Room:
    """Measure the files of a home."""
    usages = usage(store)
    known = {each.job_id for each in usages}
    folders = layout.listed(layout.jobs_folder(store.data))
    return Room(
        jobs=usages,
        database_bytes=sum(place_of(path).length() for path in database_files(store)),
        trash_bytes=sum(map(trash_bytes, {store.data, store.local})),
        unknown_bytes=sum(place_of(path).size() for path in folders if path.name not in known),
        total_bytes=total_bytes(store),
    )


def total_bytes(store: Store) -> int:
    """Bytes of the home and of the place of the files: each file once, also in folders that are links."""
    places = {store.home, store.data}
    places |= {part for each in places for part in (layout.jobs_folder(each), trash.folder(each))}
    folders = {path.resolve() for path in places if isinstance(path, Path)}
    apart = [path for path in folders if folders.isdisjoint(path.parents)]
    objects = place_of(store.data).size() if store.in_bucket else 0
    return objects + sum(place_of(path).size() for path in apart)


def database_files(store: Store) -> list[Path]:
    """Files of an SQLite database; none for other databases."""
    path = store.engine.url.database
    if store.engine.dialect.name != "sqlite" or not path:
        return []
    return [Path(path + suffix) for suffix in ("", "-wal", "-shm")]


def trash_bytes(where: FilePath) -> int:
    """Bytes in the trash."""
    return sum(place_of(path).size() for path in trash.contents(where))


def usage(store: Store, wanted: Iterable[ColumnElement[bool]] = ALL) -> list[DiskUsage]:
    """Disk usage of the jobs that meet one of these conditions, oldest first, from file sizes alone."""
    columns = job.c.seq, job.c.id, job.c.state, job.c.num_rows, job.c.finished_at
    with store.read() as tx:
        found = [row for one in wanted for row in tx.execute(select(*columns).where(one))]
    rows = sorted(found, key=lambda row: row.seq)
    listed = object_bytes(store.data) if rows and isinstance(store.data, ObjectPath) else None
    sizes = [
        job_bytes(store.data, row.id) if listed is None else listed.get(row.id, JobBytes()) for row in rows
    ]
    return [
        DiskUsage(
            job_id=row.id,
            state=row.state,
            rows=row.num_rows,
            finished_at=row.finished_at,
            requests_bytes=size.requests,
            inputs_bytes=size.inputs,
            results_bytes=size.results,
            bytes=size.all,
        )
        for row, size in zip(rows, sizes, strict=True)
    ]


class JobBytes(NamedTuple):
    """Bytes of a job's files."""

    requests: int = 0
    inputs: int = 0
    results: int = 0
    all: int = 0


def job_bytes(data: FilePath, job_id: str) -> JobBytes:
    """Sizes of a job's files."""
    folder = layout.job_folder(data, job_id)
    return JobBytes(
        requests=place_of(layout.requests_file(data, job_id)).length(),
        inputs=place_of(layout.inputs_file(data, job_id)).length(),
        results=place_of(folder / layout.RESULTS).size(),
        all=place_of(folder).size(),
    )


def object_bytes(data: ObjectPath) -> dict[str, JobBytes]:
    """Sizes of all jobs' objects by one listing, since a request for each would take long."""
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for job_id, part, entry in job_folders.objects(data):
        parts[job_id][part] += entry.bytes
    return {
        job_id: JobBytes(
            requests=found[layout.REQUESTS],
            inputs=found[layout.INPUTS],
            results=found[layout.RESULTS],
            all=found.total(),
        )
        for job_id, found in parts.items()
    }


def remove(
    store: Store, job_id: str, *, now: float, force: bool = False, ended_by: float | None = None
) -> int | None:
    """Forget a job and delete its files; returns the bytes freed, or None if another process has removed the job.

    Raises `JobRefused` unless it is finished or `force` is given, and for one that ended after `ended_by`: it was
    retried, and has other answers than before. Raises `StoreForbidden` for a folder of another user, or
    `StoreError` where no job's folder is there: the files on a disk that is not mounted would stay.
    """
    folder = layout.job_folder(store.data, job_id)
    with ExitStack() as stack, store.write() as tx:
        catalog.lock_ids(tx)
        leases.lock_with_job(tx, job_id)
        if not catalog.taken(tx, job_id):
            return None
        record = catalog.record(tx, job_id)
        if record["state"] not in REMOVABLE and not force:
            raise JobRefused(
                f"job {job_id} is {record['state']} and not finished; add --force to remove it all the same"
            )
        if ended_by is not None and (record["finished_at"] or 0.0) > ended_by:
            raise JobRefused(
                f"job {job_id} was retried and has ended anew; to remove it, run: conserve rm {job_id}"
            )
        require_folders(tx, store.data)
        stack.enter_context(forsaken(store, folder, record))
        for table in (journal, request, span, lease, shard):
            tx.execute(delete(table).where(table.c.job_id == job_id))
        tx.execute(delete(job).where(job.c.id == job_id))
        wake(tx)
    # A process that is just writing results finds the job gone, and its file goes too.
    with place_of(folder).free():
        return delete_files(store.data, folder, now=now)


@contextmanager
def forsaken(store: Store, folder: FilePath, record: Mapping[str, Any]) -> Iterator[None]:
    """Mark a folder as one that no database names, so that the sweep takes what a crash leaves.

    The mark changes before the commit: a crash behind it would leave a folder that is never swept, and that
    `conserve check --repair` takes for a lost job. A crash before the commit leaves a job that is to be removed.
    An error undoes it if the job is there still. If not, only the commit's answer was lost: the removal goes on.
    """
    before = place_of(folder).mark() or Mark(store_id=store.id, registered=True, record=record)
    no_folder = suppress(FileNotFoundError, NotADirectoryError)
    with suppress(StoreFull), os_errors.explained(folder), os_errors.owned(folder), no_folder:
        place_of(folder).set_mark(Mark(store_id=store.id, registered=False, record=record))
    try:
        yield
    except BaseException as error:
        with suppress(OSError, StoreError):
            if is_there(store, folder.name):
                place_of(folder).set_mark(before)
            elif isinstance(error, StoreError):
                return
        raise


def is_there(store: Store, job_id: str) -> bool:
    """True if the database names a job, once a removal that another connection began has ended."""
    with store.write() as tx:
        catalog.lock_ids(tx)
        return catalog.taken(tx, job_id)


def refusal(job_id: str, state: str) -> str:
    """Sentence for a job that is not removed."""
    return f"job {job_id} is {state} and not finished; nothing was removed, add --force to remove it all the same"


def delete_files(where: P, folder: P, *, now: float) -> int:
    """Delete a job's folder, through the trash if possible, so that it goes as a whole; returns the bytes freed."""
    place = place_of(folder)
    used, thrown = place.size(), folder
    if place.in_bucket:
        with suppress(StoreUnreachable):  # the database forgot the job, so what is left is swept
            place.remove_tree()
            return used
        return 0
    with suppress(OSError):
        thrown = trash.throw_away(where, folder, now=now)
    place_of(thrown).remove_tree()
    if thrown is not folder:
        trashed = trash.folder(where)
        place_of(trashed / below(thrown, trashed).partition("/")[0]).remove_tree()
    if trash.is_left(thrown):
        log.warning(trash.stays(thrown))
    return used - place_of(thrown).size()


def ended_by(moment: float) -> Iterable[ColumnElement[bool]]:
    """Condition that finished jobs meet which ended by this moment."""
    return (and_(job.c.state.in_(stored(REMOVABLE)), func.coalesce(job.c.finished_at, 0.0) <= moment),)


def among(job_ids: Sequence[str]) -> Iterable[ColumnElement[bool]]:
    """Conditions of which the jobs with these ids meet one."""
    return (job.c.id.in_(some) for some in chunks(job_ids))
