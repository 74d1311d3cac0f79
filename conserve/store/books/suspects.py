"""Suspects that wait: rows in flight when an engine or a harvester died, which run alone."""

from collections.abc import Collection
from math import inf

from sqlalchemy import Connection, select

from conserve.store.books.queue import IS_DUE, due_at, runnable_jobs
from conserve.store.books.shapes import RunnableRow
from conserve.store.database import schema

request = schema.request


def go_ahead(
    tx: Connection, *, now: float, only: Collection[str] | None = None, model: str | None = None
) -> bool | None:
    """True if a suspect's job goes before all jobs with other rows to claim, False if not; None without a suspect.

    The look reads all waiting rows, so it belongs into no claim.
    """
    if not (with_suspects := waiting(tx, now=now, suspect=True)):
        return None
    with_others = waiting(tx, now=now, suspect=False)
    runnable = runnable_jobs(tx, only, model, locked=False)
    suspects = [turn(job, now) for job in runnable if job.id in with_suspects]
    others = [turn(job, now) for job in runnable if job.next_position < job.num_rows or job.id in with_others]
    return min(suspects) < min(others, default=(inf, inf)) if suspects else None


def waiting(tx: Connection, *, now: float, suspect: bool) -> set[str]:
    """Jobs with waiting rows whose backoff is over: with suspects, or with others."""
    due = request.c.epoch.is_(None), request.c.suspect == suspect, IS_DUE
    return set(tx.scalars(select(request.c.job_id).distinct().where(*due), due_at(now)))


def turn(job: RunnableRow, now: float) -> tuple[float, float]:
    """Place of a job among all: by priority, then by a deadline that is to come."""
    deadline = job.deadline if job.deadline is not None and job.deadline > now else inf
    return -job.priority, deadline
