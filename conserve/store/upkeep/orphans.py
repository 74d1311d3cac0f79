"""Orphans: answers in a job's folder that the database does not name, because it went back in time.

A database that was recovered to an earlier moment, or replaced by an older copy, names fewer shards than lie on
disk. Rows of these shards are queued by its record, and would be asked again. `conserve check --repair` registers
them instead. Files that crashes leave are no orphans: their rows are in the journal or in another shard. Shards of
failed rows are no orphans either, since `retry` drops such files; their rows are asked again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, select

from conserve.store.books import leases, places, shards
from conserve.store.books.places import Positions
from conserve.store.books.shards import ShardFile
from conserve.store.database import counters, schema
from conserve.store.files import digests, layout, os_errors
from conserve.store.files.objects import FilePath, below, source
from conserve.store.files.place import place_of
from conserve.units import count

journal = schema.journal

Done = np.ndarray[Any, np.dtype[np.bool_]]
Known = Mapping[int, Positions]
"""Positions of registered shards by the shards' ids; other shards are read."""


class Orphan(NamedTuple):
    """A shard that the database does not name, and so has no id for; its seal is taken by `sealed`."""

    file: ShardFile
    path: FilePath
    positions: Positions

    def sealed(self) -> "Orphan":
        """The orphan with its seal, for which its file is read to the end."""
        return self._replace(file=replace(self.file, seal=digests.seal(self.path)))


def on_disk(where: FilePath, job_id: str) -> list[FilePath]:
    """Shards in a job's folder, oldest first.

    Listed before the database is read, each was registered by then or has its rows in the journal, unless the
    database went back in time.
    """
    return place_of(layout.job_folder(where, job_id) / layout.RESULTS).parquet_by_age()


def among(
    tx: Connection, where: FilePath, job_id: str, there: Sequence[FilePath], known: Known
) -> list[Orphan]:
    """Orphans among the shards that lay on disk before this transaction began."""
    names = {file.file for file in shards.files(tx, [job_id])}
    unnamed = [path for path in there if below(path, where) not in names]
    if not unnamed:
        return []
    row_indexes = asked(where, job_id)
    found = []
    for path in unnamed:
        positions = answers(path, row_indexes)
        file = ShardFile(
            id=0, job_id=job_id, file=below(path, where), failed=False, num_rows=len(positions), seal=None
        )
        found.append(Orphan(file, path, positions))
    return undone(tx, where, job_id, found, known)


def undone(
    tx: Connection, where: FilePath, job_id: str, lying: Sequence[Orphan], known: Known
) -> list[Orphan]:
    """Shards of answers, at least one of which the database lacks, and none of which is in a shard."""
    num_rows = int(tx.scalar(select(schema.job.c.num_rows).where(schema.job.c.id == job_id)) or 0)
    in_shards, in_journal = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
    for file in shards.files(tx, [job_id]):
        is_known = file.id in known
        mark(
            in_shards, known[file.id] if is_known else places.content(where / file.file, file.seal).positions
        )
    found = tx.scalars(select(journal.c.position).where(journal.c.job_id == job_id))
    mark(in_journal, np.fromiter(found, np.int64))
    left = []
    for orphan in lying:
        positions = orphan.positions
        if not len(positions) or positions.min() < 0 or positions.max() >= num_rows:
            continue
        if not in_shards[positions].any() and not in_journal[positions].all():
            in_shards[positions] = True
            left.append(orphan)
    return left


def mark(done: Done, positions: Positions) -> None:
    """Mark positions that a job has."""
    done[positions[(positions >= 0) & (positions < len(done))]] = True


def asked(where: FilePath, job_id: str) -> Positions | None:
    """Row index of each position, as the requests have it; None if they cannot be read."""
    try:
        with os_errors.damage_apart(path := layout.requests_file(where, job_id)):
            requests = pq.read_table(source(path), columns=["row_index"])
    except (OSError, pa.ArrowException):
        return None
    return np.asarray(requests["row_index"].to_numpy(), np.int64)


def answers(path: FilePath, row_indexes: Positions | None) -> Positions:
    """Positions of a shard of answers; none if it has failed rows, cannot be read or answers other requests."""
    try:
        columns = ["position", "row_index", "error_type"]
        with os_errors.damage_apart(path):
            table = pq.read_table(source(path), columns=columns, page_checksum_verification=True)
    except (OSError, pa.ArrowException):
        return places.NONE
    positions = np.asarray(table["position"].to_numpy(), np.int64)
    if table["error_type"].null_count < len(positions):
        return places.NONE
    if row_indexes is not None and not fits(positions, table["row_index"].to_numpy(), row_indexes):
        return places.NONE
    return positions


def fits(positions: Positions, found: Positions, row_indexes: Positions) -> bool:
    """True if the results at these positions answer the requests that are there."""
    if len(positions) and positions.max() >= len(row_indexes):
        return False
    return bool(np.array_equal(row_indexes[positions], found))


def take_in(
    tx: Connection, where: FilePath, job_id: str, lying: Sequence[Orphan], known: Known, *, now: float
) -> dict[int, Orphan]:
    """Register those of a job's shards with their seals that are orphans still; returns them by their new ids.

    The job's leases end, and epochs go on from the present, because harvesters of the time that was lost may live.
    """
    found = undone(tx, where, job_id, lying, known) if lying else []
    if not found:
        return {}
    leases.end(tx, list(tx.scalars(select(schema.lease.c.epoch).where(schema.lease.c.job_id == job_id))))
    counters.never_again(tx, now=now)
    return {shards.add(tx, orphan.file, now=now): orphan for orphan in found}


def told(taken: Collection[Orphan]) -> list[str]:
    """Orphans that were taken in, in words."""
    rows = sum(len(orphan.positions) for orphan in taken)
    said = f"{count(rows, 'answer that lay on disk was', 'answers that lay on disk were')} taken in"
    return [said] if taken else []
