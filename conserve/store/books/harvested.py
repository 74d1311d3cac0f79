"""Harvested tokens by quarter of an hour, as they are seen: what forecasts are made from."""

from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, case, delete, func, select

from conserve.store.books.slots import SLOT_S, HarvestedQuarter, is_slot
from conserve.store.database import schema
from conserve.store.database.bulk import upsert_into

harvested = schema.harvested

KEPT_S = 8 * 7 * 86_400  # the same hour of eight weeks


def note(tx: Connection, tokens: int, *, since: float, now: float) -> None:
    """Add tokens that were computed evenly between two moments, in which a harvester had rows to run."""
    for slot, begin, end in pieces(since, now):
        add(tx, slot, tokens * (end - begin) / (now - since), begin, end)


def pieces(since: float, now: float) -> Iterator[tuple[int, float, float]]:
    """Cut an interval at the ends of slots: (slot, begin, end). One that lasts a day is damage of a clock."""
    begin = max(since, now - 86_400.0)
    while begin < now:
        slot = int(begin // SLOT_S)
        end = min(now, float((slot + 1) * SLOT_S))
        yield slot, begin, end
        begin = end


def add(tx: Connection, slot: int, tokens: float, begin: float, end: float) -> None:
    """Add to one slot; time that another harvester has counted counts once."""
    first = upsert_into(tx, harvested).values(slot=slot, tokens=tokens, busy_s=end - begin, busy_until=end)
    counted = larger(harvested.c.busy_until, begin)
    more = {
        "tokens": harvested.c.tokens + tokens,
        "busy_s": harvested.c.busy_s + case((counted < end, end - counted), else_=0.0),
        "busy_until": larger(harvested.c.busy_until, end),
    }
    tx.execute(first.on_conflict_do_update(index_elements=["slot"], set_=more))


def larger(column: ColumnElement[float], value: float) -> ColumnElement[float]:
    """The larger of a column and a value, in every database's SQL."""
    return case((column > value, column), else_=value)


def slots(tx: Connection) -> list[HarvestedQuarter]:
    """All slots, the oldest first."""
    columns = harvested.c.slot, harvested.c.tokens, harvested.c.busy_s
    return [
        HarvestedQuarter(*row)
        for row in tx.execute(select(*columns).order_by(harvested.c.slot))
        if is_slot(row)
    ]


def forget_old(tx: Connection, *, now: float) -> None:
    """Drop slots of more than eight weeks ago, by the newest of them too: the clock may be ahead for a while."""
    newest = tx.scalar(select(func.max(harvested.c.slot)))
    if newest is not None:
        oldest = min(int((now - KEPT_S) // SLOT_S), newest - KEPT_S // SLOT_S)
        tx.execute(delete(harvested).where(harvested.c.slot < oldest))
