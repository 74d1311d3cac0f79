"""Losses: rows whose harvester died or fell silent, and which of them are suspects.

A row may take the whole harvester down: the kernel may end a container for the memory that one row takes. No
process is left then to say that an engine died with the row, so the store counts how often a row was lost with its
owner.

Every row under a lease was in flight, so the store cannot tell which one did it. A row that was lost three times is
a candidate. Few of an owner's candidates become suspects at first, and twice as many with each further loss. So an
operator who kills a harvester three times has few rows run alone, and a row that kills is found among N after
log2(N / 16) losses more.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, case, func, select, update

from conserve.store.database import schema
from conserve.store.database.bulk import afresh, matching
from conserve.store.database.connection import by_bytes

request = schema.request

CANDIDATE = 3  # losses of a row that make it a candidate
FEW = 16  # suspects at first


def count(tx: Connection, epochs: Sequence[int]) -> None:
    """Count a loss of each row that has a record under these locked leases; some become suspects.

    A suspect was alone, so that its loss is a death, as if only the engine had died.
    """
    blamed = list(candidates(tx, epochs))
    alone = case((request.c.suspect, 1), else_=0)
    lost = {
        "losses": func.coalesce(request.c.losses, 0) + 1,
        "failures": request.c.failures + alone,
        "deaths": func.coalesce(request.c.deaths, 0) + alone,
    }
    tx.execute(update(request).where(request.c.epoch.in_(epochs)).values(lost))
    for job_id, rows in groupby(sorted(blamed), key=lambda row: row[0]):
        for at in matching(tx, [request.c.position], [(position,) for _, position in rows]):
            afresh(tx, update(request).where(request.c.job_id == job_id, *at).values(suspect=True))


def candidates(tx: Connection, epochs: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield job id and position of the rows that this loss makes suspects, those lost most often first."""
    often = request.c.losses + 1 >= CANDIDATE  # this loss included
    found = select(request.c.job_id, request.c.position, request.c.losses).where(
        request.c.epoch.in_(epochs), request.c.suspect.is_(False), often
    )
    order: tuple[Any, ...] = (
        request.c.losses.desc(),
        by_bytes(tx, request.c.job_id),
        request.c.position,
    )
    rows = tx.execute(found.order_by(*order)).all()
    if rows:
        yield from ((row.job_id, row.position) for row in rows[: most(rows[0].losses + 1)])


def most(losses: int) -> int:
    """Number of rows that become suspects together, after so many losses of one of them."""
    return FEW << min(losses - CANDIDATE, 20)
