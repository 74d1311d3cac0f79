"""Leases: which owner holds which rows until when.

A lease has an epoch that no other lease gets. An owner whose lease is gone finds its epoch gone too and can commit
nothing (fencing, as with Chubby's sequencers and ZooKeeper's zxids). A database that fell back to an earlier state
may give an epoch again, so an owner's lease is one with its name and its epoch. Rows in their first attempt are
under a lease by its span; a row that has a `request` record is under the lease that the record names.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, and_, case, delete, false, func, insert, or_, select, true, update

from conserve.owners import dead as dead_among
from conserve.store.books import catalog, losses, spans
from conserve.store.books.spans import Span
from conserve.store.database import schema
from conserve.store.database.connection import chunks, of_one_machine
from conserve.store.database.wakeup import wake

job, lease, request = schema.job, schema.lease, schema.request

OWNERS = select(lease.c.owner).distinct()


class LeasedRow(NamedTuple):
    """One row under a lease."""

    position: int
    attempts: int  # this one included
    failures: int  # deaths included
    started_at: float  # first lease
    tokens: bytes | None = None  # saved by an earlier attempt
    tokens_by: str | None = None
    suspect: bool = False
    deaths: int = 0  # of an engine, or a whole harvester, in which the row was alone


class Terms(NamedTuple):
    """Terms of a lease: owner, start, length in seconds, and the model that answers."""

    owner: str
    now: float
    lease_s: float
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Some rows of one job, held by one owner until `expires_at`."""

    epoch: int
    job_id: str
    expires_at: float
    rows: tuple[LeasedRow, ...]


def open_lease(
    tx: Connection, job_id: str, owner: str, now: float, expires_at: float, new: Span | None = None
) -> int:
    """Add a lease, with a span of rows that were never leased if there are `new` ones; returns its epoch."""
    added = tx.execute(
        insert(lease).values(
            job_id=job_id, owner=owner, claimed_at=now, expires_at=expires_at, lease_s=expires_at - now
        )
    )
    assert added.inserted_primary_key is not None
    epoch = int(added.inserted_primary_key[0])
    if new is not None:
        spans.add(tx, new, epoch)
    return epoch


def begin_job(tx: Connection, job_id: str, now: float, model: str | None) -> None:
    """Note the first lease of a job, which binds it to the model, if one is given."""
    unbound = job.c.model.is_(None) if model is not None else false()
    tx.execute(
        update(job)
        .where(and_(job.c.id == job_id, or_(job.c.started_at.is_(None), unbound)))
        .values(begun(now, model))
    )


def begun(now: float, model: str | None) -> dict[str, object]:
    """Columns of a job that its first lease sets."""
    bound: dict[str, object] = {}
    if model is not None:
        bound["model"] = func.coalesce(job.c.model, model)
        bound["bound_by_run"] = case((job.c.model.is_(None), true()), else_=job.c.bound_by_run)
    return {"started_at": func.coalesce(job.c.started_at, now), **bound}


def renew(
    tx: Connection, epochs: Collection[int], *, now: float, lease_s: float, owner: str | None = None
) -> set[int]:
    """Extend leases to `now + lease_s`; returns the epochs that still exist. Rows of the others were taken back.

    With an `owner`, a lease of another one counts as gone.
    """
    alive = spans.lock(tx, epochs, owner)  # first, since an update locks rows in the order in which they lie
    for chunk in chunks(alive):
        tx.execute(update(lease).where(lease.c.epoch.in_(chunk)).values(expires_at=now + lease_s))
    return set(alive)


class Sign(NamedTuple):
    """Sign of life of a lease's owner: it changes with each renewal."""

    epoch: int
    expires_at: float
    lease_s: float | None


def signs(tx: Connection) -> list[Sign]:
    """Signs of all leases."""
    return [Sign(*row) for row in tx.execute(select(lease.c.epoch, lease.c.expires_at, lease.c.lease_s))]


def end_silent(tx: Connection, over: Sequence[Sign], *, mine: str | None = None) -> int:
    """End the leases that were not renewed since these signs were read; returns how many.

    Their rows count a loss, but for `mine`: that owner is alive, and never learned of the lease.

    No other lease is locked, since harvesters that renew their own would wait for each other. A lease that another
    transaction has locked is left out: its owner is alive, or another harvester is ending it.
    """
    silent: list[tuple[int, str]] = []
    for sign in over:
        unchanged = lease.c.epoch == sign.epoch, lease.c.expires_at == sign.expires_at
        found = select(lease.c.epoch, lease.c.owner).where(*unchanged)
        silent += map(tuple, tx.execute(found.with_for_update(skip_locked=True)))
    return end_of_owners(tx, silent, mine)


def owners(tx: Connection) -> set[str]:
    """Owners of all leases."""
    return set(tx.scalars(OWNERS))


def jobs(tx: Connection, *, now: float) -> set[str]:
    """Ids of the jobs of which rows are under a lease that is not over."""
    return set(tx.scalars(select(lease.c.job_id).where(lease.c.expires_at > now).distinct()))


def of_job(tx: Connection, job_id: str) -> Sequence[int]:
    """Epochs of a job's leases."""
    return tx.scalars(select(lease.c.epoch).where(lease.c.job_id == job_id)).all()


def holds_others(tx: Connection, owner: str, model: str) -> bool:
    """True if an owner holds rows of jobs that are bound to another model than this."""
    held = select(lease.c.epoch).join(job, job.c.id == lease.c.job_id).where(lease.c.owner == owner)
    return tx.scalar(held.where(job.c.model != model).limit(1)) is not None


def lock_with_job(tx: Connection, job_id: str) -> None:
    """Lock all leases of a job, then the job, in the order in which commits lock them.

    A claim that commits between the two leaves a lease whose owner may wait for the job, while this transaction
    waits for the lease. So the job is let go and both are locked again. No claim opens a lease of a locked job.
    """
    while True:
        with tx.begin_nested() as both:
            known = set(spans.lock(tx, of_job(tx, job_id)))
            catalog.lock_job(tx, job_id)
            if known.issuperset(of_job(tx, job_id)):
                return
            both.rollback()


def dead_owners(tx: Connection) -> set[str]:
    """Owners of leases that ran on this machine and have ended."""
    return dead_among(owners(tx), one_machine=of_one_machine(tx))


def abandon(tx: Connection, dead: Collection[str], *, mine: str | None = None) -> int:
    """End the leases of these owners without waiting for their expiry; returns how many.

    Their rows count a loss. Those of `mine` are given back: that owner is alive.
    """
    whose = set(dead) if mine is None else {*dead, mine}
    theirs = select(lease.c.epoch, lease.c.owner).where(lease.c.owner.in_(whose)).order_by(lease.c.epoch)
    return end_of_owners(tx, [(epoch, owner) for epoch, owner in tx.execute(theirs.with_for_update())], mine)


def end_of_owners(tx: Connection, locked: Sequence[tuple[int, str]], mine: str | None) -> int:
    """End these leases, as lost unless they are `mine`; returns how many."""
    lost = [epoch for epoch, owner in locked if owner != mine]
    return end(tx, lost, lost=True) + end(tx, [epoch for epoch, owner in locked if owner == mine])


def end(tx: Connection, epochs: Sequence[int], *, lost: bool = False) -> int:
    """Put the rows of these leases back with their saved tokens, and end the leases; returns how many.

    On PostgreSQL the caller has locked them. Rows that were `lost` with their owner count that.
    """
    for chunk in chunks(epochs):
        spans.dissolve(tx, chunk, lost=lost)
        if lost:
            losses.count(tx, chunk)
        tx.execute(update(request).where(request.c.epoch.in_(chunk)).values(epoch=None))
        tx.execute(delete(lease).where(lease.c.epoch.in_(chunk)))
    if epochs:
        wake(tx)
    return len(epochs)


def end_if_empty(tx: Connection, epochs: Collection[int]) -> None:
    """End the leases among these that hold no row any more."""
    spans.end_empty_leases(tx, spans.locked(tx, epochs))
