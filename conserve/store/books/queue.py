"""The queue: rows that are claimed under a lease, and rows that return.

A claim leases some rows of one job to an owner.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, insert, not_, or_, select, update

from conserve.store.books.leases import Lease, LeasedRow, open_lease
from conserve.store.books.saved_tokens import whole_tokens
from conserve.store.books.states import JobState
from conserve.store.database import schema
from conserve.store.database.connection import chunks

job, request = schema.job, schema.request

LONGEST_WAIT_S = 300.0  # upper bound of any row's backoff

# Condition on a row of `request`: it was never leased, although rows behind it were. (A row that `retry` put back
# was never leased either, but has `available_at` set.)
PASSED_OVER = and_(request.c.epoch.is_(None), request.c.attempts == 0, request.c.available_at == 0)

RUNNABLE = (
    *(job.c.id, job.c.seq, job.c.priority, job.c.next_position, job.c.num_rows, job.c.deadline),
    *(job.c.succeeded, job.c.failed, job.c.prompt_tokens, job.c.completion_tokens, job.c.cached_tokens),
)
"""Columns of a job that its turn follows from."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Unfinished rows of a queue in which nothing can be claimed."""

    leased: int  # rows that other owners hold
    waiting: int  # rows in backoff, or suspects that want to run alone
    next_at: float | None  # when the first row in backoff may run


def claim(
    tx: Connection,
    *,
    owner: str,
    now: float,
    lease_s: float,
    limit: int,
    only: Collection[str] | None = None,
    suspect: bool = False,
    jobs: Sequence[Any] | None = None,
    model: str | None = None,
) -> Lease | None:
    """Lease up to `limit` rows of the first runnable job that has any: by priority, then by age.

    Rows that came back or were passed over go before the rows at the job's cursor. A suspect (in flight when an
    engine died) is leased only with `suspect`, and then alone, so that it takes no innocent row with it. The first
    lease of a job binds it to `model`. `jobs` are the runnable jobs, if the transaction has read them already.
    """
    for candidate in runnable_jobs(tx, only, model) if jobs is None else jobs:
        back = returned(tx, candidate.id, now, 1 if suspect else limit, suspect)
        new = [] if suspect else fresh(tx, candidate, now, limit - len(back))
        if not back and not new:
            continue
        epoch = open_lease(tx, candidate.id, owner, now, now + lease_s, model)
        take_again(tx, candidate.id, epoch, back, now)
        take_first(tx, candidate.id, epoch, new)
        return Lease(epoch, candidate.id, now + lease_s, (*back, *new))
    return None


def runnable_jobs(
    tx: Connection, only: Collection[str] | None, model: str | None = None, *, locked: bool = True
) -> Sequence[Any]:
    """Queued jobs by priority, then by age; with a model, only jobs that it may answer.

    `locked` is for a transaction that leases rows of these jobs.
    """
    jobs = (
        select(*RUNNABLE)
        .where(job.c.state == JobState.QUEUED.value)
        .order_by(job.c.priority.desc(), job.c.seq)
    )
    if locked:
        jobs = jobs.with_for_update()
    if only is not None:
        jobs = jobs.where(job.c.id.in_(only))
    if model is not None:
        jobs = jobs.where(may_answer(model))
    return tx.execute(jobs).all()


def may_answer(model: str) -> ColumnElement[bool]:
    """Condition that a job is bound to this model, or to none yet."""
    return or_(job.c.model.is_(None), job.c.model == model)


def returned(
    tx: Connection, job_id: str, now: float, limit: int, suspect: bool, *, passed_over_too: bool = True
) -> list[LeasedRow]:
    """Waiting rows as their next attempt sees them; rows that were passed over only with `passed_over_too`."""
    waiting = select(request).where(
        request.c.epoch.is_(None),
        request.c.job_id == job_id,
        is_due(now),
        request.c.suspect == suspect,
    )
    if not passed_over_too:
        waiting = waiting.where(not_(PASSED_OVER))
    rows = tx.execute(waiting.order_by(request.c.position).limit(limit))
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
        for r in rows
    ]


def is_due(now: float) -> ColumnElement[bool]:
    """Condition that a row's backoff is over: its time has come, or the clock was set back since."""
    return or_(request.c.available_at <= now, request.c.available_at > now + LONGEST_WAIT_S)


def fresh(tx: Connection, candidate: Any, now: float, limit: int) -> list[LeasedRow]:
    """Take the next rows that were never leased; the job's cursor moves past them."""
    start, stop = candidate.next_position, min(candidate.next_position + limit, candidate.num_rows)
    if start == stop:
        return []
    tx.execute(update(job).where(job.c.id == candidate.id).values(next_position=stop))
    return [LeasedRow(position, 1, 0, now) for position in range(start, stop)]


def take_again(tx: Connection, job_id: str, epoch: int, rows: Sequence[LeasedRow], now: float) -> None:
    """Put waiting rows under the lease."""
    for chunk in chunks([row.position for row in rows]):
        tx.execute(
            update(request)
            .where(request.c.job_id == job_id, request.c.position.in_(chunk))
            .values(
                epoch=epoch,
                attempts=request.c.attempts + 1,
                started_at=func.coalesce(request.c.started_at, now),
            )
        )


def take_first(tx: Connection, job_id: str, epoch: int, rows: Sequence[LeasedRow]) -> None:
    """Put rows that were never leased under the lease; from now on each has a request row."""
    values = [
        {
            "job_id": job_id,
            "position": row.position,
            "epoch": epoch,
            "attempts": 1,
            "started_at": row.started_at,
        }
        for row in rows
    ]
    if values:
        tx.execute(insert(request), values)


def put_back(
    tx: Connection,
    *,
    epoch: int,
    job_id: str,
    position: int,
    available_at: float = 0.0,
    failed: bool = False,
    suspect: bool = False,
) -> None:
    """Return one row to the queue, after an error that counts against it (`failed`) or because a run stops.

    An error that counts against a suspect is the death of an engine in which the row was alone.
    """
    tx.execute(
        update(request)
        .where(request.c.job_id == job_id, request.c.position == position, request.c.epoch == epoch)
        .values(
            epoch=None,
            available_at=available_at,
            failures=request.c.failures + int(failed),
            suspect=suspect,
            deaths=func.coalesce(request.c.deaths, 0) + int(failed and suspect),
        )
    )
    if failed:
        tx.execute(update(job).where(job.c.id == job_id).values(retries=job.c.retries + 1))


def backlog(tx: Connection, *, only: Collection[str] | None = None, model: str | None = None) -> Backlog:
    """Count the live rows of queued jobs; with a model, only of jobs that it may answer."""
    waiting = request.c.epoch.is_(None)
    live = (
        select(
            func.count(request.c.epoch),
            func.count(case((waiting, 1))),
            func.min(case((waiting, request.c.available_at))),
        )
        .join(job, job.c.id == request.c.job_id)
        .where(job.c.state == JobState.QUEUED.value)
    )
    if only is not None:
        live = live.where(job.c.id.in_(only))
    if model is not None:
        live = live.where(may_answer(model))
    return Backlog(*tx.execute(live).one())
