"""Readings for `conserve status` and `conserve jobs`: counters, never rows.

The SQL is plain, because these commands and shell completion must answer at once, and importing SQLAlchemy takes
longer than all the rest. So an SQLite store is read through the standard library, any other through SQLAlchemy.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conserve.config import Settings
from conserve.errors import RUN_DOCTOR, StoreError, StoreForbidden, StoreReadOnly, StoreTooNew
from conserve.store.books.job_names import resolve
from conserve.store.books.slots import HarvestedQuarter, is_slot
from conserve.store.books.states import FailedBy, JobState, OnLate
from conserve.store.database import half_made, moves
from conserve.store.database.reader import reader
from conserve.store.database.versions import (
    LATEST,
    WITH_BATCHES,
    WITH_CAUSES,
    WITH_DEADLINES,
    WITH_FORECASTS,
    WITH_MODELS,
    WITH_SPANS,
    number,
    too_new,
)

if TYPE_CHECKING:
    from conserve.store.database.store import Store
    from conserve.store.files.objects import FilePath

Query = Callable[[str, Mapping[str, Any]], list[tuple[Any, ...]]]

JOBS = """
    select id, state, error, priority, submitted_at, started_at, finished_at, num_rows, succeeded, failed,
           retries, prompt_tokens, completion_tokens, cached_tokens, resumed_tokens,
           (select count(*) from lease cross join request
            where lease.job_id = job.id and request.job_id = job.id and request.epoch = lease.epoch)
           + (select coalesce(sum(held), 0) from span where span.job_id = job.id) as leased,
           (select count(*) from lease where lease.job_id = job.id and expires_at > :now) as leases, task,
           model, tags, deadline, on_late, failed_by
    from job order by seq
"""
"""Every job with its counters. `leased` counts rows in flight: records of their own, and what spans hold.

Records are found by their leases. By their job, SQLite would read those of all waiting rows; it keeps the order of
the tables of a `cross join`.
"""

SPANS = "\n           + (select coalesce(sum(held), 0) from span where span.job_id = job.id)"
ADDITIONS = (
    (WITH_SPANS, SPANS, ""),
    (WITH_CAUSES, ", failed_by", ", null as failed_by"),
    (WITH_FORECASTS, ", on_late", ", null as on_late"),
    (WITH_DEADLINES, ", deadline,", ", null as deadline,"),
    (WITH_MODELS, "model, tags", "null as model, null as tags"),
)
"""Additions to `JOBS` by versions of the store: first version, text, and the text in its place for older stores."""

UNTAKEN = """
    select next_position from job where id = :job_id
    union all
    select position from request where job_id = :job_id and epoch is null
"""
"""The job's cursor, from which on no row was ever leased, and the positions of its waiting rows. The cursor is the
largest, since waiting rows lie in front of it."""

BATCHES = "select id, job_id from batch where substr(id, 1, :length) = :wanted order by seq limit 9"
"""Batches of the Batch API whose id begins so, and their jobs; each job of `conserve submit` has one too."""

BATCH = "batch_"
"""Beginning of each batch's id."""

HARVESTED = "select slot, tokens, busy_s from harvested order by slot"
"""Tokens and busy seconds of each quarter of an hour (store.books.harvested)."""

PLACE = "select key, value from meta where key in ('data', 'store_id')"
"""The place of the files, and the id of the store."""

LOOK_S, MOST_LOOKS = 0.02, 50  # at a database without tables
ANYTHING = "select 1 from sqlite_master limit 1"
VERSION = "select value from meta where key = 'version'"
"""The number of the last migration applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReading:
    """One job at one moment; `running` counts its rows under a lease."""

    id: str
    state: JobState
    error: str | None
    priority: int
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    rows: int
    waiting: int
    running: int
    succeeded: int
    failed: int
    retries: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    resumed_tokens: int
    row_order: str  # in which order its rows run: "prefix", "input", "random:SEED"
    model: str | None = None  # that it is bound to; None until a run has leased its first row
    tags: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None  # when it is to be done
    on_late: OnLate | None = None  # then, with rows left; None: it expires
    failed_by: FailedBy | None = None  # None also for a job that failed under an earlier version

    @property
    def unanswered(self) -> int:
        """Rows without a result."""
        return self.rows - self.succeeded - self.failed

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the engine's prefix cache; None without any prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def done(self) -> int:
        """Rows that have a result."""
        return self.succeeded + self.failed


def read_jobs(
    settings: Settings, *, now: float, only: Collection[str] | None = None, kept: "Store | None" = None
) -> list[JobReading]:
    """All jobs, oldest first, or those that are there of `only`; none where there is no store yet.

    `kept` is the store of these settings, if the caller has it open.
    """
    with opened(settings) if kept is None else read_in(kept) as query:
        if query is None:
            return []
        sql = jobs_query(query)
        if only is None:
            return [to_reading(row) for row in query(sql, {"now": now})]
        one = sql.replace("order by seq", "where id = :id")
        return [to_reading(row) for job_id in only for row in query(one, {"now": now, "id": job_id})]


def jobs_query(query: Query) -> str:
    """The SQL for all jobs in a store of this version."""
    rows = query(VERSION, {})
    found = number(rows[0][0]) if rows else LATEST
    sql = JOBS
    for since, added, before in ADDITIONS:
        if found < since:
            sql = sql.replace(added, before)
    return sql


def read_harvested(settings: Settings) -> list[HarvestedQuarter]:
    """Slots of harvested tokens; none where there is no store yet."""
    with opened(settings) as query:
        if query is None:
            return []
        rows = query(VERSION, {})
        if rows and number(rows[0][0]) < WITH_FORECASTS:
            return []
        return [HarvestedQuarter(row[0], row[1], row[2]) for row in query(HARVESTED, {}) if is_slot(row)]


def to_reading(row: tuple[Any, ...]) -> JobReading:
    """Reading of a row of `JOBS`; a row of impossible values is read as a job that failed for damage."""
    try:
        return reading_of(row)
    except (ValueError, TypeError):
        job_id = str(row[0])
        error = f"its record is damaged; run: conserve check {job_id}"
        return reading_of(
            (
                job_id,
                JobState.FAILED.value,
                error,
                0,
                0.0,
                None,
                None,
                *[0] * 10,
                "{}",
                *[None] * 4,
                FailedBy.DAMAGE.value,
            )
        )


def reading_of(row: tuple[Any, ...]) -> JobReading:
    """Reading of an undamaged row; raises `ValueError` or `TypeError` for another."""
    (job_id, stored, error, priority, submitted_at, started_at, finished_at, num_rows, succeeded,
     failed, retries, prompt_tokens, completion_tokens, cached_tokens, resumed_tokens, leased, leases,
     task, model, tags, deadline, on_late, failed_by) = row  # fmt: skip
    require(str, job_id, task, error or "", model or "")
    require(int, priority, num_rows, succeeded, failed, retries)
    require(int, prompt_tokens, completion_tokens, cached_tokens, resumed_tokens)
    require((int, float), submitted_at, started_at or 0.0, finished_at or 0.0, deadline or 0.0)
    state = JobState(stored)
    if state is JobState.QUEUED and leases:
        state = JobState.RUNNING
    return JobReading(
        id=job_id,
        state=state,
        error=error,
        priority=priority,
        submitted_at=submitted_at,
        started_at=started_at,
        finished_at=finished_at,
        rows=num_rows,
        waiting=num_rows - succeeded - failed - leased,
        running=leased,
        succeeded=succeeded,
        failed=failed,
        retries=retries,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        resumed_tokens=resumed_tokens,
        row_order=row_order(task),
        model=model,
        tags=dict(json.loads(tags)) if tags else {},
        deadline=deadline,
        on_late=OnLate(on_late) if on_late else None,
        failed_by=FailedBy(failed_by) if failed_by else None,
    )


def require(kind: type | tuple[type, ...], *values: object) -> None:
    """Raise `TypeError` if a value is of another kind: SQLite keeps what a damaged page says."""
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(value)


def row_order(task: str) -> str:
    """Execution order in the JSON of a task; "input" for jobs of older stores, which name none."""
    fields = dict(json.loads(task))
    order, seed = fields.get("order", "input"), fields.get("order_seed", 0)
    return f"{order}:{seed}" if order == "random" else str(order)


def read_task(settings: Settings, job_id: str) -> str:
    """The JSON of a job's task."""
    with opened(settings) as query:
        rows = query("select task from job where id = :job_id", {"job_id": job_id}) if query else []
    return str(rows[0][0])


def untaken(settings: Settings, job_id: str) -> list[int]:
    """Positions of a job's waiting rows, and last its cursor, from which on no row was ever leased."""
    with opened(settings) as query:
        rows = query(UNTAKEN, {"job_id": job_id}) if query else []
    return sorted(row[0] for row in rows)


@contextmanager
def opened(settings: Settings) -> Iterator[Query | None]:
    """Yield a function that queries the store within one read transaction; None where there is no store yet."""
    if (path := settings.sqlite_file) is None:
        with opened_elsewhere(settings) as query:
            yield query
        return
    try:
        if not path.exists():
            from conserve.store.files.os_errors import refuse_no_folder

            refuse_no_folder(settings.home)
    except PermissionError as error:
        raise StoreForbidden.of(error) from error
    with opened_sqlite(path) as query:
        yield query


def wait_for_tables(connection: sqlite3.Connection) -> None:
    """Let another process go on that is just making the store; a file that stays empty is damage."""
    for _ in range(MOST_LOOKS):
        if connection.execute(ANYTHING).fetchall():
            return
        time.sleep(LOOK_S)


@contextmanager
def opened_sqlite(path: Path) -> Iterator[Query | None]:
    """Read an SQLite store without SQLAlchemy."""
    half_made.refuse(path)
    if not path.exists():
        yield None
        return
    try:
        connection = reader(path, timeout_s=10)
        try:
            wait_for_tables(connection)
            connection.execute("begin")
            found = connection.execute(VERSION).fetchall()
            check_version(found)
            moves.refuse(next((value for (value,) in connection.execute(moves.QUERY)), None))
            yield lambda sql, parameters: connection.execute(sql, parameters).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        # A log that belongs to another user is read-only, and even a reader writes there.
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_READONLY"):
            raise StoreReadOnly.at(path) from error
        raise StoreError(f"the store {path} cannot be read ({error})", step=RUN_DOCTOR) from error


@contextmanager
def opened_elsewhere(settings: Settings) -> Iterator[Query]:
    """Read a store on another database."""
    from conserve.store.database.store import Store

    with closing(Store.open(settings)) as store, read_in(store) as query:
        yield query


@contextmanager
def read_in(store: "Store") -> Iterator[Query]:
    """Read an open store, unless it is in another database by now."""
    from sqlalchemy import text

    from conserve.store.database import guard

    with store.read() as tx:
        guard.require_here(tx)
        yield lambda sql, parameters: [tuple(row) for row in tx.execute(text(sql), dict(parameters))]


def data(settings: Settings) -> "FilePath":
    """Place of the files of the jobs, as the database names it."""
    from conserve.store.files.bucket import Bucket
    from conserve.store.files.objects import ObjectPath

    with opened(settings) as query:
        found = {row[0]: row[1] for row in query(PLACE, {})} if query else {}
    if "data" not in found:
        return settings.home
    place = str(found["data"])
    return ObjectPath(Bucket.parse(place), str(found["store_id"])) if "://" in place else Path(place)


def check_version(rows: list[tuple[Any, ...]]) -> None:
    """Refuse a store from the future; an older one is brought up to date by the next command that writes."""
    if rows and number(rows[0][0]) > LATEST:
        raise StoreTooNew(too_new(number(rows[0][0])))


def job_named(settings: Settings, readings: Sequence[JobReading], wanted: str) -> str:
    """Full id of one of these jobs for what the user typed; raises `JobNotFound`."""
    begun = batches_named(settings, wanted)
    return resolve([reading.id for reading in readings], wanted, begun, place=settings.place)


def batches_named(settings: Settings, wanted: str) -> list[tuple[str, str | None]]:
    """Batches whose id is what the user typed, or begins so, and their jobs."""
    if not wanted.startswith(BATCH):
        return []
    with opened(settings) as query:
        if query is None or ((rows := query(VERSION, {})) and number(rows[0][0]) < WITH_BATCHES):
            return []
        return [(row[0], row[1]) for row in query(BATCHES, {"wanted": wanted, "length": len(wanted)})]
