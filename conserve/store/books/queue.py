"""The queue: rows that are claimed under a lease, and rows that return.

A claim leases some rows of one job to an owner. Harvesters do not wait for each other's rows: a claim locks no job
but the one it takes rows of, and leaves out rows that another claim is just taking. Claims ask for jobs by their
turns and commits by their ids, so one that kept the lock of a job without rows could deadlock at the next job.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from sqlalchemy import (
    Connection,
    Select,
    Update,
    bindparam,
    func,
    insert,
    literal,
    not_,
    or_,
    select,
    true,
    update,
)

from conserve.store.books import losses, spans
from conserve.store.books.leases import Lease, LeasedRow, Terms, begin_job, begun, open_lease
from conserve.store.books.queue_statements import is_runnable, looks
from conserve.store.books.saved_tokens import whole_tokens
from conserve.store.books.shapes import ClaimableJob, RunnableRow
from conserve.store.books.spans import Span, nothing_gone
from conserve.store.database import schema
from conserve.store.database.bulk import afresh, finish, matching
from conserve.store.database.connection import by_bytes, chunks

job, lease, request, span = schema.job, schema.lease, schema.request, schema.span

LONGEST_WAIT_S = 300.0  # upper bound of any row's backoff

AT_ONCE = -1.0
"""`available_at` of a row that runs as soon as it can, but was not passed over: the past by any clock."""

IS_DUE = or_(request.c.available_at <= bindparam("now"), request.c.available_at > bindparam("set_back"))
"""Condition that a row's backoff is over: its time has come, or the clock was set back since."""

WAITING_ORDER = (request.c.epoch, request.c.position)
"""Order of a job's waiting rows, which have no epoch.

PostgreSQL does not see that `epoch is null` leaves one value of the index's first column. So an order by position
alone would read and sort all of a job's waiting rows at each claim, instead of the first ones of the index.
"""


def waiting_row(job_id: str, position: int, available_at: float = 0.0) -> dict[str, Any]:
    """A `request` row that waits as if it had never been leased, from `available_at` on; with 0 it was passed over.

    COPY knows no defaults of the schema, so all columns that have one are here.
    """
    never = {"attempts": 0, "failures": 0, "suspect": False}
    return {"job_id": job_id, "position": position, "available_at": available_at, **never}


@dataclass(frozen=True, slots=True)
class UnclaimableRows:
    """Unfinished rows of a queue in which nothing can be claimed."""

    leased: int  # rows that other owners hold
    waiting: int  # rows in backoff, or suspects that want to run alone
    next_at: float | None  # when the first row in backoff may run


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A leased row that goes back to the queue."""

    epoch: int
    job_id: str
    position: int
    available_at: float = 0.0
    failed: bool = False  # the attempt counts against the row
    suspect: bool = False
    lost: bool = False  # a server went down with it


class JobEmptied(Exception):
    """Others took the last rows of the job `seq` while a claim asked for them, and the claim perhaps has its lock.

    The transaction ends with that, and the next one claims of the other jobs. A savepoint would let the lock go
    too, but claims that find rows would have its statements as well: an `update` that waits keeps its lock also
    where it then changes nothing.
    """

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


def claim(
    tx: Connection,
    terms: Terms,
    jobs: Sequence[ClaimableJob],
    *,
    limit: int,
    suspect: bool = False,
    ends: bool = False,
) -> Lease | None:
    """Lease up to `limit` rows of the first of these runnable jobs that has any.

    Rows that came back or were passed over go before the rows at the job's cursor. A suspect (in flight when an
    engine died) is leased only with `suspect`, and then alone, so that it takes no innocent row with it. The first
    lease of a job binds it to the model of the `terms`. With `ends` the transaction may be committed with the last
    statement, so nothing must follow in it. Raises `JobEmptied` where others were faster.
    """
    owner, now, lease_s, model = terms
    waiting = having(tx, jobs, returned(suspect), now)
    for candidate in jobs:
        if candidate.seq not in waiting and (suspect or not has_fresh(candidate)):
            continue
        back: list[LeasedRow] = []
        if candidate.seq in waiting:
            back = take_back(tx, candidate.id, now, 1 if suspect else limit, suspect=suspect, model=model)
        if not back and not suspect and (new := at_once(tx, candidate, limit, terms, ends=ends)):
            return new
        first = range(0) if suspect else fresh(tx, candidate, now, limit - len(back), model)
        if not back and not first:
            raise JobEmptied(candidate.seq)
        if not first:
            begin_job(tx, candidate.id, now, model)
        taken = Span.of(candidate.id, first, now) if first else None
        epoch = open_lease(tx, candidate.id, owner, now, now + lease_s, taken)
        take_again(tx, candidate.id, epoch, back, now)
        return Lease(epoch, candidate.id, now + lease_s, (*back, *first_attempts(first, now)))
    return None


def at_once(tx: Connection, candidate: ClaimableJob, limit: int, terms: Terms, *, ends: bool) -> Lease | None:
    """Lease `limit` rows that were never leased in one statement; None if the job has fewer, or on SQLite.

    All harvesters of a job move its cursor. The lock on it is held for one answer to this process instead of three,
    and for none if the lease `ends` the transaction.
    """
    if tx.dialect.name != "postgresql" or candidate.next_position + limit > candidate.num_rows:
        return None
    owner, now, lease_s, model = terms
    moved = moved_by(candidate, now, limit, model).returning(job.c.id, job.c.next_position).cte("moved")
    held = moved.c.id, literal(owner), literal(now), literal(now + lease_s), literal(lease_s)
    columns = lease.c.job_id, lease.c.owner, lease.c.claimed_at, lease.c.expires_at, lease.c.lease_s
    opened = insert(lease).from_select(columns, select(*held)).returning(lease.c.epoch).cte("opened")
    at = moved.c.next_position - limit, moved.c.next_position, literal(limit), literal(nothing_gone(limit))
    values = select(opened.c.epoch, moved.c.id, *at, literal(now)).select_from(moved.join(opened, true()))
    names = ["epoch", "job_id", "start", "stop", "held", "gone", "claimed_at"]
    added = insert(span).from_select(names, values).returning(span.c.epoch, span.c.start, span.c.stop)
    row = next(iter(finish(tx, added, ends=ends)), None)
    if row is None:
        return None
    return Lease(row.epoch, candidate.id, now + lease_s, first_attempts(range(row.start, row.stop), now))


def first_attempts(positions: range, now: float) -> tuple[LeasedRow, ...]:
    """Rows that are leased for the first time."""
    return tuple(LeasedRow(position, 1, 0, now) for position in positions)


def runnable_jobs(
    tx: Connection,
    only: Collection[str] | None,
    model: str | None = None,
    *,
    seq: int | None = None,
    locked: bool = True,
) -> Sequence[RunnableRow]:
    """Queued jobs by priority, then by age; with a model, only jobs that it may answer.

    With a `seq` there is only the job with that number, if it is one of them. `locked` is for a transaction
    that chooses rows of several of them.
    """
    found, parameters = looks(only, model, seq=seq)
    if not locked:
        return cast("Sequence[RunnableRow]", tx.execute(found.jobs, parameters).all())
    # As commits lock jobs, so that none deadlock.
    by_id = found.jobs.order_by(None).order_by(by_bytes(tx, job.c.id))
    rows = tx.execute(by_id.with_for_update(key_share=True), parameters).all()
    return sorted(cast("Sequence[RunnableRow]", rows), key=lambda row: (-row.priority, row.seq))


def lock_runnable(tx: Connection, job_id: str, model: str | None) -> bool:
    """Keep a job from being stopped until the transaction ends; False if it is not runnable any more."""
    found = select(job.c.id).where(job.c.id == job_id, is_runnable(model)).with_for_update(key_share=True)
    return tx.scalar(found) is not None


def rows_left(tx: Connection, only: Collection[str] | None, model: str | None = None) -> int:
    """Number of rows without a result in queued jobs, of these or of all; with a model, those it may answer."""
    left = select(func.sum(job.c.num_rows - job.c.succeeded - job.c.failed)).where(is_runnable(model))
    if only is not None:
        left = left.where(job.c.id.in_(only))
    return int(tx.scalar(left) or 0)


def has_fresh(candidate: ClaimableJob) -> bool:
    """True of a runnable job with rows that were never leased."""
    return candidate.next_position < candidate.num_rows


def having(tx: Connection, jobs: Sequence[ClaimableJob], wanted: Select[Any], now: float) -> set[int]:
    """The `seq` of those of these jobs that have a row as `wanted`.

    One statement looks each of hundreds of jobs up: a claim holds up all writers of SQLite.
    """
    found: set[int] = set()
    for some in chunks([candidate.seq for candidate in jobs]):
        found.update(tx.scalars(jobs_with(wanted), {"some": some, **due_at(now)}))
    return found


@cache
def jobs_with(wanted: Select[Any]) -> Select[Any]:
    """Statement for the `seq` of those of `:some` jobs that have a row as `wanted`, which is made once."""
    there = wanted.where(request.c.job_id == job.c.id).limit(1).correlate(job).scalar_subquery()
    some = job.c.seq.in_(bindparam("some", expanding=True))
    return select(job.c.seq).where(some, there.is_not(None))


@cache
def returned(suspect: bool = False, *, passed_over_too: bool = True) -> Select[Any]:
    """Positions of rows that wait and may run `due_at` a time; those passed over only with `passed_over_too`."""
    waiting = request.c.epoch.is_(None), IS_DUE, request.c.suspect == suspect
    rows = select(request.c.position).where(*waiting).order_by(*WAITING_ORDER)
    return rows if passed_over_too else rows.where(not_(schema.PASSED_OVER))


def take_back(
    tx: Connection,
    job_id: str,
    now: float,
    limit: int,
    *,
    suspect: bool = False,
    model: str | None = None,
    passed_over_too: bool = True,
) -> list[LeasedRow]:
    """Lock waiting rows of a runnable job as their next attempt sees them, without those that others take just now.

    The job is locked before its rows, as by all others that need both.
    """
    if not lock_runnable(tx, job_id, model):
        return []
    rows = returned(suspect, passed_over_too=passed_over_too).where(request.c.job_id == job_id)
    waiting = rows.with_only_columns(request).limit(limit).with_for_update(skip_locked=True)
    return [
        LeasedRow(
            r.position,
            r.attempts + 1,
            r.failures,
            r.started_at or now,
            *whole_tokens(r),
            r.suspect,
            r.deaths or 0,
        )
        for r in tx.execute(waiting, due_at(now))
    ]


def due_at(now: float) -> dict[str, float]:
    """Parameters of `IS_DUE`."""
    return {"now": now, "set_back": now + LONGEST_WAIT_S}


def fresh(tx: Connection, candidate: ClaimableJob, now: float, limit: int, model: str | None = None) -> range:
    """Take the next rows that were never leased; the job's cursor moves past them.

    The cursor moves from where it is at that moment, in one statement, since other harvesters move it too. With
    fewer rows left than `limit` there are three statements, and the job is locked with the second, also if no row
    is left by then.
    """
    if candidate.next_position >= candidate.num_rows or limit <= 0:
        return range(0)
    stop = tx.scalar(moved_by(candidate, now, limit, model).returning(job.c.next_position))
    if stop is not None:
        return range(stop - limit, stop)
    left = select(job.c.next_position, job.c.num_rows).where(job.c.id == candidate.id, is_runnable(model))
    row = tx.execute(left.with_for_update(key_share=True)).one_or_none()
    if row is None or row.next_position == row.num_rows:
        return range(0)
    moved = {"next_position": row.num_rows, **begun(now, model)}
    tx.execute(update(job).where(job.c.id == candidate.id).values(moved))
    return range(row.next_position, row.num_rows)


def moved_by(candidate: ClaimableJob, now: float, rows: int, model: str | None) -> Update:
    """Statement that moves a job's cursor by so many rows, if as many are left and the job is runnable still."""
    beyond = job.c.next_position + rows
    ready = job.c.id == candidate.id, is_runnable(model), beyond <= job.c.num_rows
    return update(job).where(*ready).values(next_position=beyond, **begun(now, model))


def take_again(tx: Connection, job_id: str, epoch: int, rows: Sequence[LeasedRow], now: float) -> None:
    """Put waiting rows under the lease."""
    for at in matching(tx, [request.c.position], [(row.position,) for row in rows]):
        leased = (
            update(request)
            .where(request.c.job_id == job_id, *at)
            .values(
                epoch=epoch,
                attempts=request.c.attempts + 1,
                started_at=func.coalesce(request.c.started_at, now),
            )
        )
        afresh(tx, leased)


def put_rows_back(tx: Connection, rows: Sequence[Returned], *, owner: str | None = None) -> None:
    """Return rows to the queue, after errors that count against them (`failed`) or because a run stops.

    An error that counts against a suspect is the death of an engine in which the row was alone. Rows that were
    lost with a server may become suspects. A row that is no longer under its lease, of the `owner` if one is given,
    stays as it is.
    """
    alive = spans.locked(tx, {row.epoch for row in rows}, owner)
    failed = spans.still_held(tx, alive, [row for row in rows if row.failed])
    lost = spans.still_held(tx, alive, [row for row in rows if row.lost])
    spans.record(tx, [(row, outcome(row)) for row in rows], PUT_BACK, alive=alive, held=False)
    losses.blame(tx, lost)
    count_retries(tx, [job_id for job_id, _ in failed])


def outcome(row: Returned) -> dict[str, Any]:
    """Columns of a row that went back in its first attempt; for a later attempt, what is added to them."""
    failures, deaths = int(row.failed), int(row.failed and row.suspect)
    return {
        "available_at": row.available_at,
        "suspect": row.suspect,
        "failures": failures,
        "deaths": deaths,
        "losses": int(row.lost),
    }


PUT_BACK = (
    update(request)
    .where(spans.RECORD)
    .values(
        epoch=None,
        available_at=bindparam("new_available_at"),
        suspect=bindparam("new_suspect"),
        failures=request.c.failures + bindparam("new_failures"),
        deaths=func.coalesce(request.c.deaths, 0) + bindparam("new_deaths"),
        losses=func.coalesce(request.c.losses, 0) + bindparam("new_losses"),
    )
)
"""Returns a row that has a record."""


def count_retries(tx: Connection, job_ids: Sequence[str]) -> None:
    """Count rows of these jobs that are to be tried again."""
    for job_id in sorted(set(job_ids)):
        more = job.c.retries + job_ids.count(job_id)
        tx.execute(update(job).where(job.c.id == job_id).values(retries=more))


def backlog(
    tx: Connection,
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
    model: str | None = None,
) -> UnclaimableRows:
    """Count the live rows of queued jobs, `but` of these; with a model, only of jobs that it may answer."""
    found, parameters = looks(only, model, but)
    leased, back, next_at = tx.execute(found.live, parameters).one()
    return UnclaimableRows(leased + int(tx.scalar(found.in_spans, parameters) or 0), back, next_at)
