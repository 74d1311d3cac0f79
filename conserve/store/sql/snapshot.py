"""Snapshots of the store for queries: jobs, shard names, journal rows and live rows of one moment."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from sqlalchemy import Connection, select, text

from conserve.store.books import catalog, readings, shards, spans
from conserve.store.books.journal import is_whole
from conserve.store.books.results import decode, to_arrow
from conserve.store.books.shards import ShardFile
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files.objects import FilePath
from conserve.store.upkeep.damage import FILES, Damage, StorePart, damaged_rows, unreadable

journal, request = schema.journal, schema.request

LIVE = pa.schema(
    [("job_id", pa.string()), ("position", pa.int64()), ("leased", pa.bool_()), ("attempts", pa.int64())]
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The store at one moment. Shards are immutable, so their names are enough.

    `damages` are the files of requests, results and copied inputs that cannot be read, of those that were compared.
    """

    now: float  # seconds since the epoch
    home: Path
    data: FilePath
    jobs: list[readings.JobReading]
    catalog: list[catalog.JobRecord]
    shards: list[ShardFile]
    journal_rows: pa.Table
    live_rows: pa.Table
    damages: list[Damage]


MOST_TRIES = 5
PARTS = {"results": StorePart.SHARD, "inputs": StorePart.INPUTS, "requests": StorePart.REQUESTS}
"""Files that each view reads."""


def snapshot(
    store: Store, *, now: float, only: Sequence[str] | None = None, used: Set[str] | None = None
) -> Snapshot:
    """Read the store in one transaction, so that no row is missed or seen twice.

    Of the views in `used`, or of all if it is None, files are compared with their digests, for which each is read
    once a day, and rows of the journal and of the queue are read. The store is read again where files are gone
    since a job was retried or removed meanwhile.
    """
    for _ in range(MOST_TRIES):
        found = read_once(store, now=now, only=only, used=used)
        if not is_outdated(store, found):
            break
    return found


def is_outdated(store: Store, found: Snapshot) -> bool:
    """True if a file that was missing is one that the store names no more."""
    if not any(damage.job_id for damage in found.damages):
        return False
    with store.read() as tx:
        jobs = set(catalog.ids(tx))
        files = {file.file for file in shards.files(tx)}
    return any(
        damage.job_id not in jobs or (damage.part is StorePart.SHARD and damage.file not in files)
        for damage in found.damages
        if damage.job_id
    )


def changed_since(store: Store, taken: Snapshot) -> set[str]:
    """Jobs that were retried, repaired or removed since a snapshot: the store has dropped files of theirs."""
    with store.read() as tx:
        jobs = set(catalog.ids(tx))
        files = {file.file for file in shards.files(tx)}
    removed = {job.id for job in taken.catalog} - jobs
    return removed | {file.job_id for file in taken.shards if file.file not in files}


def read_once(store: Store, *, now: float, only: Sequence[str] | None, used: Set[str] | None) -> Snapshot:
    """Read the store in one transaction, then compare its files."""
    parts = FILES if used is None else [part for view, part in PARTS.items() if view in used]
    with store.read() as tx:
        jobs = [readings.to_reading(tuple(row)) for row in tx.execute(text(readings.JOBS), {"now": now})]
        entries = catalog.everything(tx)
        wanted = [job.id for job in jobs if only is None or job.id in only]
        named = None if only is None else wanted  # a statement takes no more than 32,766 of them
        found = shards.files(tx, named)
        chosen = select(journal) if named is None else select(journal).where(journal.c.job_id.in_(named))
        rows = tx.execute(chosen).all() if reads(used, "results", "requests") else []
        live = live_table(tx, named) if reads(used, "requests") else LIVE.empty_table()
    those = set(wanted)
    ours = [entry for entry in entries if entry.id in those]
    damages = unreadable(store.data, ours, found, now=now, parts=parts)
    lost = {damage.file for damage in damages}
    return Snapshot(
        now,
        store.home,
        store.data,
        [job for job in jobs if job.id in those],
        ours,
        [file for file in found if file.file not in lost],
        journal_table([row for row in rows if is_whole(row)]),
        live,
        [*damages, *damaged_rows(rows)],
    )


def reads(used: Set[str] | None, *views: str) -> bool:
    """True if a query that reads the views in `used`, or all, reads one of these."""
    return used is None or not used.isdisjoint(views)


def journal_table(rows: Sequence[Any]) -> pa.Table:
    """Rows of the journal as a table; compaction keeps it short."""
    return to_arrow([r.job_id for r in rows], [r.position for r in rows], [decode(r.payload) for r in rows])


def live_table(tx: Connection, job_ids: Sequence[str] | None) -> pa.Table:
    """Rows of these jobs, or of all, that are leased, or that came back and wait."""
    chosen = select(request.c.job_id, request.c.position, request.c.epoch, request.c.attempts)
    records = tx.execute(chosen if job_ids is None else chosen.where(request.c.job_id.in_(job_ids))).all()
    rows = [(row.job_id, row.position, row.epoch is not None, row.attempts) for row in records]
    for span in spans.of_jobs(tx, job_ids):
        rows += [(span.job_id, position, True, 1) for position in span.positions]
    values: list[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(LIVE)
    return pa.table([pa.array(v, field.type) for v, field in zip(values, LIVE, strict=True)], schema=LIVE)
