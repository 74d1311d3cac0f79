"""The sweep moves files that crashes left behind to the trash.

It takes provable orphans of this store only: the folder carries the store's id, no living process of this machine
holds its mark, nothing was written into it for an hour, and the database does not name it. The last is seen under
a lock that registering takes too. A folder that was registered once and is no longer known stays, since the
database may be an older copy.
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sqlalchemy import select

from conserve.store.books import catalog
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import home, marks, trash

shard = schema.shard

STALE_AFTER_S = 3600.0


def sweep(store: Store, *, now: float) -> int:
    """Move this store's orphans to the trash, which loses entries older than a week; returns the number moved.

    Orphans that the disk refuses to move wait for the next sweep.
    """
    swept = 0
    with suppress(OSError):
        swept += sweep_folders(store, now=now)
        swept += sweep_shards(store, now=now)
        trash.empty(store.home, now=now)
    return swept


def sweep_folders(store: Store, *, now: float) -> int:
    """Move the folders of submits that never came to their end; returns how many."""
    with store.read() as tx:
        known = set(catalog.ids(tx))
    unknown = [path for path in home.jobs_folder(store.home).glob("*") if path.name not in known]
    return sum(is_swept(store, path, now) for path in unknown if is_stale(path, now))


def is_swept(store: Store, folder: Path, now: float) -> bool:
    """Move a job's folder if it is an orphan of this store; returns True if it was."""
    with marks.seized(folder, store.id) as mark:
        if mark is None or mark.registered:
            return False
        with store.write() as tx:
            catalog.lock_ids(tx)
            if catalog.taken(tx, folder.name):
                return False
            trash.throw_away(store.home, folder, now=now)
    return True


def sweep_shards(store: Store, *, now: float) -> int:
    """Move files of results that no transaction registered; returns how many."""
    with store.read() as tx:
        registered = set(tx.scalars(select(shard.c.file)))
        known = catalog.ids(tx)
    swept = 0
    for job_id in known:
        left = unregistered(store.home, job_id, registered)
        if stale := [path for path in left if is_stale(path, now)]:
            swept += sweep_results(store, job_id, stale, now)
    return swept


def unregistered(where: Path, job_id: str, registered: Collection[str]) -> list[Path]:
    """Files among a job's results that are not registered."""
    results = home.job_folder(where, job_id) / home.RESULTS
    return [path for path in results.glob("*") if str(path.relative_to(where)) not in registered]


def sweep_results(store: Store, job_id: str, stale: Collection[Path], now: float) -> int:
    """Move the stale files of a job that are still not registered; returns how many."""
    with marks.seized(home.job_folder(store.home, job_id), store.id) as mark, store.write() as tx:
        if mark is None:
            return 0
        catalog.lock_job(tx, job_id)
        registered = set(tx.scalars(select(shard.c.file).where(shard.c.job_id == job_id)))
        orphans = [path for path in stale if str(path.relative_to(store.home)) not in registered]
        for path in orphans:
            trash.throw_away(store.home, path, now=now)
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
