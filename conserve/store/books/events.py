"""Events: changes of batches, written into the outbox in the transaction that makes the change.

A job and its batch are one thing with one state. Every function of this package that changes the state calls
`of_jobs` or `of_batches` behind the change; without a hook that wants the event nothing is written.
"""

import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, insert, select

from conserve.store.books.states import JobState
from conserve.store.database import schema
from conserve.store.database.connection import chunks

batch, hook, job, message = schema.batch, schema.hook, schema.job, schema.message


class Event(StrEnum):
    """Change of a batch, named by the state that it leads to."""

    VALIDATING = "validating"
    """It was created; its input is being read."""
    IN_PROGRESS = "in_progress"
    """It has rows to run: for the first time, after a pause, or again after `conserve retry`."""
    PAUSED = "paused"
    """Its job was paused."""
    FINALIZING = "finalizing"
    """Every row has a result, or its time is over; its files are being written."""
    CANCELLING = "cancelling"
    """It was cancelled; its files are being written."""
    COMPLETED = "completed"
    """Every row has a result, and its files are there."""
    FAILED = "failed"
    """Its input cannot become a job, or its job cannot run."""
    EXPIRED = "expired"
    """Its time was over before every row had a result; its files are there."""
    CANCELLED = "cancelled"
    """It was cancelled; its files are there."""


ENDS = (Event.COMPLETED, Event.FAILED, Event.EXPIRED, Event.CANCELLED)
"""Events that a hook is told of unless it names others."""

LISTENING = select(hook).where(hook.c.ended_at.is_(None)).order_by(hook.c.seq)

_OPEN = {
    JobState.QUEUED: Event.IN_PROGRESS,
    JobState.PAUSED: Event.PAUSED,
    JobState.FAILED: Event.FAILED,
}
_ENDED = {  # with its files, and while they are being written
    JobState.COMPLETED: (Event.COMPLETED, Event.FINALIZING),
    JobState.CANCELLED: (Event.CANCELLED, Event.CANCELLING),
    JobState.EXPIRED: (Event.EXPIRED, Event.FINALIZING),
}


def of_jobs(tx: Connection, job_ids: Collection[str], *, now: float) -> None:
    """Put the states that these jobs have now into the outbox."""
    if not (hooks := listening(tx)):
        return
    for chunk in chunks(list(job_ids)):
        _write(tx, hooks, standing(tx, batch.c.job_id.in_(chunk)), now)


def of_batches(tx: Connection, batch_ids: Collection[str], *, now: float) -> None:
    """Put the states that these batches have now into the outbox."""
    if hooks := listening(tx):
        _write(tx, hooks, standing(tx, batch.c.id.in_(batch_ids)), now)


def listening(tx: Connection) -> Sequence[Any]:
    """Hooks that are told of events."""
    return tx.execute(LISTENING).all()


def standing(tx: Connection, condition: ColumnElement[bool]) -> Sequence[Any]:
    """Columns of batches, and of their jobs, that make an event."""
    of_job = [job.c[name] for name in ("state", "finished_at", "num_rows", "succeeded", "failed")]
    found = select(batch, *of_job).outerjoin(job, job.c.id == batch.c.job_id)
    return tx.execute(found.where(condition).order_by(batch.c.seq)).all()


def event_of(row: Any) -> Event | None:
    """Event that leads to the state of a batch; None if the record of its job is damaged."""
    if row.job_id is None and row.refused_at is not None:
        return Event.FAILED
    if row.job_id is None:
        return Event.VALIDATING if row.cancelling_at is None else Event.CANCELLED
    if row.state in _ENDED:
        ended, writing = _ENDED[row.state]
        return ended if has_files(row) else writing
    return _OPEN.get(row.state)


def has_files(row: Any) -> bool:
    """True if no files are to be written: they are there, or the job was not asked for as a batch."""
    return row.file_id is None or is_delivered(row)


def is_delivered(row: Any) -> bool:
    """True if the files are of the results that the job has now."""
    return row.delivered_at is not None and row.delivered_of == row.finished_at


def _write(tx: Connection, hooks: Sequence[Any], rows: Iterable[Any], now: float) -> None:
    found = [(row, event) for row in rows if (event := event_of(row)) is not None]
    values = []
    for row, event in found:
        body = body_of(row, event, now=now)
        values += [
            new_message(each.id, event, body, row=row, now=now) for each in hooks if wants(each, row, event)
        ]
    if values:
        tx.execute(insert(message), values)


def wants(found: Any, row: Any, event: Event) -> bool:
    """True if a hook is to be told of the event of a batch."""
    return found.project in (None, row.project) and event.value in json.loads(found.events)


def body_of(row: Any, event: Event, *, now: float) -> str:
    """Body of a message, as OpenAI's webhooks have it; the data name the batch, its state and its counts."""
    delivered = row.job_id is not None and is_delivered(row)
    return encoded(
        f"batch.{event}",
        {
            "id": row.id,
            "job": row.job_id,
            "project": row.project,
            "status": event.value,
            "request_counts": {
                "total": row.num_rows or 0,
                "completed": row.succeeded or 0,
                "failed": row.failed or 0,
            },
            "output_file_id": row.output_file_id if delivered else None,
            "error_file_id": row.error_file_id if delivered else None,
        },
        now=now,
    )


def encoded(kind: str, data: dict[str, Any], *, now: float) -> str:
    """An event as JSON."""
    event_id = f"evt_{secrets.token_hex(16)}"
    return json.dumps({"id": event_id, "object": "event", "created_at": int(now), "type": kind, "data": data})


def new_message(hook_id: str, event: str, body: str, *, row: Any = None, now: float) -> dict[str, Any]:
    """Columns of a message that is sent as soon as a process is there."""
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "hook_id": hook_id,
        "event": str(event),
        "batch_id": row.id if row is not None else None,
        "job_id": row.job_id if row is not None else None,
        "body": body,
        "created_at": now,
        "state": "waiting",
        "attempts": 0,
        "next_at": now,
    }
