"""The five places of a job's positions: never leased, spans of leases, `request`, `journal`, shards.

Each position is in exactly one of them (docs/explanation/rows.md). So the positions of an unreadable shard are
known: they were leased once and are in no other place.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, bindparam, select

from conserve.store.books import catalog, spans
from conserve.store.database import schema
from conserve.store.files import digests
from conserve.store.files.digests import Seal
from conserve.store.files.objects import FilePath, source
from conserve.store.files.os_errors import damage_apart

POSITIONS = [
    select(table.c.position).where(table.c.job_id == bindparam("job_id"))
    for table in (schema.request, schema.journal)
]

Positions = np.ndarray[Any, np.dtype[np.int64]]
NONE: Positions = np.zeros(0, np.int64)


class Content(NamedTuple):
    """The positions that a shard holds, or why they cannot be read."""

    positions: Positions
    fault: str | None = None


def content(path: FilePath, seal: Seal | None) -> Content:
    """Read the positions of a shard, unless the file differs from its seal.

    Raises `StoreForbidden` for a file that is out of reach: its rows must be taken for neither lost nor queued.
    """
    if fault := digests.damage(path, seal):
        return Content(NONE, fault)
    try:
        with damage_apart(path):
            table = pq.read_table(source(path), columns=["position"], page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        return Content(NONE, f"is damaged ({str(error).splitlines()[0]})")
    return Content(np.asarray(table["position"].to_numpy(), np.int64))


def cursor(job: catalog.JobRecord) -> int:
    """First position that was never leased; one outside the job, which is damage, is brought to its nearest end."""
    return min(max(job.next_position, 0), job.num_rows)


def times_found(tx: Connection, job: catalog.JobRecord, shards: Iterable[Positions]) -> Positions:
    """Count in how many places each position is, of spans, `request`, the journal and these shards.

    Up to the cursor, 1 is right. The result is longer than the job's cursor if a position beyond it is in a place,
    which is damage.
    """
    found = [*shards, *(np.array(each.positions, np.int64) for each in spans.of_jobs(tx, [job.id]))]
    found += (np.fromiter(tx.scalars(rows, {"job_id": job.id}), np.int64) for rows in POSITIONS)
    every = np.concatenate(found)
    return np.bincount(every[(every >= 0) & (every < job.num_rows)], minlength=cursor(job))


def last(tx: Connection, job_id: str) -> int:
    """Last position of a job that is in a span, in `request` or in the journal; -1 if none is."""
    found = [position for span in spans.of_jobs(tx, [job_id]) for position in span.positions]
    found += (position for rows in POSITIONS for position in tx.scalars(rows, {"job_id": job_id}))
    return max(found, default=-1)


def lost(tx: Connection, job: catalog.JobRecord, readable: Iterable[Positions]) -> list[int]:
    """Positions that are in no place, if only these of the job's shards can be read."""
    return [int(position) for position in np.flatnonzero(times_found(tx, job, readable) == 0)]
