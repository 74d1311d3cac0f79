"""Losses: rows whose harvester, or whose server, died with them, and which of them are suspects.

A row may take the whole harvester down: the kernel may end a container for the memory that one row takes. No
process is left then to say that an engine died with the row, so the store counts how often a row was lost with its
owner. A row may take a whole API server down too, and all that its harvester sees are broken connections: a loss of
each row that the server had.

The store cannot tell which row did it. A row that was lost three times is a candidate. Few of the candidates that
are lost together become suspects at first, and twice as many with each further loss. So an operator who kills a
harvester or a server three times has few rows run alone, and a row that kills is found among N after log2(N / 16)
losses more.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, case, func, select, update

from conserve.store.database import schema
from conserve.store.database.bulk import afresh, matching

request = schema.request

CANDIDATE = 3  # losses of a row that make it a candidate
FEW = 16  # suspects at first

CANDIDATES = select(request.c.losses, request.c.job_id, request.c.position).where(
    request.c.losses >= CANDIDATE, request.c.suspect.is_(False)
)


def count(tx: Connection, epochs: Sequence[int]) -> None:
    """Count a loss of each row that has a record under these locked leases; some become suspects.

    A suspect was alone, so that its loss is a death, as if only the engine had died.
    """
    alone = case((request.c.suspect, 1), else_=0)
    lost = {
        "losses": func.coalesce(request.c.losses, 0) + 1,
        "failures": request.c.failures + alone,
        "deaths": func.coalesce(request.c.deaths, 0) + alone,
    }
    tx.execute(update(request).where(request.c.epoch.in_(epochs)).values(lost))
    suspect(tx, tx.execute(CANDIDATES.where(request.c.epoch.in_(epochs))))


def blame(tx: Connection, lost: Collection[tuple[str, int]]) -> None:
    """Make suspects of some of the rows, by job id and position, whose loss with one server is counted already."""
    found: list[Any] = []
    for job_id, rows in by_job(lost):
        for at in matching(tx, [request.c.position], [(position,) for position in rows]):
            found += tx.execute(CANDIDATES.where(request.c.job_id == job_id, *at))
    suspect(tx, found)


def suspect(tx: Connection, candidates: Iterable[Any]) -> None:
    """Make suspects of the candidates that were lost most often, of as many as `most` says."""
    often = sorted(map(tuple, candidates), key=lambda row: (-row[0], *row[1:]))
    blamed = often[: most(often[0][0])] if often else []
    for job_id, rows in by_job([(job_id, position) for _, job_id, position in blamed]):
        for at in matching(tx, [request.c.position], [(position,) for position in rows]):
            afresh(tx, update(request).where(request.c.job_id == job_id, *at).values(suspect=True))


def by_job(rows: Collection[tuple[str, int]]) -> Iterable[tuple[str, list[int]]]:
    """Positions of the rows of each job."""
    for job_id, some in groupby(sorted(rows), key=lambda row: row[0]):
        yield job_id, [position for _, position in some]


def most(losses: int) -> int:
    """Number of rows that become suspects together, after so many losses of one of them."""
    return FEW << min(losses - CANDIDATE, 20)
