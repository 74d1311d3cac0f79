"""Batches of the store: the face of a job in OpenAI's Batch API, from before the job exists.

A batch holds no row and no counter. Once its input has become a job, everything about it is read from that job.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, exists, func, insert, not_, or_, select, update

from conserve.errors import JobRefused, StoreDamaged
from conserve.store.books import catalog, events, leases, spans
from conserve.store.books.batch_state import BatchFacts, BatchState, state_of
from conserve.store.books.catalog import JobRecord
from conserve.store.books.lateness import has_passed
from conserve.store.books.states import DELIVERED, OPEN, JobState, OnLate, stored
from conserve.store.database import schema
from conserve.store.database.migrations import DEFAULT_PROJECT, new_batch_id

log = logging.getLogger(__name__)

batch, job, lease = schema.batch, schema.job, schema.lease

POLLED = f"""
    select {", ".join(map(str, [*batch.columns, *job.columns]))}
    from batch left join job on job.id = batch.job_id where batch.id = :id and batch.project = :project
"""
"""One batch of a project with its job, as `of_polled` reads it: plain SQL that every database takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFault:
    """Reason why an input cannot become a job, in the form of OpenAI's batch errors."""

    code: str
    message: str
    line: int | None = None  # of the input file, from 1
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A row of the table `batch`, and its job once there is one."""

    seq: int
    id: str
    project: str
    created_at: float
    job_id: str | None
    file_id: str | None
    endpoint: str | None
    completion_window: str | None
    window_s: float | None
    on_late: OnLate | None = None
    metadata: Mapping[str, str] | None
    key_name: str | None
    idempotency_key: str | None
    output_expires_s: float | None
    refused_at: float | None
    errors: Sequence[InputFault] = ()
    cancelling_at: float | None
    delivered_at: float | None
    delivered_of: float | None
    output_file_id: str | None
    error_file_id: str | None
    job: JobRecord | None = field(default=None)

    @property
    def delivered(self) -> bool:
        """True if the files hold the results that the job has now."""
        return (
            self.job is not None
            and self.delivered_at is not None
            and self.delivered_of == self.job.finished_at
        )

    @property
    def state(self) -> BatchState:
        """State, from the batch's own record before its job exists and from the job then."""
        return state_of(
            BatchFacts(
                bound=self.job_id is not None,
                job=None if self.job is None else self.job.state,
                refused=self.refused_at is not None,
                cancelled=self.cancelling_at is not None,
                written=self.delivered,
            )
        )

    @property
    def unfinished(self) -> bool:
        """True if files are to be written for it."""
        return self.state in (BatchState.FINALIZING, BatchState.CANCELLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """Batch as a client asks for it."""

    file_id: str
    endpoint: str
    completion_window: str
    window_s: float
    metadata: Mapping[str, str] | None = None
    key_name: str | None = None
    idempotency_key: str | None = None
    output_expires_s: float | None = None
    on_late: OnLate | None = None


def add(tx: Connection, project: str, new: NewBatch, *, now: float) -> str:
    """Add a batch whose input is to be validated; returns its id."""
    batch_id = new_batch_id()
    values = {name: getattr(new, name) for name in NewBatch.__slots__ if name != "metadata"}
    values["on_late"] = new.on_late.value if new.on_late else None
    noted = None if new.metadata is None else msgspec.json.encode(new.metadata).decode()
    tx.execute(insert(batch).values(id=batch_id, project=project, created_at=now, metadata=noted, **values))
    events.of_batches(tx, [batch_id], now=now)
    return batch_id


def of_submitted(tx: Connection, job_id: str, *, now: float) -> None:
    """Add the batch of a job that was not asked for as one, in the default project."""
    tx.execute(
        insert(batch).values(id=new_batch_id(), project=DEFAULT_PROJECT, created_at=now, job_id=job_id)
    )
    events.of_jobs(tx, [job_id], now=now)


class Overtaken(JobRefused):
    """The batch has become a job, was cancelled or was refused meanwhile."""


def bind(tx: Connection, batch_id: str, job_id: str, *, now: float) -> None:
    """Make a job the batch's, in the transaction that adds the job; raises `Overtaken`, so that one job remains."""
    bound = tx.execute(update(batch).where(batch.c.id == batch_id, is_validating()).values(job_id=job_id))
    if bound.rowcount != 1:
        raise Overtaken(f"the batch {batch_id} needs no job any more")
    events.of_jobs(tx, [job_id], now=now)


def refuse(tx: Connection, batch_id: str, faults: Sequence[InputFault], *, now: float) -> None:
    """Record why a batch's input cannot become a job, unless the batch was cancelled meanwhile."""
    errors = msgspec.json.encode(faults).decode()
    mine = batch.c.id == batch_id, is_validating()
    if tx.execute(update(batch).where(*mine).values(refused_at=now, errors=errors)).rowcount:
        events.of_batches(tx, [batch_id], now=now)


def is_validating() -> ColumnElement[bool]:
    """Condition that a batch has no job and may still get one."""
    return and_(batch.c.job_id.is_(None), batch.c.refused_at.is_(None), batch.c.cancelling_at.is_(None))


def get(tx: Connection, project: str, batch_id: str) -> BatchRecord | None:
    """The batch of this project with this id; None if the project has none."""
    row = tx.execute(select(batch).where(batch.c.id == batch_id, batch.c.project == project)).one_or_none()
    return None if row is None else with_jobs(tx, [row])[0]


def several(tx: Connection, batch_ids: Collection[str]) -> list[BatchRecord]:
    """The batches with these ids, whatever their projects; those that are gone are left out."""
    return with_jobs(tx, tx.execute(select(batch).where(batch.c.id.in_(batch_ids))).all())


def of_idempotency_key(tx: Connection, project: str, key: str) -> BatchRecord | None:
    """The batch that an earlier request with this key made; None if there was none."""
    rows = tx.execute(select(batch).where(batch.c.project == project, batch.c.idempotency_key == key))
    return next(iter(with_jobs(tx, rows.all())), None)


def page(tx: Connection, project: str, *, before: int | None, limit: int) -> list[BatchRecord]:
    """Batches of a project, the newest first; with `before`, those older than the batch of this number."""
    rows = select(batch).where(batch.c.project == project).order_by(batch.c.seq.desc()).limit(limit)
    if before is not None:
        rows = rows.where(batch.c.seq < before)
    return with_jobs(tx, tx.execute(rows).all())


def with_jobs(tx: Connection, rows: Sequence[Any]) -> list[BatchRecord]:
    """Rows of the table with their jobs; without it if its record is damaged."""
    wanted = [row.job_id for row in rows if row.job_id is not None]
    found = select(job).where(job.c.id.in_(wanted))
    jobs = {row.id: readable(row._mapping) for row in tx.execute(found)} if wanted else {}
    return [to_batch(row._mapping, jobs.get(row.job_id)) for row in rows]


def of_polled(row: Sequence[Any]) -> BatchRecord:
    """The batch of a row of `POLLED`, with its job."""
    own = len(batch.columns)
    columns = dict(zip(batch.columns.keys(), row[:own], strict=True))
    its_job = dict(zip(job.columns.keys(), row[own:], strict=True))
    return to_batch(columns, None if its_job["id"] is None else readable(its_job))


def readable(row: Mapping[Any, Any]) -> JobRecord | None:
    """The job of a row's columns; None if its record is damaged, so that the others are still listed."""
    try:
        return catalog.to_job(row)
    except StoreDamaged as error:
        log.warning("%s", error)
        return None


def to_batch(row: Mapping[Any, Any], its_job: JobRecord | None) -> BatchRecord:
    """Convert the columns of a database row."""
    values = {str(name): value for name, value in row.items()}
    metadata, on_late = values["metadata"], values["on_late"]
    values["metadata"] = None if metadata is None else msgspec.json.decode(metadata)
    values["errors"] = msgspec.json.decode(values["errors"] or "[]", type=tuple[InputFault, ...])
    values["on_late"] = OnLate(on_late) if on_late else None
    return BatchRecord(**values, job=its_job)


def cancel(tx: Connection, found: BatchRecord, *, now: float) -> None:
    """Cancel a batch, and its job; raises `JobRefused` for one that has ended otherwise."""
    if found.job_id is not None:
        catalog.lock_job(tx, found.job_id)  # before the batch, as `deliver` does
    tx.execute(select(batch.c.seq).where(batch.c.id == found.id).with_for_update())
    job_id = tx.scalar(select(batch.c.job_id).where(batch.c.id == found.id))
    if job_id is not None:
        cancel_job(tx, found.id, job_id, now=now)
    elif found.refused_at is not None:
        raise JobRefused(f"the batch {found.id} has failed, so there is nothing to cancel")
    waits = batch.c.id == found.id, batch.c.cancelling_at.is_(None)
    changed = tx.execute(update(batch).where(*waits).values(cancelling_at=now)).rowcount
    if changed and job_id is None:
        events.of_batches(tx, [found.id], now=now)


def cancel_job(tx: Connection, batch_id: str, job_id: str, *, now: float) -> None:
    """Cancel a batch's job; a client cannot take back an end of which it was told."""
    catalog.lock_job(tx, job_id)
    state = catalog.get(tx, job_id).state
    if state.final and state is not JobState.CANCELLED:
        raise JobRefused(f"the batch {batch_id} has ended, so there is nothing to cancel")
    catalog.move(tx, job_id, "cancel", now=now)


def validating(tx: Connection) -> list[str]:
    """Ids of the batches whose inputs are to become jobs, the oldest first."""
    return list(tx.scalars(select(batch.c.id).where(is_validating()).order_by(batch.c.seq)))


def deliverable(tx: Connection, *, asked: Sequence[str], now: float) -> list[str]:
    """Ids of the batches whose files are to be written: those with an upload, and those that were `asked` for.

    A job that was cancelled or expired has rows in flight until the leases on them have ended.
    """
    ended = job.c.state.in_(stored(DELIVERED))
    over = has_passed(tx.dialect.name, lease.c.expires_at, now)
    busy = exists().where(lease.c.job_id == job.c.id, not_(over))
    wanted = or_(batch.c.file_id.is_not(None), batch.c.id.in_(asked))
    found = select(batch.c.id).join(job, job.c.id == batch.c.job_id).where(ended, is_stale(), ~busy, wanted)
    return list(tx.scalars(found.order_by(batch.c.seq)))


def is_stale() -> ColumnElement[bool]:
    """Condition that a batch's files are not of the results that its job has now."""
    return or_(batch.c.delivered_of.is_(None), batch.c.delivered_of != job.c.finished_at)


def anywhere(tx: Connection, batch_id: str) -> BatchRecord | None:
    """The batch with this id, whatever its project."""
    row = tx.execute(select(batch).where(batch.c.id == batch_id)).one_or_none()
    return None if row is None else with_jobs(tx, [row])[0]


def deliver(
    tx: Connection, found: BatchRecord, *, output: str | None, errors: str | None, now: float
) -> bool:
    """Record the files of a batch; False if its job has changed since its results were read, or they are there."""
    assert found.job is not None
    catalog.lock_job(tx, found.job.id)
    of_job = select(job.c.finished_at).join(batch, batch.c.job_id == job.c.id)
    same = tx.scalar(of_job.where(batch.c.id == found.id, is_stale())) == found.job.finished_at
    values = {"output_file_id": output, "error_file_id": errors, "delivered_at": now}
    if same:
        of_now = update(batch).where(batch.c.id == found.id)
        tx.execute(of_now.values(delivered_of=found.job.finished_at, **values))
        if found.file_id is not None:  # a job of `conserve submit` ended without files
            events.of_batches(tx, [found.id], now=now)
    return same


def fence(tx: Connection, job_id: str) -> None:
    """End all leases of a job that was stopped, so that no result comes after those that are delivered."""
    leases.end(tx, list(spans.locked(tx, leases.of_job(tx, job_id))))


def unfinished_rows(tx: Connection, key_name: str) -> int:
    """Rows without a result in the batches that a key made; of those being validated, lines of their files.

    One statement sees both, since a batch may become a job between two.
    """
    left = (
        select(func.coalesce(func.sum(job.c.num_rows - job.c.succeeded - job.c.failed), 0))
        .join(batch, batch.c.job_id == job.c.id)
        .where(batch.c.key_name == key_name, job.c.state.in_(stored(OPEN)))
    )
    lines = (
        select(func.coalesce(func.sum(schema.file.c.num_lines), 0))
        .join(batch, batch.c.file_id == schema.file.c.id)
        .where(batch.c.key_name == key_name, is_validating())
    )
    return int(tx.scalar(select(left.scalar_subquery() + lines.scalar_subquery())) or 0)


def tokens_since(tx: Connection, key_name: str, moment: float) -> int:
    """Tokens, of prompts and answers, of the batches that a key made since then."""
    spent = func.sum(job.c.prompt_tokens + job.c.completion_tokens)
    found = (
        select(func.coalesce(spent, 0))
        .join(batch, batch.c.job_id == job.c.id)
        .where(batch.c.key_name == key_name, batch.c.created_at >= moment)
    )
    return int(tx.scalar(found) or 0)
