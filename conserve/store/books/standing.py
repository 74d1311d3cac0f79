"""Standing of one row of a job: not yet leased, live, in the journal, or in a shard."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, select

from conserve.errors import StoreForbidden
from conserve.store.books import shards, spans
from conserve.store.books.catalog import JobRecord
from conserve.store.books.journal import is_whole
from conserve.store.books.results import Result, decode, from_arrow
from conserve.store.books.shards import ShardFile
from conserve.store.books.states import JobState
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import digests
from conserve.store.files.objects import FilePath, source
from conserve.store.files.os_errors import damage_apart
from conserve.units import count

request, lease, journal = schema.request, schema.lease, schema.journal
BYTES_A_TOKEN = 4
PUT_BACK = "put back by conserve retry or check --repair, and not taken since"
ENDED = {
    JobState.EXPIRED: "its job expired; take up the rows that are left with: conserve retry {}",
    JobState.CANCELLED: "its job was cancelled; submit it again to run it",
}
HELD = {
    JobState.PAUSED: "its job is paused; let it go on with: conserve resume {}",
    JobState.FAILED: "its job was refused; try it again with: conserve resume {}",
}
"""Clauses on jobs of which no row is taken, by their states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStanding:
    """One row at one moment; `where` is a phrase for the user."""

    state: str  # as in the view `requests`
    where: str
    attempts: int
    result: Result | None = None


def standing(store: Store, job: JobRecord, position: int) -> RowStanding:
    """Find a row by its position; the transaction sees it in exactly one place."""
    with store.read() as tx:
        if found := live(tx, job, position):
            return found
        entry = tx.execute(
            select(journal).where(journal.c.job_id == job.id, journal.c.position == position)
        ).one_or_none()
        next_position = tx.scalar(select(schema.job.c.next_position).where(schema.job.c.id == job.id)) or 0
        files = shards.files(tx, [job.id])
    if entry is not None:
        return finished(decode(entry.payload), "in the journal") if is_whole(entry) else lost("the journal")
    if position >= next_position:
        return waiting(job, f"not taken yet; {ahead(position - next_position)}", 0)
    return in_shards(store.data, files, position)


def ahead(rows: int) -> str:
    """Words for the rows of the job in front of one."""
    if not rows:
        return "it is the next of its job"
    return count(rows, "row of its job goes first", "rows of its job go first")


def live(tx: Connection, job: JobRecord, position: int) -> RowStanding | None:
    """Standing of a row that is in a span or in `request`; None if it is in neither."""
    if (span := spans.at(tx, job.id, position)) is not None:
        owner = tx.scalar(select(lease.c.owner).where(lease.c.epoch == span.epoch))
        return RowStanding(state="running", where=f"leased by {owner}", attempts=1)
    found = tx.execute(
        select(request, lease.c.owner)
        .outerjoin(lease, lease.c.epoch == request.c.epoch)
        .where(request.c.job_id == job.id, request.c.position == position)
    ).one_or_none()
    if found is None:
        return None
    tokens = f", {len(found.tokens) // BYTES_A_TOKEN:,} tokens of its answer saved" if found.tokens else ""
    if found.epoch is not None:
        where = f"leased by {found.owner}{tokens}"
        return RowStanding(state="running", where=where, attempts=found.attempts)
    if not found.attempts:
        passed_over = not found.available_at  # as in schema.PASSED_OVER
        why = "not taken yet; rows behind it were chosen first" if passed_over else PUT_BACK
        return waiting(job, why, 0)
    alone = ", to run alone since an engine or a harvester died with it" if found.suspect else ""
    return waiting(job, f"came back{alone}{tokens}", found.attempts)


def waiting(job: JobRecord, where: str, attempts: int) -> RowStanding:
    """Standing of a row that no owner holds; "cancelled" in a job that was, or expired."""
    if job.state in ENDED:
        return RowStanding(state="cancelled", where=ENDED[job.state].format(job.id), attempts=attempts)
    if job.state in HELD:
        where = f"{where}; {HELD[job.state].format(job.id)}"
    return RowStanding(state="waiting", where=where, attempts=attempts)


def finished(result: Result, where: str) -> RowStanding:
    """Standing of a row that has its result."""
    state = "failed" if result.failed else "succeeded"
    return RowStanding(state=state, where=where, attempts=result.attempts, result=result)


def in_shards(where: FilePath, files: Sequence[ShardFile], position: int) -> RowStanding:
    """Standing of a row that must be in one of these shards; unreadable if only damaged ones may hold it.

    A shard is compared with its digest only if it turns out to have the row.
    """
    damaged = []
    for file in files:
        path = where / file.file
        try:
            row = [("position", "=", position)]
            with damage_apart(path):
                found = pq.read_table(source(path), filters=row, page_checksum_verification=True)
        except (OSError, pa.ArrowException, StoreForbidden):
            damaged.append(path.name)
            continue
        if found.num_rows and digests.fault(path, file.seal) is None:
            return finished(from_arrow(found)[0], f"in the shard {path.name}")
        damaged += [path.name] if found.num_rows else []
    return lost(", ".join(damaged) or "a shard that is not recorded")


def lost(place: str) -> RowStanding:
    """Standing of a row whose result cannot be read."""
    where = f"in a file that cannot be read ({place}); run: conserve check --repair"
    return RowStanding(state="unreadable", where=where, attempts=0)
