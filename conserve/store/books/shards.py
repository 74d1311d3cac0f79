"""Shards: immutable Parquet files that finished rows move to, and from which failed rows are put back."""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from conserve.errors import JobRefused, StoreUnreachable
from conserve.store.books import catalog, events, places
from conserve.store.books import journal as journalled
from conserve.store.books.journal import Finished, Misfit, is_whole
from conserve.store.books.lateness import kept_deadline
from conserve.store.books.mounted import require_folders
from conserve.store.books.queue import AT_ONCE, waiting_row
from conserve.store.books.results import Result, decode, encode, from_arrow, to_arrow
from conserve.store.books.states import OPEN, JobState, stored
from conserve.store.books.too_long import fails_again, too_long
from conserve.store.books.unrendered import stays_failed, unrendered
from conserve.store.database import schema
from conserve.store.database.bulk import afresh, along_indexes, insert_rows, matching, read_rows
from conserve.store.database.connection import chunks
from conserve.store.database.store import Store
from conserve.store.database.wakeup import wake
from conserve.store.files import digests, layout, os_errors
from conserve.store.files.digests import Seal
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, below, source
from conserve.store.files.place import place_of, scratch_of

log = logging.getLogger(__name__)
job, request, journal, shard = schema.job, schema.request, schema.journal, schema.shard

SHARD_ROWS = 16_384
DAMAGED_ROW = "row %d of job %s is damaged in the journal; run: conserve check"
SHARD_BYTES = 64 << 20  # of journal payloads, whichever comes first
NAMED_WITHIN_S = 12 * 3600.0  # that an object without a record is kept at least; the sweep waits twice that


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A row of the table `shard`."""

    id: int  # 0 until it has a row
    job_id: str
    file: str  # relative to the place of the store's files
    failed: bool
    num_rows: int
    seal: Seal | None  # None for one of an earlier version


def files(tx: Connection, job_ids: Collection[str] | None = None) -> list[ShardFile]:
    """The shards of these jobs, or of all."""
    found = select(shard).order_by(shard.c.id)
    if job_ids is not None:
        found = found.where(shard.c.job_id.in_(job_ids))
    return [
        ShardFile(
            id=row.id,
            job_id=row.job_id,
            file=row.file,
            failed=row.failed,
            num_rows=row.num_rows,
            seal=Seal(bytes=row.bytes, digest=row.digest) if row.digest is not None else None,
        )
        for row in tx.execute(found)
    ]


def add(tx: Connection, file: ShardFile, *, now: float) -> int:
    """Name a file that has a seal in the table `shard`; returns its id."""
    assert file.seal is not None
    values = {"job_id": file.job_id, "file": file.file, "failed": file.failed, "num_rows": file.num_rows}
    seal = {"digest": file.seal.digest, "bytes": file.seal.bytes}
    added = insert(shard).values(**values, **seal, created_at=now).returning(shard.c.id)
    return int(tx.execute(added).scalar_one())


def compact(
    store: Store,
    job_id: str,
    *,
    now: float,
    positions: list[int] | None = None,
    most: int | None = None,
    wait: bool = True,
) -> int | None:
    """Move all of the job's journalled results into shards; returns how many rows, and adds their `positions`.

    With `most` it writes so many shards at most. None if another process is at it, unless the caller is to `wait`.

    The file is written under a temporary name, flushed and renamed, or uploaded. Then one transaction registers it
    and deletes the journal rows that it holds. A crash before that transaction leaves a file that no command reads;
    a crash after it leaves nothing to do. So each result exists exactly once at every instant. Of two processes
    that compact the same rows, the second finds them gone and deletes its file. Damaged rows stay where they are.
    """
    moved = 0
    with store.alone(f"compact {job_id}", wait=wait) as alone:
        if not alone:
            return None
        for _ in count() if most is None else range(most):
            if not (more := compact_oldest(store, job_id, now=now, at_least=1, positions=positions)):
                break
            moved += more
    return moved


def compact_full(store: Store, job_id: str, *, now: float, positions: list[int] | None = None) -> int | None:
    """Move results that fill a shard, if there are as many; None if another process is compacting the job.

    One shard a call, so that harvesters of one job share the work.
    """
    with store.alone(f"compact {job_id}") as alone:
        if not alone:
            return None
        return compact_oldest(store, job_id, now=now, at_least=SHARD_ROWS, positions=positions)


def compact_oldest(
    store: Store, job_id: str, *, now: float, at_least: int, positions: list[int] | None = None
) -> int:
    """Move the oldest journalled results into one shard, if they are enough; returns how many rows moved."""
    for failed in (False, True):
        while rows := oldest(store, job_id, failed=failed, at_least=at_least):
            wrong = [] if failed else [row for row in rows if row.result.failed]
            if misfits := [Misfit(row.position, row.payload, row.result) for row in wrong]:
                with store.write() as tx:
                    journalled.fail_misfits(tx, job_id, misfits)
                continue
            if write_shard(store, job_id, rows, failed=failed, now=now):
                if positions is not None:
                    positions += [row.position for row in rows]
                return len(rows)
            break
    return 0


class JournalRow(NamedTuple):
    """A row of the journal that is to move, as it was read."""

    position: int
    payload: bytes
    checksum: int | None
    result: Result


def oldest(store: Store, job_id: str, *, failed: bool, at_least: int) -> Sequence[JournalRow]:
    """The next journal rows for a shard; none if they are fewer than `at_least` and do not fill a shard."""
    rows: list[Any] = []
    size = 0
    with store.read() as tx:
        for row in by_position(tx, job_id, failed=failed):
            if not is_whole(row):  # it stays, and makes no shard shorter
                log.warning(DAMAGED_ROW, row.position, job_id)
                continue
            rows.append(row)
            size += len(row.payload)
            if len(rows) == SHARD_ROWS or size >= SHARD_BYTES:
                break
    enough = rows if len(rows) >= at_least or size >= SHARD_BYTES else []
    return [JournalRow(row.position, row.payload, row.checksum, decode(row.payload)) for row in enough]


def by_position(tx: Connection, job_id: str, *, failed: bool) -> Iterator[Any]:
    """Yield the job's journal rows by position; read in parts, since PostgreSQL sends all that is asked for."""
    ours = select(journal).where(journal.c.job_id == job_id, journal.c.failed == failed)
    along_indexes(tx)
    part, read = ours, SHARD_ROWS
    while read == SHARD_ROWS:
        read = last = 0
        for row in read_rows(tx, part.order_by(journal.c.position).limit(SHARD_ROWS)):
            read, last = read + 1, row.position
            yield row
        part = ours.where(journal.c.position > last)


def write_shard(store: Store, job_id: str, rows: Sequence[JournalRow], *, failed: bool, now: float) -> bool:
    """Move these journal rows to one shard; False if another process moved some of them meanwhile.

    The job's mark is held from before the file exists until it is registered, so that no sweep takes it and no
    removal deletes the folder meanwhile. A job that was removed before leaves nothing.
    """
    folder = layout.job_folder(store.data, job_id)
    with os_errors.explained(store.data), os_errors.owned(folder):
        try:
            if isinstance(folder, Path):
                folder.mkdir(exist_ok=True)  # not its parents: a home that is away must not be made anew
            with place_of(folder).held(Mark(store_id=store.id, registered=True), alone=False):
                if is_known(store, job_id):
                    return write_held(store, job_id, rows, failed=failed, now=now)
                place_of(folder).drop_bare()
        except FileNotFoundError:
            if is_known(store, job_id):
                raise
    return False


def write_held(store: Store, job_id: str, rows: Sequence[JournalRow], *, failed: bool, now: float) -> bool:
    """Write and register one shard of a job whose mark is held."""
    folder = layout.job_folder(store.data, job_id) / layout.RESULTS
    place_of(folder).make()
    path, seal = write_file(folder, job_id, rows, local=store.local)
    written_at = time.time()
    registered = register(store, job_id, path, seal, rows, failed=failed, now=now, written_at=written_at)
    if not registered:
        discard(path)
    return registered


def is_known(store: Store, job_id: str) -> bool:
    """True if the database names the job."""
    with store.read() as tx:
        return catalog.taken(tx, job_id)


def write_file(
    folder: FilePath, job_id: str, rows: Sequence[JournalRow], *, local: Path
) -> tuple[FilePath, Seal]:
    """Write the file of a shard, flushed; the database does not name it yet."""
    positions = [row.position for row in rows]
    path = folder / f"{positions[0]:012}-{uuid.uuid4().hex[:8]}.parquet"
    with scratch_of(path, local) as scratch:
        table = to_arrow([job_id] * len(rows), positions, [row.result for row in rows])
        pq.write_table(table, scratch, compression="zstd", write_page_checksum=True)
        seal = digests.seal(scratch)
        place_of(path).write(scratch)
    return path, seal


class _RowsMoved(Exception):
    """Rolls the registering transaction back."""


def register(
    store: Store,
    job_id: str,
    path: FilePath,
    seal: Seal,
    rows: Sequence[JournalRow],
    *,
    failed: bool,
    now: float,
    written_at: float,
) -> bool:
    """Swap journal rows for the shard that holds them; returns False, with nothing changed, if it is too late.

    Too late means that another process moved the rows, that `retry` had failed rows done again, or that this
    process slept for so long that a sweep took the file.
    """
    try:
        with store.write() as tx:
            catalog.lock_job(tx, job_id)  # a sweep looks under it too, so before or after this transaction
            read = as_read(tx, job_id, rows)
            gone = sum(afresh(tx, delete(journal).where(*chunk)).rowcount for chunk in read)
            if gone != len(rows) or not is_kept(path, written_at):
                raise _RowsMoved
            name = below(path, store.data)
            add(
                tx,
                ShardFile(id=0, job_id=job_id, file=name, failed=failed, num_rows=len(rows), seal=seal),
                now=now,
            )
    except _RowsMoved:
        return False
    return True


def is_kept(path: FilePath, written_at: float) -> bool:
    """True if no sweep can have taken a file that was just written; no transaction waits for a bucket's answer."""
    return time.time() - written_at < NAMED_WITHIN_S if place_of(path).in_bucket else path.exists()


def discard(path: FilePath) -> None:
    """Delete a file that the database does not name; what a bucket out of reach keeps is swept later."""
    with suppress(StoreUnreachable):
        path.unlink(missing_ok=True)


def as_read(tx: Connection, job_id: str, rows: Sequence[JournalRow]) -> Iterator[list[ColumnElement[bool]]]:
    """Conditions for these journal rows as they were read: `retry` and `check --repair` may have replaced some."""
    new = [(row.position, row.checksum) for row in rows if row.checksum is not None]
    old = [(row.position, row.payload) for row in rows if row.checksum is None]
    for column, read in ((journal.c.checksum, new), (journal.c.payload, old)):
        for at in matching(tx, [journal.c.position, column], read):
            yield [journal.c.job_id == job_id, *at]


def left(tx: Connection) -> Sequence[str]:
    """Jobs that ended before their last results reached a shard."""
    ended = stored([state for state in JobState if state.final])
    jobs = select(journal.c.job_id).distinct().join(job, job.c.id == journal.c.job_id)
    return tx.scalars(jobs.where(job.c.state.in_(ended))).all()


def retry_failed(store: Store, job_id: str, *, now: float, warn: Callable[[str], None] = log.warning) -> int:
    """Put the failed rows of a job back into its queue, as if never tried; returns how many.

    Rows that could not be rendered at submit stay failed. `warn` is told of them, and of rows that will fail again.
    """
    with store.write() as tx:
        known = catalog.get(tx, job_id).id
        catalog.lock_job(tx, known)
        current = catalog.get(tx, known)
        if current.state is JobState.CANCELLED:
            raise JobRefused(f"job {current.id} was cancelled; submit it again to run it")
        misfits = journalled.misfits(journalled.answers(tx, current.id))
        journalled.fail_misfits(tx, current.id, misfits)
        in_journal = journal.c.job_id == current.id, journal.c.failed == True  # noqa: E712
        journal_positions = list(tx.scalars(select(journal.c.position).where(*in_journal)))
        in_shards, damaged = in_failed_shards(tx, store.data, current, warn)
        failed = [*journal_positions, *(position for rows in in_shards.values() for position in rows)]
        stuck = unrendered(layout.requests_file(store.data, current.id), failed)
        if stuck:
            warn(stays_failed(current.id, stuck))
        positions = [*(position for position in failed if position not in stuck), *damaged.lost]
        if not positions and current.state is not JobState.EXPIRED:
            return 0
        if again := too_long(tx, current.id, [store.data / file.file for file in in_shards]):
            warn(fails_again(current.id, again))
        mixed = [file for file, rows in in_shards.items() if not stuck.keys() >= set(rows)]
        for file in mixed:
            back_to_journal(tx, store.data, file, stuck.keys() & set(in_shards[file]))
        gone = [*mixed, *damaged.files]
        for chunk in chunks(sorted(set(journal_positions) - stuck.keys())):
            tx.execute(delete(journal).where(*in_journal, journal.c.position.in_(chunk)))
        tx.execute(delete(shard).where(shard.c.id.in_([file.id for file in gone])))
        insert_rows(tx, request, [waiting_row(current.id, p, AT_ONCE) for p in sorted(positions)])
        tx.execute(
            update(job)
            .where(job.c.id == current.id)
            .values(
                failed=job.c.failed - len(positions),
                finished_at=None,
                error=None,
                failed_by=None,
                deadline=kept_deadline(tx, now),
                state=JobState.PAUSED.value if current.state is JobState.PAUSED else JobState.QUEUED.value,
            )
        )
        goes_on = not journalled.complete(tx, current.id, now)  # else no claim would ever end the job
        if goes_on and current.state not in OPEN:
            events.of_jobs(tx, [current.id], now=now)
        wake(tx)
    for file in gone:
        discard(store.data / file.file)
    return len(positions)


def back_to_journal(tx: Connection, where: FilePath, file: ShardFile, positions: Collection[int]) -> None:
    """Write these rows of a failed shard, which is about to go, into the journal again."""
    if not positions:
        return
    table = pq.read_table(source(where / file.file), filters=[("position", "in", sorted(positions))])
    read = zip(table["position"].to_pylist(), from_arrow(table), strict=True)
    rows = [Finished(0, file.job_id, position, result) for position, result in read]
    insert_rows(tx, journal, [journalled.to_row(row, encode(row.result)) for row in rows])


class Damaged(NamedTuple):
    """A job's unreadable shards of failed rows, and the positions in them."""

    files: Sequence[ShardFile] = ()
    lost: Sequence[int] = ()


def in_failed_shards(
    tx: Connection, where: FilePath, current: catalog.JobRecord, warn: Callable[[str], None]
) -> tuple[dict[ShardFile, list[int]], Damaged]:
    """Positions in a job's failed shards; for unreadable shards, the positions that are in no place."""
    found = files(tx, [current.id])
    contents = {file: places.content(where / file.file, file.seal) for file in found if file.failed}
    damaged = [file for file, content in contents.items() if content.fault]
    positions = {
        file: [int(position) for position in content.positions]
        for file, content in contents.items()
        if not content.fault
    }
    if not damaged:
        return positions, Damaged()
    require_folders(tx, where)
    contents |= {file: places.content(where / file.file, file.seal) for file in found if not file.failed}
    lost = places.lost(tx, current, [content.positions for content in contents.values()])
    if len(lost) != sum(file.num_rows for file in damaged):
        raise JobRefused(
            f"more than failed rows of job {current.id} is damaged; run: conserve check --repair {current.id}"
        )
    for file in damaged:
        fault = contents[file].fault
        warn(f"warning: {file.file} {fault}; its rows had failed, and go back into the queue too")
    return positions, Damaged(damaged, lost)
