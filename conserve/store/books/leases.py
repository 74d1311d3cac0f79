"""Leases: which owner holds which rows until when.

A lease has an epoch that no other lease gets. An owner whose lease is gone finds its epoch gone too and can commit
nothing (fencing, as with Chubby's sequencers and ZooKeeper's zxids).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, delete, exists, insert, select, update

from conserve.store.database import schema
from conserve.store.database.connection import chunks

job, lease, request = schema.job, schema.lease, schema.request


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
