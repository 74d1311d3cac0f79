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

from conserve.store.books.batch_state import BatchFacts, BatchState, state_of
from conserve.store.books.states import OF_TEXT, JobState
from conserve.store.database import schema
from conserve.store.database.connection import chunks

batch, hook, job, message = schema.batch, schema.hook, schema.job, schema.message


class Event(StrEnum):
    """Change of a batch, named by the `BatchState` that it leads to; a pause is an event too.

    A batch comes to be in progress for the first time, after a pause, or again after `conserve retry`.
    """

    VALIDATING = BatchState.VALIDATING.value
    IN_PROGRESS = BatchState.IN_PROGRESS.value
    PAUSED = "paused"
    FINALIZING = BatchState.FINALIZING.value
    CANCELLING = BatchState.CANCELLING.value
    COMPLETED = BatchState.COMPLETED.value
    FAILED = BatchState.FAILED.value
    EXPIRED = BatchState.EXPIRED.value
    CANCELLED = BatchState.CANCELLED.value


ENDS = (Event.COMPLETED, Event.FAILED, Event.EXPIRED, Event.CANCELLED)
"""Events that a hook is told of unless it names others."""

LISTENING = select(hook).where(hook.c.ended_at.is_(None)).order_by(hook.c.seq)


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
    state = OF_TEXT.get(row.state)
    if state is JobState.PAUSED:
        return Event.PAUSED
    if row.job_id is not None and state is None:
        return None
    return Event(state_of(facts_of(row, state)))


def facts_of(row: Any, state: JobState | None) -> BatchFacts:
    """Facts of a batch and its job; a job that was not asked for as a batch has no files to write."""
    return BatchFacts(
        bound=row.job_id is not None,
        job=state,
        refused=row.refused_at is not None,
        cancelled=row.cancelling_at is not None,
        written=row.file_id is None or is_delivered(row),
    )


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
