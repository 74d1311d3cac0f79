"""Mending: recover a job's results and counters from what can still be read.

An unreadable shard is taken out, and its rows, which are in no other place, go back into the queue. Of a row in
several places the one furthest on its way stays: shard, journal, `request`, span. Then the counters are counted
again, and a job whose record names no model is bound to that of its answers.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from sqlalchemy import Connection, Table, delete, select, text, update

from conserve.store.books import catalog, events, leases, places, shards, spans
from conserve.store.books.journal import is_whole
from conserve.store.books.places import Positions
from conserve.store.books.queue import AT_ONCE, waiting_row
from conserve.store.books.results import decode
from conserve.store.books.shards import ShardFile
from conserve.store.books.states import JobState
from conserve.store.database import schema
from conserve.store.database.bulk import insert_rows
from conserve.store.database.connection import chunks
from conserve.store.database.store import Store
from conserve.store.files import digests, layout, os_errors, trash
from conserve.store.files.objects import FilePath, source
from conserve.store.files.place import place_of
from conserve.store.upkeep import checking, orphans
from conserve.store.upkeep.checking import JobAudit, JobCounters, Read
from conserve.units import count

job, request, journal, shard = schema.job, schema.request, schema.journal, schema.shard

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Mended(NamedTuple):
    """Changes of one transaction."""

    dropped: Sequence[ShardFile]
    damaged_rows: int
    back: int
    recounted: bool
    bound_to: str | None = None  # the model, if the record named none

    @property
    def said(self) -> list[str]:
        """The changes in words."""
        said = [f"{file.file} was taken out of the store" for file in self.dropped]
        if self.damaged_rows:
            rows = count(self.damaged_rows, "damaged row was", "damaged rows were")
            said.append(f"{rows} taken out of the journal")
        if self.back:
            said.append(f"{count(self.back, 'row is', 'rows are')} back in the queue")
        if self.recounted:
            said.append("the counters were counted again")
        if self.bound_to:
            said.append(f"it is bound to {self.bound_to}, the model of its answers")
        return said


def mend_rows(store: Store, job_id: str, *, now: float) -> list[str]:
    """Recover the results and the counters of a job; returns the changes in words.

    Files are read before the transaction that changes rows, since others wait for its end.
    """
    said = restore_from_trash(store, job_id)
    there = orphans.on_disk(store.data, job_id)
    known: dict[int, Read] = {}
    with store.read() as tx:
        audited = checking.audit(tx, store.data, job_id, known)
        lying = orphans.among(tx, store.data, job_id, there, audited.positions)
    lying = [orphan.sealed() for orphan in lying]
    reads = {orphan.file: checking.read_shard(store.data, orphan.file) for orphan in lying}
    with store.write() as tx:
        leases.lock_with_job(tx, job_id)
        taken = orphans.take_in(tx, store.data, job_id, lying, audited.positions, now=now)
        known |= {shard_id: reads[orphan.file] for shard_id, orphan in taken.items()}
        mended = mend(tx, store.data, checking.audit(tx, store.data, job_id, known), now)
    throw_away_dropped(store, mended, now)
    return said + orphans.told(taken.values()) + mended.said


def throw_away_dropped(store: Store, mended: Mended, now: float) -> None:
    """Move the shards that a transaction dropped to the trash."""
    for file in mended.dropped:
        throw_away(store, store.data / file.file, now)


def throw_away(store: Store, path: FilePath, now: float) -> None:
    """Move a file that the database no longer names to the trash, if it exists."""
    with os_errors.explained(store.data):
        if path.is_file():
            trash.throw_away(store.data, path, now=now)


def restore_from_trash(store: Store, job_id: str) -> list[str]:
    """Copy a job's missing or damaged files from the trash, if they are whole there.

    Raises `StoreForbidden` for a file that is out of reach, here or there.
    """
    with store.read() as tx:
        found = catalog.get(tx, job_id)
        wanted = {file.file: file.seal for file in shards.files(tx, [job_id])}
    folder = PurePosixPath(layout.JOBS, job_id)
    wanted |= {str(folder / name): seal for name, seal in found.files.items()}
    said = []
    for name, seal in wanted.items():
        if seal is None or not digests.damage(store.data / name, seal):
            continue
        whole = (path for path in trash.found(store.data, name) if not digests.damage(path, seal))
        if path := next(whole, None):
            with os_errors.explained(store.data):
                place_of(path).copy_to(store.data / name)
            said.append(f"{name} was found in the trash")
    return said


def mend(tx: Connection, where: FilePath, audited: JobAudit, now: float) -> Mended:
    """Bring each row of a job into exactly one place, and its counters to the sums over its results."""
    current = audited.job
    in_shards, dropped, counts = kept_shards(audited)
    tx.execute(delete(shard).where(shard.c.id.in_([file.id for file in dropped])))
    take_out(tx, journal, current.id, audited.damaged_rows)
    done = in_shards | kept(tx, journal, current, taken=in_shards)
    placed = done | kept(tx, request, current, taken=done)
    placed |= kept_in_spans(tx, current, taken=placed)
    cursor = max(places.cursor(current), last(placed) + 1)
    back = [int(position) for position in np.flatnonzero(~placed[:cursor])]
    insert_rows(tx, request, [waiting_row(current.id, position, AT_ONCE) for position in back])
    _, in_journal = checking.read_journal(tx, current.id)
    recounted = recount(tx, current, counts.plus(in_journal), cursor, now)
    bound_to = bind(tx, where, current.id) if current.model is None else None
    return Mended(dropped, len(audited.damaged_rows), len(back), recounted, bound_to)


def bind(tx: Connection, where: FilePath, job_id: str) -> str | None:
    """Bind a job to the model of its latest answer, as the first lease had; returns the model, or None."""
    named = [each for file in shards.files(tx, [job_id]) for each in models_in(where / file.file)]
    results = map(decode, tx.scalars(select(journal.c.payload).where(journal.c.job_id == job_id)))
    named += [(result.finished_at, result.model) for result in results if result.model]
    if not named:
        return None
    _, model = max(named)
    tx.execute(update(job).where(job.c.id == job_id).values(model=model, bound_by_run=True))
    return model


def models_in(path: FilePath) -> list[tuple[float, str]]:
    """Models that a shard names, each with the time of its latest answer."""
    table = pq.read_table(source(path), columns=["model", "finished_at"])
    latest = table.group_by("model").aggregate([("finished_at", "max")]).to_pylist()
    return [(each["finished_at_max"].timestamp(), each["model"]) for each in latest if each["model"]]


def kept_shards(audited: JobAudit) -> tuple[Flags, list[ShardFile], JobCounters]:
    """Positions in the shards that stay, the shards that are dropped, and the sums over the shards that stay.

    A shard is dropped if it cannot be read, or if an earlier shard has some of its rows.
    """
    there: Flags = np.zeros(audited.job.num_rows, np.bool_)
    dropped, counts = [], JobCounters()
    for file, read in zip(audited.shards, audited.reads, strict=True):
        positions = read.content.positions
        if read.content.fault or there[positions].any():
            dropped.append(file)
        else:
            there[positions] = True
            counts = counts.plus(read.counts)
    return there, dropped, counts


def kept(tx: Connection, table: Table, current: catalog.JobRecord, *, taken: Flags) -> Flags:
    """Delete a job's rows of a table at taken or impossible positions; returns the positions that stay."""
    found = list(tx.scalars(select(table.c.position).where(table.c.job_id == current.id)))
    outside = [position for position in found if not 0 <= position < current.num_rows or taken[position]]
    take_out(tx, table, current.id, outside)
    there: Flags = np.zeros(current.num_rows, np.bool_)
    there[sorted(set(found) - set(outside))] = True
    return there


def kept_in_spans(tx: Connection, current: catalog.JobRecord, *, taken: Flags) -> Flags:
    """Take a job's rows at taken or impossible positions out of the spans; returns the positions that stay."""
    there: Flags = np.zeros(current.num_rows, np.bool_)
    alive = spans.locked(tx, leases.of_job(tx, current.id))
    spans.drop_unleased(tx, current.id)
    for span in filter(None, alive.values()):
        for position in span.positions:
            if not 0 <= position < current.num_rows or taken[position] or there[position]:
                span.take(current.id, position)
            else:
                there[position] = True
    spans.write(tx, alive.values())
    spans.end_empty_leases(tx, alive)
    return there


def take_out(tx: Connection, table: Table, job_id: str, positions: Sequence[int]) -> None:
    """Delete the job's rows at these positions."""
    for chunk in chunks(positions):
        tx.execute(delete(table).where(table.c.job_id == job_id, table.c.position.in_(chunk)))


def last(placed: Flags) -> int:
    """Last position that is in a place; -1 if none is."""
    found = np.flatnonzero(placed)
    return int(found[-1]) if len(found) else -1


def recount(tx: Connection, current: catalog.JobRecord, counts: JobCounters, cursor: int, now: float) -> bool:
    """Write the right counters and the state that follows from them; returns True if any was wrong."""
    right = {**counts._asdict(), "next_position": cursor, "state": current.state}
    done = checking.is_done(current, counts)
    if done and checking.state_follows_rows(current):
        right["state"] = JobState.COMPLETED
    if not done and current.state is JobState.COMPLETED:
        right["state"] = JobState.QUEUED
    if all(getattr(current, name) == value for name, value in right.items()):
        return False
    ended = {JobState.COMPLETED: current.finished_at or now, JobState.QUEUED: None}
    right["finished_at"] = ended.get(right["state"], current.finished_at)
    tx.execute(update(job).where(job.c.id == current.id).values({**right, "state": right["state"].value}))
    if right["state"] is not current.state:
        events.of_jobs(tx, [current.id], now=now)
    return True


def answered(tx: Connection, where: FilePath, job_id: str) -> tuple[Positions, Positions]:
    """Positions of all results that can be read, and the row indexes that they answer."""
    positions, rows = [places.NONE], [places.NONE]
    for file in shards.files(tx, [job_id]):
        content = places.content(where / file.file, file.seal)
        if not content.fault:
            column = pq.read_table(source(where / file.file), columns=["row_index"])["row_index"]
            positions.append(content.positions)
            rows.append(column.to_numpy())
    found = tx.execute(select(journal).where(journal.c.job_id == job_id)).all()
    whole = [row for row in found if is_whole(row)]
    positions.append(np.array([row.position for row in whole], np.int64))
    rows.append(np.array([decode(row.payload).row_index for row in whole], np.int64))
    return np.concatenate(positions), np.concatenate(rows)


def mend_database(store: Store) -> list[str]:
    """Rebuild the indexes of an SQLite database and drop rows that name no job; returns the changes in words."""
    sqlite = store.engine.dialect.name == "sqlite"
    with store.write() as tx:
        if sqlite:
            tx.execute(text("reindex"))
        orphans = 0
        for table in (request, journal, shard, schema.span, schema.lease):
            orphans += tx.execute(delete(table).where(table.c.job_id.not_in(select(job.c.id)))).rowcount
    dropped = [f"{count(orphans, 'row of no job was', 'rows of no job were')} dropped"] if orphans else []
    return [*["the indexes of the database were made anew"] * sqlite, *dropped]
