"""Jobs: add one, find one, and change what it is doing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, func, insert, select, update

from conserve.errors import JobRefused
from conserve.store import schema
from conserve.store.readings import resolve
from conserve.store.states import JobState

job = schema.job


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The input of a job, and what it was like at submit."""

    path: str | None  # absolute; None for standard input
    format: str  # "parquet", "jsonl", "openai"
    size: int = 0  # bytes
    mtime_ns: int = 0
    digest: str = ""  # BLAKE2b of the contents
    copied: bool = False  # whether HOME/jobs/<id>/inputs.parquet holds the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it stands; counters are of rows and tokens."""

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


def add(
    tx: Connection, *, job_id: str, task: str, source: Source, num_rows: int, priority: int, now: float
) -> None:
    """Queue a job whose folder is in place."""
    tx.execute(
        insert(job).values(
            id=job_id,
            state=JobState.QUEUED.value,
            priority=priority,
            submitted_at=now,
            task=task,
            source=msgspec.json.encode(source).decode(),
            num_rows=num_rows,
        )
    )


def taken(tx: Connection, job_id: str) -> bool:
    """Whether some job has this id already."""
    return tx.scalar(select(func.count()).where(job.c.id == job_id)) != 0


def get(tx: Connection, job_id: str) -> Job:
    """The job with this id, or with the only id that begins so; `JobNotFound` names the nearest."""
    return to_job(tx.execute(select(job).where(job.c.id == resolve(ids(tx), job_id))).one())


def everything(tx: Connection) -> list[Job]:
    """All jobs, oldest first."""
    return [to_job(row) for row in tx.execute(select(job).order_by(job.c.seq))]


def ids(tx: Connection) -> list[str]:
    """All job ids, oldest first."""
    return list(tx.scalars(select(job.c.id).order_by(job.c.seq)))


def to_job(row: Any) -> Job:
    """A database row as a `Job`."""
    values = dict(row._mapping)
    values["state"] = JobState(values["state"])
    values["source"] = msgspec.json.decode(values["source"], type=Source)
    return Job(**values)


# What a job may be told, and the states in which it makes sense.
_MOVES = {
    "pause": (JobState.PAUSED, {JobState.QUEUED}),
    "resume": (JobState.QUEUED, {JobState.PAUSED, JobState.FAILED}),
    "cancel": (JobState.CANCELLED, {JobState.QUEUED, JobState.PAUSED, JobState.FAILED}),
}


def move(tx: Connection, job_id: str, verb: str, *, now: float) -> Job:
    """Pause, resume or cancel a job; asking for what already holds changes nothing."""
    target, allowed = _MOVES[verb]
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
        .values(state=target.value, finished_at=finished_at, error=None)
    )
    return get(tx, current.id)


def refuse(tx: Connection, job_id: str, reason: str, *, now: float) -> None:
    """Mark a job as one that cannot run as things stand."""
    tx.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.QUEUED.value)
        .values(state=JobState.FAILED.value, error=reason, finished_at=now)
    )


def states(tx: Connection, job_ids: Sequence[str]) -> dict[str, JobState]:
    """The stored states of some jobs."""
    rows = tx.execute(select(job.c.id, job.c.state).where(job.c.id.in_(job_ids)))
    return {row.id: JobState(row.state) for row in rows}
