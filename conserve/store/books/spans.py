"""Spans: rows of a lease that have no record of their own.

A claim of rows that were never leased takes an interval of positions. The table `span` holds it as one row of any
length, with a bitmap of the positions that have left it: for the journal, or for a `request` record of their own
once they save tokens, come back or become suspects. Rows of a span are in their first attempt.

A transaction locks the lease before it reads its span, in a statement of its own: a span that was read together
with the lock could be older than the lock.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Update, and_, bindparam, delete, exists, insert, select, true, update

from conserve.store.database import schema
from conserve.store.database.bulk import insert_rows
from conserve.store.database.connection import chunks

lease, request, span = schema.lease, schema.request, schema.span


@dataclass(slots=True, kw_only=True)
class Span:
    """Positions `start` to `stop` of a job, without those that have left."""

    epoch: int
    job_id: str
    start: int
    stop: int
    claimed_at: float
    gone: bytearray  # bit `n` of the whole, the lowest first: position `start + n` has left
    held: int  # positions that have not
    changed: bool = False

    @classmethod
    def of(cls, job_id: str, positions: Collection[int], now: float) -> "Span":
        """Span of these positions, which need not be neighbours; its lease is yet to be opened."""
        start, stop = min(positions), max(positions) + 1
        new = cls(
            epoch=0,
            job_id=job_id,
            start=start,
            stop=stop,
            claimed_at=now,
            gone=bytearray(nothing_gone(stop - start)),
            held=stop - start,
        )
        if len(positions) < new.held:
            there = frozenset(positions)
            for position in range(start, stop):
                if position not in there:
                    new.take(job_id, position)
        return new

    def holds(self, job_id: str, position: int) -> bool:
        """True if the row is in the span."""
        if job_id != self.job_id or not self.start <= position < self.stop:
            return False
        offset = position - self.start
        return not self.gone[offset >> 3] >> (offset & 7) & 1

    def take(self, job_id: str, position: int) -> bool:
        """Let a row leave the span; False if the span does not hold it."""
        if not self.holds(job_id, position):
            return False
        offset = position - self.start
        self.gone[offset >> 3] |= 1 << (offset & 7)
        self.held -= 1
        self.changed = True
        return True

    @property
    def positions(self) -> list[int]:
        """The positions that have not left, ascending."""
        return [position for position in range(self.start, self.stop) if self.holds(self.job_id, position)]

    def record(self, position: int, **values: Any) -> dict[str, Any]:
        """Record of a row that leaves the span; it waits, unless the values name an `epoch`."""
        first = {"job_id": self.job_id, "position": position, "attempts": 1, "started_at": self.claimed_at}
        return {"epoch": None, "failures": 0, "available_at": 0.0, "suspect": False, **first, **values}


class Leased(Protocol):
    """A row and the lease under which it was claimed."""

    @property
    def epoch(self) -> int: ...

    @property
    def job_id(self) -> str: ...

    @property
    def position(self) -> int: ...


def nothing_gone(positions: int) -> bytes:
    """Bitmap of so many positions of which none has left."""
    return bytes((positions + 7) // 8)


def add(tx: Connection, new: Span, epoch: int) -> None:
    """Add the span of a new lease."""
    values = {"start": new.start, "stop": new.stop, "held": new.held, "gone": bytes(new.gone)}
    tx.execute(insert(span).values(epoch=epoch, job_id=new.job_id, claimed_at=new.claimed_at, **values))


def locked(tx: Connection, epochs: Collection[int], owner: str | None = None) -> dict[int, Span | None]:
    """Leases among these that still exist, with their spans; none can end before this transaction does.

    With an `owner`, those of other owners are left out.
    """
    alive = lock(tx, epochs, owner)
    spans = {each.epoch: each for each in read(tx, alive)}
    return {epoch: spans.get(epoch) for epoch in alive}


def lock(tx: Connection, epochs: Collection[int], owner: str | None = None) -> list[int]:
    """Lock the leases among these that still exist, of this owner if one is given, always in the same order.

    An epoch comes a second time where a standby became the primary that had not heard of the first.
    """
    alive: list[int] = []
    theirs = true() if owner is None else lease.c.owner == owner
    for chunk in chunks(sorted(epochs)):
        found = select(lease.c.epoch).where(lease.c.epoch.in_(chunk), theirs)
        alive += tx.scalars(found.order_by(lease.c.epoch).with_for_update())
    return alive


def read(tx: Connection, epochs: Collection[int]) -> list[Span]:
    """Spans of these leases."""
    found: list[Span] = []
    for chunk in chunks(list(epochs)):
        found += map(to_span, tx.execute(select(span).where(span.c.epoch.in_(chunk))))
    return found


def of_jobs(tx: Connection, job_ids: Collection[str] | None) -> list[Span]:
    """Spans of these jobs, or of all."""
    found = select(span) if job_ids is None else select(span).where(span.c.job_id.in_(job_ids))
    return [to_span(row) for row in tx.execute(found)]


def at(tx: Connection, job_id: str, position: int) -> Span | None:
    """The span that holds a row; None if the row is in none."""
    around = span.c.job_id == job_id, span.c.start <= position, span.c.stop > position
    found = map(to_span, tx.execute(select(span).where(*around)))
    return next((each for each in found if each.holds(job_id, position)), None)


def to_span(row: Any) -> Span:
    """A row of the table; `held` there is for readers that count, so it is counted again here."""
    return Span(
        epoch=row.epoch,
        job_id=row.job_id,
        start=row.start,
        stop=row.stop,
        claimed_at=row.claimed_at,
        gone=bytearray(row.gone),
        held=row.stop - row.start - int.from_bytes(row.gone, "little").bit_count(),
    )


def write(tx: Connection, changed: Iterable[Span | None]) -> None:
    """Write the spans that rows have left; an empty one is deleted."""
    touched = [each for each in changed if each is not None and each.changed]
    empty = [each.epoch for each in touched if not each.held]
    left = [{"at": each.epoch, "still": each.held, "bits": bytes(each.gone)} for each in touched if each.held]
    for chunk in chunks(empty):
        tx.execute(delete(span).where(span.c.epoch.in_(chunk)))
    if left:
        smaller: dict[str, Any] = {"held": bindparam("still"), "gone": bindparam("bits")}
        tx.execute(update(span).where(span.c.epoch == bindparam("at")).values(smaller), left)


RECORD = and_(
    request.c.job_id == bindparam("of_job"),
    request.c.position == bindparam("at"),
    request.c.epoch == bindparam("under"),
)
"""Condition on the record of a row that is still under its lease."""


def record(
    tx: Connection,
    rows: Sequence[tuple[Leased, dict[str, Any]]],
    later: Update,
    *,
    alive: dict[int, Span | None],
    held: bool,
) -> None:
    """Set columns in the records of rows under leases; a row of a span leaves it for a record with them.

    `later` updates the `RECORD` of a row that has one; the new value of a column is its parameter `new_COLUMN`.
    `alive` are the leases that still exist, which `locked` found. `held` rows stay under their leases, others wait.
    A row that is no longer under its lease stays as it is.
    """
    first, others = [], []
    for row, columns in rows:
        rest = alive.get(row.epoch)
        if rest is not None and rest.take(row.job_id, row.position):
            first.append(rest.record(row.position, epoch=row.epoch if held else None, **columns))
        elif row.epoch in alive:
            new = {f"new_{name}": value for name, value in columns.items()}
            others.append({"of_job": row.job_id, "at": row.position, "under": row.epoch, **new})
    write(tx, alive.values())
    insert_rows(tx, request, first)
    if others:
        tx.execute(later, others)


def still_held(tx: Connection, alive: dict[int, Span | None], rows: Sequence[Leased]) -> set[tuple[str, int]]:
    """Job ids and positions of the rows among these that are under their leases; `locked` found these alive."""
    found, others = set(), []
    for row in rows:
        rest = alive.get(row.epoch)
        if rest is not None and rest.holds(row.job_id, row.position):
            found.add((row.job_id, row.position))
        elif row.epoch in alive:
            others.append(row)
    under: set[tuple[int, str, int]] = set()
    for chunk in chunks(sorted({row.epoch for row in others})):
        records = select(request.c.epoch, request.c.job_id, request.c.position)
        under.update(map(tuple, tx.execute(records.where(request.c.epoch.in_(chunk)))))
    return found | {(r.job_id, r.position) for r in others if (r.epoch, r.job_id, r.position) in under}


def dissolve(tx: Connection, epochs: Sequence[int], *, lost: bool) -> None:
    """Give each row of these spans, whose leases are locked and about to end, a waiting record."""
    found = read(tx, epochs)
    first = {"losses": 1} if lost else {}
    insert_rows(
        tx, request, [each.record(position, **first) for each in found for position in each.positions]
    )
    for chunk in chunks([each.epoch for each in found]):
        tx.execute(delete(span).where(span.c.epoch.in_(chunk)))


def end_empty_leases(tx: Connection, alive: dict[int, Span | None]) -> None:
    """End the leases that hold no row any more, of those that are locked."""
    spent = [epoch for epoch, rest in alive.items() if rest is None or not rest.held]
    records = exists().where(request.c.epoch == lease.c.epoch)
    for chunk in chunks(spent):
        tx.execute(delete(lease).where(lease.c.epoch.in_(chunk), ~records))


def drop_unleased(tx: Connection, job_id: str) -> None:
    """Drop a job's spans whose leases are gone, which only damage leaves."""
    tx.execute(delete(span).where(span.c.job_id == job_id, span.c.epoch.not_in(select(lease.c.epoch))))
