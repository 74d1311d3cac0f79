"""Damage: which files of which jobs cannot be relied on, and the next command.

`unreadable` compares files with what the store knows of them: whether they are there, how long they are, and their
digests. It reads each file once a day (`digests`). Queries leave out what it names; `conserve check` looks further
(`checking`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from conserve.store.books import catalog
from conserve.store.books.journal import is_whole
from conserve.store.files import digests, home
from conserve.store.files.digests import Memory, Seal


class Part(StrEnum):
    """What of a job, or of the store, is damaged."""

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
    """The file in the job's folder that says whose it is (`marks`)."""
    DATABASE = "database"
    SPILL = "spill"


FILES = (Part.SHARD, Part.REQUESTS, Part.INPUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not what it was; `fix` is a command where one helps, else what is left to do."""

    job_id: str | None  # None where it is no job's alone
    part: Part
    file: str  # relative to the home
    what: str  # to be read behind the file's name
    fix: str

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        whose = f"job {self.job_id}: " if self.job_id else ""
        return f"{whose}{self.file} {self.what}; {self.fix}"


class ShardFile(Protocol):
    """A row of the table `shard`, as `shards.files` reads them."""

    @property
    def job_id(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def seal(self) -> Seal | None: ...


def unreadable(
    where: Path,
    jobs: Sequence[catalog.Job],
    shards: Iterable[ShardFile],
    *,
    now: float,
    parts: Collection[Part] = FILES,
) -> list[Damage]:
    """The files of these jobs and these shards that must not be read, in the home `where`.

    `shards` are those of `shards.files(tx, job_ids)`, read in the transaction whose picture is to be shown. `parts`
    restricts what is looked at: a query that reads results alone need not have the requests read. Input files that
    lie elsewhere are the user's, and not looked at.
    """
    with digests.memory(where, now=now) as known:
        wanted = (file for file in named_files(where, jobs, shards) if file.part in parts)
        return [damage for file in wanted if (damage := look_at(where, file, known))]


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that the database says is there."""

    job_id: str
    part: Part
    path: Path
    seal: Seal | None


def named_files(where: Path, jobs: Sequence[catalog.Job], shards: Iterable[ShardFile]) -> Iterator[NamedFile]:
    """Every file of these jobs, the requests first."""
    for job in jobs:
        path = home.requests_file(where, job.id)
        yield NamedFile(job.id, Part.REQUESTS, path, job.files.get(home.REQUESTS))
        if job.source.copied and not job.source.linked:  # a link is the user's file
            path = home.inputs_file(where, job.id)
            yield NamedFile(job.id, Part.INPUTS, path, job.files.get(home.INPUTS))
    for shard in shards:
        yield NamedFile(shard.job_id, Part.SHARD, where / shard.file, shard.seal)


def look_at(where: Path, file: NamedFile, known: Memory | None = None) -> Damage | None:
    """The damage of one file, if it has any."""
    what = digests.fault(file.path, file.seal, known)
    return damaged(file.job_id, file.part, str(file.path.relative_to(where)), what) if what else None


def damaged(job_id: str, part: Part, file: str, what: str) -> Damage:
    """Damage that `conserve check` can look at further."""
    return Damage(job_id=job_id, part=part, file=file, what=what, fix=f"run: conserve check {job_id}")


def damaged_rows(rows: Iterable[Any]) -> list[Damage]:
    """Those of these rows of the table `journal` that are not what was written."""
    return [
        damaged(row.job_id, Part.JOURNAL, f"the journal's row {row.position}", "is not what was written")
        for row in rows
        if not is_whole(row)
    ]
