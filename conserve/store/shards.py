"""Shards: immutable Parquet files that finished rows move to, and how failed rows are taken out again."""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import ColumnElement, delete, insert, select, update

from conserve.errors import JobRefused
from conserve.store import catalog, home, queue, schema
from conserve.store import journal as journalled
from conserve.store.results import decode, to_arrow
from conserve.store.states import JobState
from conserve.store.store import Store

job, request, journal, shard = schema.job, schema.request, schema.journal, schema.shard

SHARD_ROWS = 16_384
SHARD_BYTES = 64 << 20  # of journal payloads, whichever comes first
STALE_AFTER_S = 3600.0


def compact(store: Store, job_id: str, *, now: float, at_least: int = 1) -> int:
    """Move the job's journalled results into shards; returns how many rows moved.

    The file is written under a temporary name, flushed and renamed; then one transaction registers it and
    deletes the journal rows it holds. A crash before that transaction leaves a file that nobody reads, a crash
    after it leaves nothing to do, so that each result exists exactly once at every instant. Where two
    processes compact the same rows, the second one finds them gone and throws its file away.
    """
    moved = 0
    for failed in (False, True):
        while rows := oldest(store, job_id, failed=failed, at_least=at_least):
            if misfits := [] if failed else journalled.misfits(rows):
                with store.write() as tx:
                    journalled.fail_misfits(tx, job_id, misfits)
                continue
            if not write_shard(store, job_id, rows, failed=failed, now=now):
                break
            moved += len(rows)
    return moved


def oldest(store: Store, job_id: str, *, failed: bool, at_least: int) -> Sequence[Any]:
    """The next journal rows for a shard, or none if they are fewer than `at_least` and no shard full."""
    rows: list[Any] = []
    size = 0
    with store.read() as tx:
        found = tx.execute(
            select(journal.c.position, journal.c.payload)
            .where(journal.c.job_id == job_id, journal.c.failed == failed)
            .order_by(journal.c.position)
            .limit(SHARD_ROWS)
        )
        for row in found:
            rows.append(row)
            size += len(row.payload)
            if size >= SHARD_BYTES:
                break
        found.close()
    return rows if len(rows) >= at_least or size >= SHARD_BYTES else []


def write_shard(store: Store, job_id: str, rows: Sequence[Any], *, failed: bool, now: float) -> bool:
    """Make one shard of these journal rows; False if somebody else has moved some of them meanwhile."""
    positions = [row.position for row in rows]
    folder = home.job_folder(store.home, job_id) / home.RESULTS
    path = folder / f"{positions[0]:012}-{uuid.uuid4().hex[:8]}.parquet"
    scratch = path.with_suffix(".tmp")
    with home.explained(store.home):
        folder.mkdir(exist_ok=True)
        try:
            results = [decode(row.payload) for row in rows]
            table = to_arrow([job_id] * len(rows), positions, results)
            pq.write_table(table, scratch, compression="zstd")
            home.write_durably(path, scratch)
        finally:
            scratch.unlink(missing_ok=True)
    registered = register(store, job_id, path, rows, failed=failed, now=now)
    if not registered:
        path.unlink(missing_ok=True)
    return registered


class _SomeoneElseMovedThem(Exception):
    """Rolls the registering transaction back."""


def register(store: Store, job_id: str, path: Path, rows: Sequence[Any], *, failed: bool, now: float) -> bool:
    """Swap journal rows for the shard that holds them, or change nothing and say False.

    That is said where rows have been moved meanwhile, where `retry` has had failed ones done again, and where
    this process slept for so long that another one has swept the file up.
    """
    try:
        with store.write() as tx:
            gone = sum(
                tx.execute(delete(journal).where(*chunk)).rowcount for chunk in as_read(job_id, rows, failed)
            )
            if gone != len(rows) or not path.exists():
                raise _SomeoneElseMovedThem
            tx.execute(
                insert(shard).values(
                    job_id=job_id,
                    file=str(path.relative_to(store.home)),
                    failed=failed,
                    num_rows=len(rows),
                    created_at=now,
                )
            )
    except _SomeoneElseMovedThem:
        return False
    return True


def as_read(job_id: str, rows: Sequence[Any], failed: bool) -> Iterator[list[ColumnElement[bool]]]:
    """Conditions for these journal rows as they were read. Only failed ones ever change, by `retry`."""
    for chunk in queue.chunks(rows):
        found = [journal.c.job_id == job_id, journal.c.position.in_([row.position for row in chunk])]
        yield [*found, journal.c.payload.in_([row.payload for row in chunk])] if failed else found


def compact_finished(store: Store, *, now: float) -> None:
    """Compact jobs that ended before their last results reached a shard."""
    ended = [state.value for state in JobState if state.final]
    with store.read() as tx:
        left = tx.scalars(
            select(journal.c.job_id)
            .distinct()
            .join(job, job.c.id == journal.c.job_id)
            .where(job.c.state.in_(ended))
        ).all()
    for job_id in left:
        compact(store, job_id, now=now)


def sweep(store: Store, *, now: float) -> int:
    """Delete what a crash left behind: shards and job folders that no transaction ever registered.

    Young ones stay, since some process may be about to register them; what is registered meanwhile waits for
    the end of this transaction, and finds that it is gone. Returns how many went.
    """
    with store.write() as tx:
        shards = {store.home / file for file in tx.scalars(select(shard.c.file))}
        folders = {home.job_folder(store.home, job_id) for job_id in catalog.ids(tx)}
        jobs = home.jobs_folder(store.home)
        orphans = [path for path in jobs.glob("*") if path not in folders]
        orphans += [
            path for folder in folders for path in (folder / home.RESULTS).glob("*") if path not in shards
        ]
        stale = [path for path in orphans if modified_at(path) < now - STALE_AFTER_S]
        for path in stale:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return len(stale)


def modified_at(path: Path) -> float:
    """When the file changed last, or any in the folder: a submit that is long at it writes to what is there.

    Now or later if it is gone already.
    """
    try:
        return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return float("inf")


def retry_failed(store: Store, job_id: str, *, now: float) -> int:
    """Put the failed rows of a job back into its queue, as if never tried; returns how many."""
    with store.write() as tx:
        current = catalog.get(tx, job_id)
        if current.state is JobState.CANCELLED:
            raise JobRefused(f"job {current.id} was cancelled; submit it again to run it")
        misfits = journalled.misfits(journalled.answers(tx, current.id))
        journalled.fail_misfits(tx, current.id, misfits)
        in_journal = journal.c.job_id == current.id, journal.c.failed == True  # noqa: E712
        in_shards = shard.c.job_id == current.id, shard.c.failed == True  # noqa: E712
        positions = list(tx.scalars(select(journal.c.position).where(*in_journal)))
        files = [store.home / file for file in tx.scalars(select(shard.c.file).where(*in_shards))]
        for file in files:
            positions += pq.read_table(file, columns=["position"])["position"].to_pylist()
        if not positions:
            return 0
        tx.execute(delete(journal).where(*in_journal))
        tx.execute(delete(shard).where(*in_shards))
        tx.execute(
            insert(request), [new_request(current.id, position, now) for position in sorted(positions)]
        )
        tx.execute(
            update(job)
            .where(job.c.id == current.id)
            .values(
                failed=job.c.failed - len(positions),
                finished_at=None,
                error=None,
                state=JobState.PAUSED.value if current.state is JobState.PAUSED else JobState.QUEUED.value,
            )
        )
    for file in files:
        file.unlink(missing_ok=True)
    return len(positions)


def new_request(job_id: str, position: int, now: float) -> dict[str, Any]:
    """A request row that waits for its first lease, from now on."""
    return {"job_id": job_id, "position": position, "epoch": None, "attempts": 0, "available_at": now}
