"""The sweep moves files that crashes left behind to the trash.

It takes provable orphans of this store only: the folder carries the store's id, no living process of this machine
holds its mark, nothing was written into it for an hour, and the database does not name it. The last is seen under
a lock that registering takes too. A folder that was registered once and is no longer known stays, since the
database may be an older copy.

In a bucket nothing is locked. Objects are taken a day after their last change, and a writer that takes longer than
half of that to name its objects begins again (`shards.NAMED_WITHIN_S`). A machine whose clock is ahead of the
bucket's takes none of them early.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import select

from conserve.errors import StoreUnreachable
from conserve.store.books import catalog, harvested, servers, uploads
from conserve.store.books.shards import NAMED_WITHIN_S
from conserve.store.books.uploads import DELIVERIES
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import job_folders, layout, marks, multipart, trash
from conserve.store.files.objects import FilePath, ListedObject, ObjectPath, below
from conserve.store.files.place import place_of

shard = schema.shard

log = logging.getLogger(__name__)
STALE_AFTER_S = 3600.0
OBJECTS_STALE_AFTER_S = 2 * NAMED_WITHIN_S
BETWEEN_S = 3600.0  # two sweeps of a bucket by one machine: each lists all of its objects
SWEPT = "swept"  # file of the home whose time is that of the last sweep of the bucket
PARTS = (layout.RESULTS, DELIVERIES)  # of a job's folder, in which the database names each file


def sweep(store: Store, *, now: float) -> int:
    """Move this store's orphans to the trash, which loses entries older than a week; returns the number moved.

    Old notes on servers and on the harvest are dropped, too. What the disk refuses to move, or a bucket out of
    reach, waits alone for the next sweep.
    """
    with store.write() as tx:
        harvested.forget_old(tx, now=now)
        servers.forget_old(tx, now=now)
    swept = sweep_folders(store, now=now)
    if isinstance(store.data, Path):
        swept += sweep_shards(store, store.data, now=now)
    with staying(trash.folder(store.local)):
        trash.empty(store.local, now=now)
    delete_stale((store.home / layout.SENDING).glob("*"), now=now)
    if isinstance(uploaded := uploads.folder(store), Path):
        delete_stale(uploaded.glob("*.tmp"), now=now)
    if isinstance(store.data, ObjectPath) and claim_turn(store.home, now=now):
        with staying(store.data):
            swept += sweep_objects(store, store.data, now=now)
    return swept


@contextmanager
def staying(path: FilePath) -> Iterator[None]:
    """Leave a path for the next sweep if the disk or the bucket refuses to move it."""
    try:
        yield
    except (OSError, StoreUnreachable) as error:
        log.warning("%s stays for now: %s", path, error)


def sweep_folders(store: Store, *, now: float) -> int:
    """Move the folders of submits that never came to their end; returns how many."""
    with store.read() as tx:
        known = set(catalog.ids(tx))
    folders = (store.local / layout.JOBS).glob("*")
    swept = 0
    for path in [path for path in folders if path.name not in known]:
        with staying(path):
            if is_stale(path, now) and sweep_folder(store, path, now):
                swept += 1
    return swept


def sweep_folder(store: Store, folder: Path, now: float) -> bool:
    """Move a job's folder if it is an orphan of this store; returns True if it was.

    It is renamed under the lock, and moved behind: the trash may be on another disk, and copies take long.
    """
    aside = folder.with_name(f".swept-{folder.name}")
    with place_of(folder).seized(store.id) as mark:
        if mark is None or mark.registered:
            return False
        with store.write() as tx:
            catalog.lock_ids(tx)
            if catalog.taken(tx, folder.name):
                return False
            folder.rename(aside)
        try:
            trash.throw_away(store.local, aside, now=now, lay_at=folder)
        except OSError:
            aside.rename(folder)
            raise
    return True


def sweep_shards(store: Store, data: Path, *, now: float) -> int:
    """Move files of results that no transaction registered; returns how many."""
    with store.read() as tx:
        registered = set(tx.scalars(select(shard.c.file)))
        known = catalog.ids(tx)
    swept = 0
    for job_id in known:
        with staying(layout.job_folder(data, job_id)):
            left = unregistered(data, job_id, registered)
            if stale := [path for path in left if is_stale(path, now)]:
                swept += sweep_results(store, job_id, stale, now)
    return swept


def unregistered(data: Path, job_id: str, registered: Collection[str]) -> list[Path]:
    """Files among a job's results that are not registered."""
    results = data / layout.JOBS / job_id / layout.RESULTS
    return [path for path in results.glob("*") if below(path, data) not in registered]


def sweep_results(store: Store, job_id: str, stale: Collection[Path], now: float) -> int:
    """Move the stale files of a job that are still not registered; returns how many."""
    with place_of(layout.job_folder(store.data, job_id)).seized(store.id) as mark, store.write() as tx:
        if mark is None:
            return 0
        catalog.lock_job(tx, job_id)
        registered = set(tx.scalars(select(shard.c.file).where(shard.c.job_id == job_id)))
        orphans = [path for path in stale if below(path, store.data) not in registered]
        for path in orphans:
            trash.throw_away(store.data, path, now=now)
    return len(orphans)


def is_stale(path: Path, now: float) -> bool:
    """True if nothing was written to the file or folder for an hour."""
    return modified_at(path) < now - STALE_AFTER_S


def modified_at(path: Path) -> float:
    """Last change of a file, or of any file in a folder, in seconds since the epoch; infinity if it is gone.

    A folder's own time is not enough, since a long submit writes to files that are there already.
    """
    try:
        return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return float("inf")


def delete_stale(paths: Iterable[Path], *, now: float) -> None:
    """Delete files that a process was to upload, or to take in, and left."""
    for path in paths:
        with staying(path):
            if is_stale(path, now):
                path.unlink(missing_ok=True)


def claim_turn(where: Path, *, now: float) -> bool:
    """Note that this machine sweeps the bucket now; returns False if it did within the last hour."""
    note = where / SWEPT
    with suppress(OSError):
        if abs(now - note.stat().st_mtime) < BETWEEN_S:
            return False
    with suppress(OSError):
        note.touch()
    return True


def sweep_objects(store: Store, data: ObjectPath, *, now: float) -> int:
    """Move orphans among the objects to the trash, end unfinished uploads; returns the number of orphans.

    The listing is older than the database's names that it is compared with, and an object that is named later than
    a day after it was written does not occur. Ages are by the clock of the bucket, which dates its objects.
    """
    now -= place_of(data).ahead_s()
    by_job: dict[str, list[tuple[str, ListedObject]]] = defaultdict(list)
    for job_id, part, entry in job_folders.objects(data):
        by_job[job_id].append((part, entry))
    with store.read() as tx:
        named = {*tx.scalars(select(shard.c.file)), *tx.scalars(select(schema.file.c.path))}
        known = set(catalog.ids(tx))
    swept = 0
    for path in orphans(store, data, by_job, known, named, now):
        with staying(path):
            trash.throw_away(data, path, now=now)
            swept += 1
    trash.empty(data, now=now)
    multipart.abort_older(data, before=now - OBJECTS_STALE_AFTER_S)
    return swept


def orphans(
    store: Store,
    data: ObjectPath,
    by_job: Mapping[str, Sequence[tuple[str, ListedObject]]],
    known: Collection[str],
    named: Collection[str],
    now: float,
) -> Iterator[ObjectPath]:
    """Yield folders of submits that never ended, and shards that no transaction named, both a day old.

    A folder without a mark is what a removal left, or a shard that came after it.
    """
    long_ago = now - OBJECTS_STALE_AFTER_S
    for job_id, entries in by_job.items():
        if job_id in known:
            for part, entry in entries:
                unnamed = part in PARTS and below(entry.path, data) not in named
                if unnamed and entry.modified_at < long_ago:
                    yield entry.path
        elif max(entry.modified_at for _, entry in entries) < long_ago:
            folder = data / layout.JOBS / job_id
            marked = any(entry.path == folder / marks.MARK for _, entry in entries)
            mark = place_of(folder).mark() if marked else None
            if not marked or (mark is not None and mark.store_id == store.id and not mark.registered):
                yield folder
