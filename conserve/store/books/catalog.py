"""Jobs of the store: add one, find one, change its state."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, exists, func, insert, select, text, update

from conserve.errors import JobRefused, StoreDamaged
from conserve.store.books import events
from conserve.store.books.job_names import resolve
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.journal import complete
from conserve.store.books.lateness import is_late, kept_deadline, late_ids
from conserve.store.books.readings import BATCH, BATCHES
from conserve.store.books.results import TOKEN_COUNTS
from conserve.store.books.states import OF_TEXT, OPEN, FailedBy, JobState, OnLate, stored
from conserve.store.database import schema
from conserve.store.database.connection import address, by_bytes, chunks
from conserve.store.database.migrations import STORE_ID
from conserve.store.database.wakeup import wake
from conserve.store.files.digests import Seal

job, lease, meta, request = schema.job, schema.lease, schema.meta, schema.request

OF_ID = select(job).where(job.c.id == bindparam("id"))
TIMES = select(func.count()).where(job.c.id == bindparam("id"))

COUNTERS = ("succeeded", "failed", *TOKEN_COUNTS)
"""Sums over the results of a job. Failed rows, which `retry` puts back, count no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file of an input, with its fingerprint at submit."""

    path: str  # absolute
    size: int = 0  # bytes
    mtime_ns: int = 0
    digest: str = ""  # BLAKE2b of the contents
    first_row: int = 0  # row index of its first row
    partition: Mapping[str, int | str | None] = field(default_factory=dict)  # columns read off its path
    kept: str | None = None  # link to it, relative to HOME/jobs/<id>


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The input of a job, with its fingerprint at submit."""

    path: str | None  # absolute; of several files their folder; None for standard input, queries and tables
    format: str  # "parquet", "jsonl", "openai", "csv", "tsv", "sql", "table"
    size: int = 0  # bytes, of all files
    mtime_ns: int = 0  # of the file changed last
    digest: str = ""  # BLAKE2b of the contents; of several files, of their digests
    copied: bool = False  # HOME/jobs/<id>/inputs.parquet holds the rows
    linked: bool = False  # inputs.parquet is a hard link, so it changes with the user's file
    parts: tuple[InputFile, ...] = ()  # the files, if there are several or one is linked
    sql: str | None = None  # the query that gave the rows

    @property
    def files(self) -> tuple[InputFile, ...]:
        """Files that the rows came from; empty for standard input and for a query."""
        if self.parts or self.path is None:
            return self.parts
        return (InputFile(path=self.path, size=self.size, mtime_ns=self.mtime_ns, digest=self.digest),)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A row of the table `job`; its counters are of rows and tokens."""

    seq: int
    id: str
    state: JobState
    error: str | None
    priority: int
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    task: str  # JSON of jobs.task.Task
    source: Source
    num_rows: int
    next_position: int
    succeeded: int
    failed: int
    retries: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    resumed_tokens: int
    files: Mapping[str, Seal] = field(default_factory=dict)
    model: str | None = None  # that answers its rows; None until a run has leased the first of them
    tags: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None  # when it is to be done
    on_late: OnLate | None = None  # then, with rows left; None: it expires
    failed_by: FailedBy | None = None  # None also for a job that failed under an earlier version

    @property
    def unanswered(self) -> int:
        """Rows without a result."""
        return self.num_rows - self.succeeded - self.failed


def add(
    tx: Connection,
    job_id: str,
    terms: JobTerms,
    *,
    task: str,
    source: Source,
    num_rows: int,
    now: float,
    files: Mapping[str, Seal] | None = None,
) -> None:
    """Queue a job whose folder is in place; `files` are the seals of the files in it, by name."""
    tx.execute(
        insert(job).values(
            id=job_id,
            state=JobState.QUEUED.value,
            priority=terms.priority,
            submitted_at=now,
            task=task,
            source=msgspec.json.encode(source).decode(),
            num_rows=num_rows,
            files=msgspec.json.encode(files or {}).decode(),
            model=terms.model,
            tags=msgspec.json.encode(terms.tags).decode() if terms.tags else None,
            deadline=terms.deadline,
            on_late=terms.on_late.value if terms.on_late else None,
        )
    )
    wake(tx)


def taken(tx: Connection, job_id: str) -> bool:
    """True if a job has this id already."""
    return tx.scalar(TIMES, {"id": job_id}) != 0


def lock_ids(tx: Connection) -> None:
    """Wait until no other transaction adds a job or removes a job's folder; on SQLite a writer is alone anyway."""
    tx.execute(select(meta.c.key).where(meta.c.key == STORE_ID).with_for_update())


def lock_job(tx: Connection, job_id: str) -> None:
    """Wait until no other transaction changes the job or reads which files belong to it."""
    tx.execute(select(job.c.seq).where(job.c.id == job_id).with_for_update(key_share=True))


def lock_jobs(tx: Connection, job_ids: Collection[str]) -> None:
    """Lock several jobs, always in the same order."""
    for some in chunks(sorted(job_ids)):
        ours = select(job.c.seq).where(job.c.id.in_(some))
        tx.execute(ours.order_by(by_bytes(tx, job.c.id)).with_for_update(key_share=True))


def lock_named(tx: Connection, names: Sequence[str]) -> None:
    """Lock the jobs that a user names, before any of them changes: commits of results lock them by id too."""
    lock_jobs(tx, {get_id(tx, name) for name in names})


def named(tx: Connection, name: str) -> list[str]:
    """Ids of the jobs of this name, oldest first. An id is the name, a dash and characters without one."""
    alike = select(job.c.id).where(job.c.id.like(f"{name}-____%")).order_by(job.c.seq)
    return [found for found in tx.scalars(alike) if found.rpartition("-")[0] == name]


def get(tx: Connection, job_id: str) -> JobRecord:
    """The job with this id or batch id, or the only one whose id begins so; else raises `JobNotFound`."""
    row = tx.execute(OF_ID, {"id": get_id(tx, job_id)}).one_or_none()
    return get(tx, job_id) if row is None else to_job(row._mapping)  # removed between the two statements


def get_id(tx: Connection, job_id: str) -> str:
    """Full id for what the user typed, even if the job's record is damaged; a full id is looked up alone."""
    if job_id.isprintable() and taken(tx, job_id):  # no database takes half a surrogate pair
        return job_id
    begun: list[tuple[str, str | None]] = []
    if job_id.startswith(BATCH):
        wanted = {"wanted": job_id, "length": len(job_id)}
        begun = [(row.id, row.job_id) for row in tx.execute(text(BATCHES), wanted)]
    return resolve(ids(tx), job_id, begun, place=address(tx.engine))


def record(tx: Connection, job_id: str) -> dict[str, Any]:
    """Columns of a job's row, unchecked."""
    return dict(tx.execute(OF_ID, {"id": job_id}).one()._mapping)


def everything(tx: Connection) -> list[JobRecord]:
    """All jobs whose records can be read, oldest first; `conserve check` names the others."""
    found = []
    for row in tx.execute(select(job).order_by(job.c.seq)):
        with suppress(StoreDamaged):
            found.append(to_job(row._mapping))
    return found


def ids(tx: Connection) -> list[str]:
    """All job ids, oldest first."""
    return list(tx.scalars(select(job.c.id).order_by(job.c.seq)))


def to_job(row: Mapping[Any, Any]) -> JobRecord:
    """Convert the columns of a database row to a `JobRecord`; raises `StoreDamaged` if its values do not fit."""
    try:
        return convert(row)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        job_id = row["id"]
        raise StoreDamaged(
            f"the record of job {job_id} is damaged ({error})",
            step=f"run: conserve check {job_id}",
            job_id=job_id,
        ) from error


def convert(row: Mapping[Any, Any]) -> JobRecord:
    """The columns of a row as a `JobRecord`."""
    values = {str(name): value for name, value in row.items()}
    msgspec.json.decode(values["task"], type=dict[str, Any])
    for name in ("source", "files", "tags"):
        values[name] = msgspec.json.decode(values[name] or "{}")
    return msgspec.convert(values, JobRecord)


def is_readable(row: Mapping[Any, Any]) -> bool:
    """True if the columns of a row make a `JobRecord`."""
    try:
        convert(row)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return False
    return True


# Verb -> the state it leads to, and the states it is allowed in.
_MOVES = {
    "pause": (JobState.PAUSED, {JobState.QUEUED}),
    "resume": (JobState.QUEUED, {JobState.PAUSED, JobState.FAILED, JobState.EXPIRED}),
    "cancel": (JobState.CANCELLED, OPEN | {JobState.FAILED}),
}


def move(tx: Connection, job_id: str, verb: str, *, now: float, why: str | None = None) -> JobRecord:
    """Pause, resume or cancel a job, unless it is in that state already; raises `JobRefused` from other states.

    `why` is shown beside the new state.
    """
    target, allowed = _MOVES[verb]
    lock_job(tx, get_id(tx, job_id))
    current = get(tx, job_id)
    if current.state is target:
        return current
    if current.state not in allowed:
        raise JobRefused(
            f"job {current.id} is {current.state}, so there is nothing to {verb}; run: conserve status"
        )
    finished_at = now if target.final else None
    tx.execute(
        update(job)
        .where(job.c.id == current.id)
        .values(
            state=target.value,
            finished_at=finished_at,
            error=why,
            failed_by=None,
            deadline=kept_deadline(tx, now) if verb == "resume" else current.deadline,
        )
    )
    # Without a row left no claim would ever end the job.
    if target is not JobState.QUEUED or not complete(tx, current.id, now):
        events.of_jobs(tx, [current.id], now=now)
    wake(tx)  # for its rows, or for those in flight that are to be withdrawn
    return get(tx, current.id)


def expire(tx: Connection, *, now: float) -> list[str]:
    """End the jobs whose deadline has passed with rows left; returns their ids."""
    if not (job_ids := late(tx, now=now)):
        return []
    lock_jobs(tx, job_ids)
    expired = {"state": JobState.EXPIRED.value, "finished_at": now, "error": None, "failed_by": None}
    # Another process may have ended some since: each is told of once.
    ended = list(
        tx.scalars(
            update(job).where(job.c.id.in_(job_ids), is_late(tx, now)).values(expired).returning(job.c.id)
        )
    )
    events.of_jobs(tx, ended, now=now)
    wake(tx)
    return ended


def late(tx: Connection, *, now: float) -> list[str]:
    """Ids of the jobs that are to expire."""
    return list(tx.scalars(late_ids(tx.dialect.name), {"now": now}))


def set_deadline(
    tx: Connection, job_id: str, deadline: float | None, on_late: OnLate | None = None
) -> JobRecord:
    """Give a job that has not ended another deadline, or none; raises `JobRefused` for one that has.

    Without `on_late` what becomes of it then stays as it was.
    """
    current = get(tx, job_id)
    if current.state.final and current.state is not JobState.FAILED:
        hint = f"; run: conserve retry {current.id}" if current.state is JobState.EXPIRED else ""
        raise JobRefused(f"job {current.id} is {current.state}, so it has no deadline any more{hint}")
    values = {"deadline": deadline} | ({"on_late": on_late.value} if on_late else {})
    tx.execute(update(job).where(job.c.id == current.id).values(**values))
    return get(tx, current.id)


def refuse(tx: Connection, job_id: str, reason: str, by: FailedBy, *, now: float) -> None:
    """Let a queued job fail because it cannot run as things stand; `conserve resume` tries again."""
    refused = tx.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.QUEUED.value)
        .values(state=JobState.FAILED.value, error=reason, failed_by=by.value, finished_at=now)
    )
    if refused.rowcount:
        events.of_jobs(tx, [job_id], now=now)


def of_other_models(tx: Connection, model: str, only: Collection[str] | None) -> dict[str, str]:
    """Queued jobs that are bound to another model than this: job id -> that model."""
    bound = select(job.c.id, job.c.model).where(job.c.state == JobState.QUEUED.value, job.c.model != model)
    if only is not None:
        bound = bound.where(job.c.id.in_(only))
    return {row.id: row.model for row in tx.execute(bound.order_by(job.c.seq))}


def rebind(tx: Connection, job_ids: Collection[str], model: str) -> None:
    """Bind jobs to this model, whatever they were bound to, as the user asks for."""
    for chunk in chunks(sorted(job_ids)):
        lock_jobs(tx, chunk)
        tx.execute(update(job).where(job.c.id.in_(chunk)).values(model=model, bound_by_run=None))


def unbind(tx: Connection) -> None:
    """Free the jobs that runs bound to their models, and that have no answer, no saved token and no lease now.

    Such are jobs of a run whose server lacks the model. An error is no answer: unrendered rows have one unasked.
    """
    saved = exists().where(request.c.job_id == job.c.id, request.c.tokens.is_not(None))
    held = exists().where(lease.c.job_id == job.c.id)
    untouched = job.c.bound_by_run.is_(True), job.c.succeeded == 0, ~saved, ~held
    for chunk in chunks(sorted(tx.scalars(select(job.c.id).where(*untouched)))):
        lock_jobs(tx, chunk)  # a claim that was under way has ended, and its lease is seen
        tx.execute(update(job).where(job.c.id.in_(chunk), *untouched).values(model=None, bound_by_run=None))


def states(tx: Connection, job_ids: Sequence[str]) -> dict[str, JobState]:
    """The stored states of some jobs."""
    found = select(job.c.id, job.c.state)
    rows = (row for some in chunks(job_ids) for row in tx.execute(found.where(job.c.id.in_(some))))
    return {row.id: OF_TEXT.get(row.state, JobState.FAILED) for row in rows}  # an unknown state is damage


def fail(tx: Connection, job_id: str, reason: str, by: FailedBy, *, now: float) -> bool:
    """Let a job fail that cannot run any more; returns True if it had unfinished rows and was not cancelled."""
    before = tx.scalar(select(job.c.state).where(job.c.id == job_id).with_for_update())
    left = job.c.succeeded + job.c.failed < job.c.num_rows
    failed = tx.execute(
        update(job)
        .where(job.c.id == job_id, left, job.c.state.in_(stored(OPEN | {JobState.FAILED})))
        .values(state=JobState.FAILED.value, error=reason, failed_by=by.value, finished_at=now)
    )
    if failed.rowcount and before != JobState.FAILED.value:
        events.of_jobs(tx, [job_id], now=now)
    return failed.rowcount == 1


def forgive(tx: Connection, job_id: str, *, now: float) -> bool:
    """Queue a job again that was refused for damage; returns True if it was."""
    queued = tx.execute(
        update(job)
        .where(
            job.c.id == job_id,
            job.c.state == JobState.FAILED.value,
            job.c.failed_by == FailedBy.DAMAGE.value,
        )
        .values(state=JobState.QUEUED.value, error=None, failed_by=None, finished_at=None)
    )
    if queued.rowcount:
        events.of_jobs(tx, [job_id], now=now)
        wake(tx)
    return queued.rowcount == 1


def keep_seal(tx: Connection, job_id: str, name: str, seal: Seal) -> None:
    """Store the seal of a job's file that was made anew."""
    lock_job(tx, job_id)
    files = {**get(tx, job_id).files, name: seal}
    tx.execute(update(job).where(job.c.id == job_id).values(files=msgspec.json.encode(files).decode()))
