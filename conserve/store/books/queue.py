"""Leases: which owner holds which rows until when, and how rows return to the queue.

A claim leases some rows of one job to an owner under a new epoch. An owner whose lease is gone finds its epoch gone
too and can commit nothing (fencing, as with Chubby's sequencers and ZooKeeper's zxids).
"""

import array
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    update,
)

from conserve.store.books.states import JobState
from conserve.store.database import schema

T = TypeVar("T")

job, lease, request = schema.job, schema.lease, schema.request

LONGEST_WAIT_S = 300.0  # upper bound of any row's backoff

# Condition on a row of `request`: it was never leased, although rows behind it were. (A row that `retry` put back
# was never leased either, but has `available_at` set.)
PASSED_OVER = and_(request.c.epoch.is_(None), request.c.attempts == 0, request.c.available_at == 0)


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """One row under a lease."""

    position: int
    attempts: int  # this one included
    failures: int  # deaths included
    started_at: float  # first lease
    tokens: bytes | None = None  # saved by an earlier attempt
    tokens_by: str | None = None
    suspect: bool = False
    deaths: int = 0  # of an engine in which the row was alone


@dataclass(frozen=True, slots=True)
class Lease:
    """Some rows of one job, held by one owner until `expires_at`."""

    epoch: int
    job_id: str
    expires_at: float
    rows: tuple[LeasedRow, ...]


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
        select(job.c.id, job.c.seq, job.c.priority, job.c.next_position, job.c.num_rows)
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


def whole_tokens(row: Any) -> tuple[bytes | None, str | None]:
    """Saved tokens of a row and the endpoint that generated them; None for both if their checksum is wrong."""
    if row.checksum not in (None, tokens_checksum(row.tokens, row.tokens_by)):
        return None, None
    return row.tokens, row.tokens_by


def tokens_checksum(tokens: bytes | None, tokens_by: str | None) -> int:
    """CRC-32 of saved tokens."""
    return zlib.crc32(tokens or b"", zlib.crc32((tokens_by or "").encode()))


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


def open_lease(
    tx: Connection, job_id: str, owner: str, now: float, expires_at: float, model: str | None = None
) -> int:
    """Add a lease; returns its epoch. The first lease of a job binds it to the model, if one is given."""
    tx.execute(update(job).where(job.c.id == job_id, job.c.started_at.is_(None)).values(started_at=now))
    if model is not None:
        tx.execute(update(job).where(job.c.id == job_id, job.c.model.is_(None)).values(model=model))
    added = tx.execute(
        insert(lease).values(
            job_id=job_id, owner=owner, claimed_at=now, expires_at=expires_at, lease_s=expires_at - now
        )
    )
    assert added.inserted_primary_key is not None
    return int(added.inserted_primary_key[0])


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


def renew(tx: Connection, epochs: Collection[int], *, now: float, lease_s: float) -> set[int]:
    """Extend leases to `now + lease_s`; returns the epochs that still exist. Rows of the others were taken back."""
    tx.execute(update(lease).where(lease.c.epoch.in_(epochs)).values(expires_at=now + lease_s))
    return set(tx.scalars(select(lease.c.epoch).where(lease.c.epoch.in_(epochs))))


def held(tx: Connection, epochs: Collection[int]) -> set[int]:
    """Epochs among these whose leases still exist; the leases cannot end before this transaction does."""
    return set(tx.scalars(select(lease.c.epoch).where(lease.c.epoch.in_(epochs)).with_for_update()))


class Sign(NamedTuple):
    """Sign of life of a lease's owner: it changes with each renewal."""

    epoch: int
    expires_at: float
    lease_s: float | None


def signs(tx: Connection, *, but: str) -> list[Sign]:
    """Signs of all leases but this owner's."""
    found = select(lease.c.epoch, lease.c.expires_at, lease.c.lease_s).where(lease.c.owner != but)
    return [Sign(*row) for row in tx.execute(found)]


def end_silent(tx: Connection, over: Sequence[Sign]) -> int:
    """End the leases that were not renewed since these signs were read; returns how many.

    No other lease is locked, since harvesters that renew their own would wait for each other.
    """
    silent: list[int] = []
    for sign in over:
        unchanged = lease.c.epoch == sign.epoch, lease.c.expires_at == sign.expires_at
        silent += tx.scalars(select(lease.c.epoch).where(*unchanged).with_for_update())
    return end(tx, silent)


def owners(tx: Connection) -> set[str]:
    """Owners of all leases."""
    return set(tx.scalars(select(lease.c.owner).distinct()))


def abandon(tx: Connection, dead: Collection[str]) -> int:
    """End the leases of these owners without waiting for their expiry; returns how many."""
    return end(tx, tx.scalars(select(lease.c.epoch).where(lease.c.owner.in_(dead)).with_for_update()).all())


def end(tx: Connection, epochs: Collection[int]) -> int:
    """Put the rows of these leases back with their saved tokens, and end the leases; returns how many."""
    for chunk in chunks(list(epochs)):
        tx.execute(update(request).where(request.c.epoch.in_(chunk)).values(epoch=None))
        tx.execute(delete(lease).where(lease.c.epoch.in_(chunk)))
    return len(epochs)


def end_if_empty(tx: Connection, epochs: Collection[int]) -> None:
    """End the leases among these that hold no row any more."""
    rows = exists().where(request.c.epoch == lease.c.epoch)
    for chunk in chunks(list(epochs)):
        tx.execute(delete(lease).where(lease.c.epoch.in_(chunk), ~rows))


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """Generated tokens of one row in flight."""

    epoch: int
    job_id: str
    position: int
    tokens: bytes
    tokens_by: str  # Endpoint.identity


def save_tokens(tx: Connection, saved: Sequence[SavedTokens]) -> None:
    """Save the tokens of rows in flight; a row that is no longer under that lease is skipped."""
    tx.execute(
        update(request)
        .where(
            request.c.job_id == bindparam("of_job"),
            request.c.position == bindparam("at_position"),
            request.c.epoch == bindparam("under_epoch"),
        )
        .values(
            tokens=bindparam("new_tokens"),
            tokens_by=bindparam("new_tokens_by"),
            checksum=bindparam("new_checksum"),
        ),
        [
            {
                "of_job": s.job_id,
                "at_position": s.position,
                "under_epoch": s.epoch,
                "new_tokens": s.tokens,
                "new_tokens_by": s.tokens_by,
                "new_checksum": tokens_checksum(s.tokens, s.tokens_by),
            }
            for s in saved
        ],
    )


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


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, 4 bytes each."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    unpacked = array.array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def chunks(values: Sequence[T], size: int = 500) -> Iterable[Sequence[T]]:
    """Cut values into slices short enough for an IN list in every database."""
    return (values[start : start + size] for start in range(0, len(values), size))
