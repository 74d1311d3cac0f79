"""Damage: files of jobs that cannot be relied on, and the next command.

`unreadable` compares files with the store's record of them: existence, length and digest. It reads each file once a
day (`digests`). Queries leave out the files that it names; `conserve check` looks further (`checking`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from conserve.store.books import catalog
from conserve.store.books.journal import is_whole
from conserve.store.books.shards import ShardFile
from conserve.store.files import digests, home
from conserve.store.files.digests import Memory, Seal


class StorePart(StrEnum):
    """Part of a job or of the store that may be damaged."""

    SHARD = "shard"
    """Results; `file` is the one that the table `shard` names."""
    REQUESTS = "requests"
    INPUTS = "inputs"
    JOURNAL = "journal"
    """Results that are not in a shard yet; `file` names the row."""
    ROWS = "rows"
    """Positions that are in no place or in several."""
    COUNTERS = "counters"
    RECORD = "record"
    """The row of the table `job`."""
    MARK = "mark"
    """The mark in the job's folder (`marks`)."""
    DATABASE = "database"
    SPILL = "spill"


FILES = (StorePart.SHARD, StorePart.REQUESTS, StorePart.INPUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Damage of one part; `fix` is the next command or, where none helps, what is left to do."""

    job_id: str | None  # None if the part is not one job's
    part: StorePart
    file: str  # relative to the home
    what: str  # to follow the file's name
    fix: str

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        whose = f"job {self.job_id}: " if self.job_id else ""
        return f"{whose}{self.file} {self.what}; {self.fix}"


def unreadable(
    where: Path,
    jobs: Sequence[catalog.Job],
    shards: Iterable[ShardFile],
    *,
    now: float,
    parts: Collection[StorePart] = FILES,
) -> list[Damage]:
    """Damages of the files of these jobs and of these shards, in the home `where`.

    `shards` are from `shards.files(tx, job_ids)`, read in the transaction that the caller shows. `parts` restricts
    the comparison: a query of results alone need not have the requests read. Input files outside the home are the
    user's and not compared.
    """
    with digests.memory(where, now=now) as known:
        wanted = (file for file in recorded_files(where, jobs, shards) if file.part in parts)
        return [damage for file in wanted if (damage := look_at(where, file, known))]


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file that the database records, with its seal, or None for a file of an earlier version."""

    job_id: str
    part: StorePart
    path: Path
    seal: Seal | None


def recorded_files(
    where: Path, jobs: Sequence[catalog.Job], shards: Iterable[ShardFile]
) -> Iterator[RecordedFile]:
    """Yield the requests and copied inputs of these jobs, then these shards."""
    for job in jobs:
        path = home.requests_file(where, job.id)
        yield RecordedFile(job.id, StorePart.REQUESTS, path, job.files.get(home.REQUESTS))
        if job.source.copied and not job.source.linked:  # a link is the user's file
            path = home.inputs_file(where, job.id)
            yield RecordedFile(job.id, StorePart.INPUTS, path, job.files.get(home.INPUTS))
    for shard in shards:
        yield RecordedFile(shard.job_id, StorePart.SHARD, where / shard.file, shard.seal)


def look_at(where: Path, file: RecordedFile, known: Memory | None = None) -> Damage | None:
    """Damage of one file; None if it has none."""
    what = digests.fault(file.path, file.seal, known)
    return damaged(file.job_id, file.part, str(file.path.relative_to(where)), what) if what else None


def damaged(job_id: str, part: StorePart, file: str, what: str) -> Damage:
    """Damage of a job's part, with `conserve check` as the next command."""
    return Damage(job_id=job_id, part=part, file=file, what=what, fix=f"run: conserve check {job_id}")


def damaged_rows(rows: Iterable[Any]) -> list[Damage]:
    """Damages of these rows of the table `journal`, by their checksums."""
    return [
        damaged(row.job_id, StorePart.JOURNAL, f"the journal's row {row.position}", "is not what was written")
        for row in rows
        if not is_whole(row)
    ]
