"""Checking: everything that the database names must exist, be as it was written, and add up.

Files are read from end to end, even if they were found whole today. Results are counted again: each position of a
job is in exactly one of five places (`places`), and the job's counters are the sums over its results.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlalchemy import Connection, text

from conserve.errors import DatabaseDamaged, JobNotFound, StoreDamaged, StoreForbidden, first_line
from conserve.store.books import catalog, places, shards
from conserve.store.books.journal import is_whole
from conserve.store.books.mounted import require_folders
from conserve.store.books.places import Content
from conserve.store.books.results import TOKEN_COUNTS, decode
from conserve.store.books.shards import ShardFile
from conserve.store.books.states import ENDED_EARLY, JobState
from conserve.store.database.store import Store
from conserve.store.files import digests, layout, marks, os_errors
from conserve.store.files.digests import Seal
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, below, source
from conserve.store.files.place import place_of
from conserve.store.upkeep import orphans, records
from conserve.store.upkeep.damage import Damage, RecordedFile, StorePart, damaged, recorded_files, unread
from conserve.store.upkeep.orphans import Orphan
from conserve.units import count

MOST_NAMED = 5  # rows named in one sentence


@dataclass(slots=True, kw_only=True)
class Checked:
    """Numbers of jobs, files and bytes that were checked, and the damages found."""

    jobs: int = 0
    files: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)


class JobCounters(NamedTuple):
    """Sums over results, as the table `job` keeps them."""

    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0

    def plus(self, other: "JobCounters") -> "JobCounters":
        """Add two sums."""
        return JobCounters(*(one + two for one, two in zip(self, other, strict=True)))


class Read(NamedTuple):
    """A shard that was read: its positions, and the sums over its rows."""

    content: Content
    counts: JobCounters = JobCounters()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAudit:
    """A job, its shards and the places of its positions, as one transaction sees them."""

    job: catalog.JobRecord
    shards: Sequence[ShardFile]
    reads: Sequence[Read]  # of the shards, in their order
    damaged_rows: Sequence[int]  # positions of damaged journal rows
    times: places.Positions  # in how many places each position is
    counts: JobCounters  # over all results that can be read

    @property
    def lost(self) -> list[int]:
        """Positions that are in no place."""
        return [int(position) for position in np.flatnonzero(self.times == 0)]

    @property
    def doubled(self) -> list[int]:
        """Positions that are in several places."""
        return [int(position) for position in np.flatnonzero(self.times > 1)]

    @property
    def beyond(self) -> list[int]:
        """Positions at or past the cursor, so never leased by the record, that are in a place all the same."""
        start = places.cursor(self.job)
        return [start + int(position) for position in np.flatnonzero(self.times[start:])]

    @property
    def positions(self) -> dict[int, places.Positions]:
        """Positions in the shards that can be read, by the shards' ids."""
        pairs = zip(self.shards, self.reads, strict=True)
        return {shard.id: read.content.positions for shard, read in pairs}

    @property
    def unreadable_shards(self) -> list[ShardFile]:
        """Shards that cannot be read or differ from their seals."""
        pairs = zip(self.shards, self.reads, strict=True)
        return [shard for shard, read in pairs if read.content.fault]


Judge = Callable[[catalog.JobRecord], str | None]


def check(store: Store, *, only: Collection[str] | None = None, judge: Judge = lambda job: None) -> Checked:
    """Check the database and these jobs, or all; `judge` returns what is wrong with a job's task, or None."""
    checked = Checked(damages=database_damage(store))
    try:
        with store.read() as tx:
            require_folders(tx, store.data)
            job_ids = [job_id for job_id in catalog.ids(tx) if only is None or job_id in only]
        for job_id in job_ids:
            checked.jobs += 1
            checked.damages += check_job(store, job_id, checked, judge)
    except (DatabaseDamaged, StoreDamaged) as error:  # others, as of a lock, say nothing about the files
        checked.damages.append(database_is(store.place, error.cause))
    return checked


def database_damage(store: Store) -> list[Damage]:
    """Damages that SQLite finds in its own file; other databases look after theirs."""
    if store.engine.dialect.name != "sqlite":
        return []
    try:
        with store.read() as tx:
            found = [str(row[0]) for row in tx.execute(text("pragma integrity_check"))]
            found += [names_nothing(*row) for row in foreign_keys(tx)]
    except DatabaseDamaged as error:
        found = [error.cause]
    faults = [said for said in dict.fromkeys(found) if said != "ok"]
    return [database_is(store.place, said) for said in faults[:MOST_NAMED]]


def foreign_keys(tx: Connection) -> Sequence[Any]:
    """Rows that name a job that does not exist."""
    return tx.execute(text("pragma foreign_key_check")).all()


def names_nothing(table: str, number: int | None, parent: str, *_: object) -> str:
    """Describe a row that names a missing one; rows of some tables have no numbers."""
    return f"{'a row' if number is None else f'row {number}'} of {table} names no {parent}"


def database_is(place: str, said: str) -> Damage:
    """Damage of the database itself."""
    return Damage(
        job_id=None,
        part=StorePart.DATABASE,
        file=place,
        what=f"is damaged ({said})",
        fix="stop what runs, and run: conserve check --repair",
    )


def check_job(store: Store, job_id: str, checked: Checked, judge: Judge = lambda job: None) -> list[Damage]:
    """Find all damages of one job; counts the files read in `checked`.

    A damage is looked at twice before it counts: `retry` may have removed a shard after its name was read.
    """
    found = look_at(store, job_id, checked, judge)
    return look_at(store, job_id, Checked(), judge) if found else []


def look_at(store: Store, job_id: str, checked: Checked, judge: Judge) -> list[Damage]:
    """Find all damages of one job at this moment; of a job with a file out of reach nothing else is known."""
    try:
        with os_errors.damage_apart(layout.job_folder(store.data, job_id)):
            return judged(store, job_id, checked, judge)
    except StoreForbidden as error:
        return [unread(store.data, job_id, error)]


def judged(store: Store, job_id: str, checked: Checked, judge: Judge) -> list[Damage]:
    """Find all damages of a job whose files can be read."""
    try:
        mark = place_of(layout.job_folder(store.data, job_id)).readable_mark()
        there = orphans.on_disk(store.data, job_id)
        with store.read() as tx:
            audited = audit(tx, store.data, job_id)
            unnamed = orphans.among(tx, store.data, job_id, there, audited.positions)
            wrong = records.differences(tx, job_id, mark) if mark is not None else []
    except JobNotFound:
        return []  # removed since its id was read
    except StoreDamaged as error:
        return [record_damage(job_id, error.cause)]
    files = list(recorded_files(store.data, [audited.job], []))
    found = [one for file in files if (one := file_damage(store.data, file, audited.job))]
    if (
        said := judge(audited.job)
        or outside(audited)
        or (wrong and f"not what was submitted: {', '.join(wrong)}")
    ):
        found.append(record_damage(job_id, said))
    elif audited.job.files and (mark is None or mark.store_id != store.id):  # earlier versions made no marks
        found.append(mark_damage(store.data, job_id, mark))
    found += shard_damages(audited)
    found += orphan_damages(store.data, job_id, unnamed)
    found += row_damages(audited)
    for path in (*(file.path for file in files), *(store.data / shard.file for shard in audited.shards)):
        if path.is_file():
            checked.files += 1
            checked.bytes += path.stat().st_size
    return [replace(each, fix=fix_of(each, audited)) for each in found]


def audit(tx: Connection, where: FilePath, job_id: str, known: dict[int, Read] | None = None) -> JobAudit:
    """Audit a job. Shards whose ids are in `known` are not read again; the others are read and added to it."""
    job = catalog.get(tx, job_id)
    found = shards.files(tx, [job_id])
    known = {} if known is None else known
    for shard in found:
        if shard.id not in known:
            known[shard.id] = read_shard(where, shard)
    damaged_rows, counts = read_journal(tx, job_id)
    for shard in found:
        counts = counts.plus(known[shard.id].counts)
    reads = [known[shard.id] for shard in found]
    return JobAudit(
        job=job,
        shards=found,
        reads=reads,
        damaged_rows=damaged_rows,
        times=places.times_found(tx, job, [read.content.positions for read in reads]),
        counts=counts,
    )


def read_shard(where: FilePath, shard: ShardFile) -> Read:
    """Read a shard to its end."""
    path = where / shard.file
    content = places.content(path, shard.seal)
    if content.fault:
        return Read(content)
    try:
        with os_errors.damage_apart(path):
            file = pq.ParquetFile(source(path), page_checksum_verification=True)
            table = file.read(None if shard.seal is None else ["error_type", *TOKEN_COUNTS])
    except (OSError, pa.ArrowException) as error:
        return Read(Content(places.NONE, f"is damaged ({first_line(error)})"))
    if table.num_rows != shard.num_rows:
        return Read(Content(places.NONE, f"has {table.num_rows:,} of its {shard.num_rows:,} rows"))
    succeeded = table["error_type"].null_count
    sums = (int(pc.sum(table[name]).as_py() or 0) for name in TOKEN_COUNTS)
    return Read(content, JobCounters(succeeded, table.num_rows - succeeded, *sums))


def read_journal(tx: Connection, job_id: str) -> tuple[list[int], JobCounters]:
    """Positions of damaged journal rows, and the sums over the others."""
    broken, succeeded, failed, tokens = [], 0, 0, [0] * len(TOKEN_COUNTS)
    rows = text("select job_id, position, failed, payload, checksum from journal where job_id = :job_id")
    for row in tx.execute(rows, {"job_id": job_id}):  # past the types of the schema, which damaged rows break
        if not is_whole(row):
            broken.append(int(row.position))
            continue
        result = decode(row.payload)
        succeeded += not result.failed
        failed += result.failed
        tokens = [total + getattr(result, name) for total, name in zip(tokens, TOKEN_COUNTS, strict=True)]
    return broken, JobCounters(succeeded, failed, *tokens)


def outside(audited: JobAudit) -> str | None:
    """Describe a record that names fewer rows than have results or were leased; None if it does not."""
    job = audited.job
    last = max((int(read.content.positions.max(initial=-1)) for read in audited.reads), default=-1)
    if last >= job.num_rows:
        return f"it says {job.num_rows:,} rows, and row {last:,} has a result"
    if places.cursor(job) != job.next_position:
        return f"it says that {job.next_position:,} of its {job.num_rows:,} rows were leased"
    return None


def record_damage(job_id: str, said: str) -> Damage:
    """Damage of a row of the table `job`."""
    return damaged(job_id, StorePart.RECORD, "its record", f"is damaged ({said})")


def mark_damage(where: FilePath, job_id: str, mark: Mark | None) -> Damage:
    """Damage of the mark in a job's folder."""
    path = layout.job_folder(where, job_id) / marks.MARK
    what = "is not what was written" if path.is_file() else "is missing"
    what = what if mark is None else f"is of another store ({mark.store_id})"
    return damaged(job_id, StorePart.MARK, below(path, where), what)


def file_damage(where: FilePath, file: RecordedFile, job: catalog.JobRecord) -> Damage | None:
    """Damage of a job's requests or inputs, which are read to their end; None if there is none."""
    what = file_fault(file.path, file.seal)
    if what:
        return damaged(job.id, file.part, below(file.path, where), what)
    rows = pq.read_metadata(source(file.path)).num_rows
    if rows != job.num_rows and file.part is StorePart.REQUESTS:
        return record_damage(job.id, f"it says {job.num_rows:,} rows, and there are {rows:,} requests")
    return None


def file_fault(path: FilePath, seal: Seal | None) -> str | None:
    """Describe the damage of a Parquet file; None if there is none. A file without a seal is read to its end."""
    if what := digests.damage(path, seal):
        return what
    try:
        with os_errors.damage_apart(path):
            found = pq.ParquetFile(source(path), page_checksum_verification=True)
            for _ in found.iter_batches() if seal is None else ():
                pass
    except (OSError, pa.ArrowException) as error:
        return f"is damaged ({first_line(error)})"
    return None


def shard_damages(audited: JobAudit) -> Iterator[Damage]:
    """Yield the damage of each shard that cannot be read."""
    for shard, read in zip(audited.shards, audited.reads, strict=True):
        if read.content.fault:
            yield damaged(shard.job_id, StorePart.SHARD, shard.file, read.content.fault)


def orphan_damages(where: FilePath, job_id: str, unnamed: Sequence[Orphan]) -> Iterator[Damage]:
    """Yield the shards on disk that the database does not name."""
    for orphan in unnamed:
        answers = count(len(orphan.positions), "answer")
        what = f"has {answers}, and the database does not name it: it went back in time"
        yield damaged(job_id, StorePart.ORPHAN, below(orphan.path, where), what)


def row_damages(audited: JobAudit) -> Iterator[Damage]:
    """Yield rows and counters that do not add up, unless a damaged file explains it."""
    job = audited.job
    for position in audited.damaged_rows:
        yield damaged(job.id, StorePart.JOURNAL, f"row {position} of the journal", "is not what was written")
    missing = sum(shard.num_rows for shard in audited.unreadable_shards)
    if audited.beyond:
        said = f"says that no row from {job.next_position:,} on was leased, and there are {named(audited.beyond)}"
        yield damaged(job.id, StorePart.ROWS, "its record", said)
        return
    if len(audited.lost) != missing:
        lost = f"{len(audited.lost) - missing:+,} beyond its damaged files"
        yield damaged(job.id, StorePart.ROWS, "the queue", f"lacks rows {named(audited.lost)} ({lost})")
    if audited.doubled:
        yield damaged(job.id, StorePart.ROWS, "the queue", f"has rows {named(audited.doubled)} twice")
    if not missing and not audited.damaged_rows and (wrong := wrong_counters(audited)):
        yield damaged(job.id, StorePart.COUNTERS, "its record", wrong)


def wrong_counters(audited: JobAudit) -> str | None:
    """Name the counters, or the state, that do not follow from the results; None if all do."""
    job, counts = audited.job, audited.counts
    wrong = [
        f"{name} {getattr(job, name):,} instead of {value:,}"
        for name, value in counts._asdict().items()
        if getattr(job, name) != value
    ]
    if not wrong and (job.state is JobState.COMPLETED) != is_done(job, counts) and state_follows_rows(job):
        wrong = [f"the state {job.state} with {counts.succeeded + counts.failed:,} of {job.num_rows:,} rows"]
    return f"says {', '.join(wrong)}" if wrong else None


def is_done(job: catalog.JobRecord, counts: JobCounters) -> bool:
    """True if every row of a job has a result."""
    return counts.succeeded + counts.failed == job.num_rows


def state_follows_rows(job: catalog.JobRecord) -> bool:
    """True if the job's state follows from its rows; a check leaves one that was cancelled or expired as it is."""
    return job.state not in ENDED_EARLY


def named(positions: Sequence[int]) -> str:
    """The first positions in words, and the number of the others."""
    shown = ", ".join(f"{position:,}" for position in positions[:MOST_NAMED])
    return shown if len(positions) <= MOST_NAMED else f"{shown} and {len(positions) - MOST_NAMED:,} others"


def fix_of(found: Damage, audited: JobAudit) -> str:
    """The next command, and what it will do."""
    rows = {shard.file: shard.num_rows for shard in audited.shards}
    comes_to = {
        StorePart.SHARD: f"its {count(rows.get(found.file, 0), 'row is', 'rows are')} computed again",
        StorePart.ORPHAN: "its answers are taken in",
        StorePart.JOURNAL: "the row is computed again",
        StorePart.REQUESTS: "they are rendered again if the input is as it was",
        StorePart.INPUTS: "they are copied again if the input is as it was",
        StorePart.ROWS: "rows that are nowhere are computed again",
        StorePart.COUNTERS: "it is counted again",
        StorePart.RECORD: "it is taken from the job's folder",
        StorePart.MARK: "it is written anew",
    }
    return f"run: conserve check --repair {found.job_id} ({comes_to[found.part]})"
