"""Leases of rows that a waiting window chose, out of their jobs' execution order.

A row in front of a chosen one is **passed over**: it waits in `request` and was never leased. So each position
still is in exactly one place, and the windows of several harvesters need not know of each other.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, select, update

from conserve.store.books.leases import Lease, LeasedRow, Terms, begin_job, begun, open_lease
from conserve.store.books.queue import (
    JobEmptied,
    having,
    returned,
    runnable_jobs,
    take_again,
    take_back,
    waiting_row,
)
from conserve.store.books.shapes import ClaimableJob
from conserve.store.books.spans import Span
from conserve.store.database import schema
from conserve.store.database.bulk import afresh, insert_rows, matching, upsert_into
from conserve.store.database.schema import PASSED_OVER

job, request, meta = schema.job, schema.request, schema.meta

PLACE = "window"  # its key in `meta`

J = TypeVar("J", bound=ClaimableJob)


def contenders(tx: Connection, runnable: Sequence[J]) -> list[J]:
    """Runnable jobs with rows that were never leased, all of the highest priority that has any."""
    left = {c.seq for c in runnable if c.next_position < c.num_rows}
    skipped = having(tx, [c for c in runnable if c.seq not in left], skipped_rows(), 0.0)
    for _, level in groupby(runnable, key=lambda candidate: candidate.priority):
        if found := [c for c in level if c.seq in left or c.seq in skipped]:
            return found
    return []


def passed_over(tx: Connection, job_id: str, *, start: int = 0, limit: int | None = None) -> Sequence[int]:
    """Positions of a job that were passed over, ascending from `start`; read in an index of such rows alone."""
    rows = skipped_rows().where(request.c.job_id == job_id, request.c.position >= start)
    return tx.scalars(rows.limit(limit)).all()


@cache
def skipped_rows() -> Select[Any]:
    """Positions of rows that were passed over, ascending."""
    return select(request.c.position).where(PASSED_OVER).order_by(request.c.position)


def never_leased(tx: Connection, job_id: str, *, start: int, limit: int) -> list[int]:
    """Positions of a job that were never leased, ascending from `start`; none of a job that was removed."""
    columns = select(job.c.next_position, job.c.num_rows).where(job.c.id == job_id)
    cursor, num_rows = tx.execute(columns).one_or_none() or (0, 0)
    found = passed_over(tx, job_id, start=start, limit=limit)
    beyond = max(start, cursor)
    return [*found, *range(beyond, min(beyond + limit - len(found), num_rows))]


def reclaim(
    tx: Connection, runnable: Sequence[ClaimableJob], priority: int, terms: Terms, *, limit: int
) -> Lease | None:
    """Lease rows that came back, of the first runnable job with at least this priority that has any.

    Raises `JobEmptied` where others were faster.
    """
    high = [candidate for candidate in runnable if candidate.priority >= priority]
    waiting = having(tx, high, returned(passed_over_too=False), terms.now)
    for candidate in high:
        if candidate.seq not in waiting:
            continue
        back = take_back(tx, candidate.id, terms.now, limit, model=terms.model, passed_over_too=False)
        if not back:
            raise JobEmptied(candidate.seq)
        begin_job(tx, candidate.id, terms.now, terms.model)
        lease = begin(tx, candidate.id, terms, back)
        take_again(tx, candidate.id, lease.epoch, back, terms.now)
        return lease
    return None


def choose(tx: Connection, chosen: Sequence[tuple[str, int]], terms: Terms) -> list[Lease]:
    """Lease the chosen rows (job id, position) that were never leased; returns one lease a job that has any."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for job_id, position in chosen:
        wanted[job_id].append(position)
    leases = (choose_of(tx, job, wanted[job.id], terms) for job in runnable_jobs(tx, wanted, terms.model))
    return [lease for lease in leases if lease is not None]


def choose_of(tx: Connection, candidate: ClaimableJob, wanted: Sequence[int], terms: Terms) -> Lease | None:
    """Lease the chosen rows of one job; rows in front of them are passed over."""
    cursor = candidate.next_position
    known = set(still_waiting(tx, candidate.id, [position for position in wanted if position < cursor]))
    rows = [LeasedRow(p, 1, 0, terms.now) for p in wanted if p >= cursor or p in known]
    if not rows:
        return None
    new = {row.position for row in rows if row.position >= cursor}
    pass_over(tx, candidate, new, terms)
    lease = begin(tx, candidate.id, terms, rows, Span.of(candidate.id, new, terms.now) if new else None)
    take_again(tx, candidate.id, lease.epoch, [row for row in rows if row.position in known], terms.now)
    return lease


def begin(
    tx: Connection, job_id: str, terms: Terms, rows: Sequence[LeasedRow], new: Span | None = None
) -> Lease:
    """Open a lease for these rows; `new` holds those that were never leased."""
    expires_at = terms.now + terms.lease_s
    epoch = open_lease(tx, job_id, terms.owner, terms.now, expires_at, new)
    return Lease(epoch, job_id, expires_at, tuple(rows))


def still_waiting(tx: Connection, job_id: str, positions: Sequence[int]) -> Iterator[int]:
    """Yield the positions among these that were passed over and still wait for their first lease."""
    for at in matching(tx, [request.c.position], [(position,) for position in positions]):
        known = select(request.c.position).where(request.c.job_id == job_id, *at, PASSED_OVER)
        yield from afresh(tx, known).scalars()


def pass_over(tx: Connection, candidate: ClaimableJob, taken: Collection[int], terms: Terms) -> None:
    """Move the job's cursor past these positions; each position between them gets a waiting `request` row."""
    if not taken:
        begin_job(tx, candidate.id, terms.now, terms.model)
        return
    stop = max(taken) + 1
    moved = {"next_position": stop, **begun(terms.now, terms.model)}
    tx.execute(update(job).where(job.c.id == candidate.id).values(moved))
    between = [p for p in range(candidate.next_position, stop) if p not in taken]
    insert_rows(tx, request, [waiting_row(candidate.id, position) for position in between])


def remember(tx: Connection, place: str) -> None:
    """Store the place of a window, so that the next window goes on there."""
    # Two harvesters may have the first window at once.
    first = upsert_into(tx, meta).values(key=PLACE, value=place)
    tx.execute(first.on_conflict_do_update(index_elements=["key"], set_={"value": place}))


def remembered(tx: Connection) -> str | None:
    """Place of the last window that claimed rows; None if there was none."""
    return tx.scalar(select(meta.c.value).where(meta.c.key == PLACE))
