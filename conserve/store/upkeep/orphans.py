"""Orphans: answers in a job's folder that the database does not name, because it went back in time.

A database that was recovered to an earlier moment, or replaced by an older copy, names fewer shards than lie on
disk. Rows of these shards are queued by its record, and would be asked again. `conserve check --repair` registers
them instead. Files that crashes leave are no orphans: their rows are in the journal or in another shard. Shards of
failed rows are no orphans either, since `retry` drops such files; their rows are asked again.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, insert, select

from conserve.store.books import leases, places, shards
from conserve.store.books.places import Positions
from conserve.store.database import counters, schema
from conserve.store.files import digests, home
from conserve.store.files.objects import FilePath, ObjectPath, below, source
from conserve.words import count

journal, shard = schema.journal, schema.shard

Done = np.ndarray[Any, np.dtype[np.bool_]]


class Orphan(NamedTuple):
    """A shard that the database does not name."""

    path: FilePath
    positions: Positions


def on_disk(where: FilePath, job_id: str) -> list[FilePath]:
    """Shards in a job's folder, oldest first.

    Listed before the database is read, each was registered by then or has its rows in the journal, unless the
    database went back in time.
    """
    folder = home.job_folder(where, job_id) / home.RESULTS
    if isinstance(folder, ObjectPath):
        entries = sorted(folder.entries(), key=lambda entry: (entry.modified_at, entry.path.name))
        return [entry.path for entry in entries]
    lying: list[Path] = sorted(folder.glob("[!.]*.parquet"), key=lambda path: (modified_ns(path), path.name))
    return [*lying]


def modified_ns(path: Path) -> int:
    """Time of the last change of a file; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def among(tx: Connection, where: FilePath, job_id: str, there: Sequence[FilePath]) -> list[Orphan]:
    """Orphans among the shards that lay on disk before this transaction began."""
    registered = shards.files(tx, [job_id])
    names = {file.file for file in registered}
    unnamed = [path for path in there if below(path, where) not in names]
    if not unnamed:
        return []
    num_rows = int(tx.scalar(select(schema.job.c.num_rows).where(schema.job.c.id == job_id)) or 0)
    in_shards, in_journal = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
    for file in registered:
        mark(in_shards, places.content(where / file.file, file.seal).positions)
    found = tx.scalars(select(journal.c.position).where(journal.c.job_id == job_id))
    mark(in_journal, np.fromiter(found, np.int64))
    return list(undone(unnamed, in_shards, in_journal, asked(where, job_id)))


def mark(done: Done, positions: Positions) -> None:
    """Mark positions that a job has."""
    done[positions[(positions >= 0) & (positions < len(done))]] = True


def asked(where: FilePath, job_id: str) -> Positions | None:
    """Row index of each position, as the requests have it; None if they cannot be read."""
    try:
        with home.damage_apart(path := home.requests_file(where, job_id)):
            requests = pq.read_table(source(path), columns=["row_index"])
    except (OSError, pa.ArrowException):
        return None
    return np.asarray(requests["row_index"].to_numpy(), np.int64)


def undone(
    unnamed: Collection[FilePath], in_shards: Done, in_journal: Done, row_indexes: Positions | None
) -> Iterator[Orphan]:
    """Yield the shards of answers, at least one of which the database lacks, and none of which is in a shard."""
    for path in unnamed:
        positions = answers(path, row_indexes)
        if not len(positions) or positions.min() < 0 or positions.max() >= len(in_shards):
            continue
        if in_shards[positions].any() or in_journal[positions].all():
            continue
        in_shards[positions] = True
        yield Orphan(path, positions)


def answers(path: FilePath, row_indexes: Positions | None) -> Positions:
    """Positions of a shard of answers; none if it has failed rows, cannot be read or answers other requests."""
    try:
        columns = ["position", "row_index", "error_type"]
        with home.damage_apart(path):
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
    tx: Connection, where: FilePath, job_id: str, there: Sequence[FilePath], *, now: float
) -> list[str]:
    """Register the orphans of a job; returns the changes in words.

    The job's leases end, and epochs go on from the present, because harvesters of the time that was lost may live.
    """
    found = among(tx, where, job_id, there)
    if not found:
        return []
    leases.end(tx, list(tx.scalars(select(schema.lease.c.epoch).where(schema.lease.c.job_id == job_id))))
    counters.never_again(tx, now=now)
    for orphan in found:
        seal = digests.seal(orphan.path)
        tx.execute(
            insert(shard).values(
                job_id=job_id,
                file=below(orphan.path, where),
                failed=False,
                num_rows=len(orphan.positions),
                created_at=now,
                digest=seal.digest,
                bytes=seal.bytes,
            )
        )
    rows = sum(len(orphan.positions) for orphan in found)
    return [f"{count(rows, 'answer that lay on disk was', 'answers that lay on disk were')} taken in"]
