"""Damage: files of jobs that cannot be relied on, and the next command.

`unreadable` compares files with the store's record of them: existence, length and digest. It reads each file once a
day (`digests`). Queries leave out the files that it names; `conserve check` looks further (`checking`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from conserve.errors import StoreForbidden
from conserve.store.books import catalog
from conserve.store.books.journal import is_whole
from conserve.store.books.shards import ShardFile
from conserve.store.files import digests, layout, marks
from conserve.store.files.digests import Memory, Seal
from conserve.store.files.objects import FilePath, ObjectPath, below


class StorePart(StrEnum):
    """Part of a job or of the store that may be damaged."""

    SHARD = "shard"
    """Results; `file` is the one that the table `shard` names."""
    ORPHAN = "orphan"
    """Answers on disk that the table `shard` does not name (`orphans`)."""
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


Compare = Callable[[FilePath, Seal | None, Memory | None], str | None]

NAMED_PARTS = {
    layout.REQUESTS: StorePart.REQUESTS,
    layout.INPUTS: StorePart.INPUTS,
    marks.MARK: StorePart.MARK,
}

FILES = (StorePart.SHARD, StorePart.REQUESTS, StorePart.INPUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Damage of one part; `fix` is the next command or, where none helps, what is left to do."""

    job_id: str | None  # None if the part is not one job's
    part: StorePart
    file: str  # relative to the place of the store's files
    what: str  # to follow the file's name
    fix: str

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        whose = f"job {self.job_id}: " if self.job_id else ""
        return f"{whose}{self.file} {self.what}; {self.fix}"


def unreadable(
    where: FilePath,
    jobs: Sequence[catalog.JobRecord],
    shards: Iterable[ShardFile],
    *,
    now: float,
    parts: Collection[StorePart] = FILES,
    known: Memory | None = None,
    compare: Compare = digests.fault,
) -> list[Damage]:
    """Damages of the files of these jobs and of these shards, in the place `where`.

    `shards` are from `shards.files(tx, job_ids)`, read in the transaction that the caller shows. `parts` restricts
    the comparison: a query of results alone need not have the requests read. A caller that asks again and again
    has the memory of the place and gives it as `known`; one that must not take an outage of storage for damage has
    files compared by `digests.damage`. Input files outside the store are the user's and not
    compared.
    Of objects in a bucket only the presence and the length are looked at, in listings of the jobs' folders: a
    service compares what it keeps with checksums of its own.
    """
    if isinstance(where, ObjectPath):
        return missing_objects(where, recorded_files(where, jobs, shards), parts)
    with digests.memory(where, now=now) if known is None else nullcontext(known) as memory:
        wanted = (file for file in recorded_files(where, jobs, shards) if file.part in parts)
        return [damage for file in wanted if (damage := look_at(where, file, memory, compare))]


def missing_objects(
    where: ObjectPath, files: "Iterable[RecordedFile]", parts: Collection[StorePart]
) -> list[Damage]:
    """Damages of objects that are missing, or have another length."""
    by_job: dict[str, list[RecordedFile]] = defaultdict(list)
    for file in files:
        if file.part in parts:
            by_job[file.job_id].append(file)
    found = []
    for job_id, wanted in by_job.items():
        entries = layout.job_folder(where, job_id).entries()
        lengths: dict[FilePath, int] = {entry.path: entry.bytes for entry in entries}
        for file in wanted:
            length = lengths.get(file.path)
            what = "is missing" if length is None else None
            if length is not None and file.seal is not None:
                what = digests.length_fault(length, file.seal)
            if what:
                found.append(damaged(job_id, file.part, below(file.path, where), what))
    return found


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file that the database records, with its seal, or None for a file of an earlier version."""

    job_id: str
    part: StorePart
    path: FilePath
    seal: Seal | None


def recorded_files(
    where: FilePath, jobs: Sequence[catalog.JobRecord], shards: Iterable[ShardFile]
) -> Iterator[RecordedFile]:
    """Yield the requests and copied inputs of these jobs, then these shards."""
    for job in jobs:
        path = layout.requests_file(where, job.id)
        yield RecordedFile(job.id, StorePart.REQUESTS, path, job.files.get(layout.REQUESTS))
        if job.source.copied and not job.source.linked:  # a link is the user's file
            path = layout.inputs_file(where, job.id)
            yield RecordedFile(job.id, StorePart.INPUTS, path, job.files.get(layout.INPUTS))
    for shard in shards:
        yield RecordedFile(shard.job_id, StorePart.SHARD, where / shard.file, shard.seal)


def look_at(where: FilePath, file: RecordedFile, known: Memory, compare: Compare) -> Damage | None:
    """Damage of one file; None if it has none."""
    what = compare(file.path, file.seal, known)
    return damaged(file.job_id, file.part, below(file.path, where), what) if what else None


def damaged(job_id: str, part: StorePart, file: str, what: str) -> Damage:
    """Damage of a job's part, with `conserve check` as the next command."""
    return Damage(job_id=job_id, part=part, file=file, what=what, fix=f"run: conserve check {job_id}")


def unread(where: FilePath, job_id: str, error: StoreForbidden) -> Damage:
    """A file of a job that is out of reach, which repairs leave as it is."""
    path = error.file
    assert isinstance(path, Path | ObjectPath)
    part = NAMED_PARTS.get(path.name, StorePart.SHARD)
    fix = f"{error.step}, and run: conserve check {job_id}"
    what = f"cannot be read ({error.why})"
    return Damage(job_id=job_id, part=part, file=below(path, where), what=what, fix=fix)


def damaged_rows(rows: Iterable[Any]) -> list[Damage]:
    """Damages of these rows of the table `journal`, by their checksums."""
    return [
        damaged(row.job_id, StorePart.JOURNAL, f"the journal's row {row.position}", "is not what was written")
        for row in rows
        if not is_whole(row)
    ]
