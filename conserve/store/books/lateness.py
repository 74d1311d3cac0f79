"""Deadlines that have passed: the jobs that are to end for theirs, and those that go on without it."""

from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    extract,
    func,
    null,
    or_,
    select,
)

from conserve.store.books.states import OPEN, JobState, OnLate, stored
from conserve.store.database import schema

job = schema.job

CLOCK = extract("epoch", func.clock_timestamp())
"""Time of a PostgreSQL server, in seconds since 1970."""


@cache
def late_ids(dialect: str) -> Select[Any]:
    """Statement for the ids of the jobs that are late at `:now`."""
    return select(job.c.id).where(late(dialect, bindparam("now")))


def is_late(tx: Connection, now: float) -> ColumnElement[bool]:
    """Condition that a job has rows to run, that its deadline has passed, and that it expires then."""
    return late(tx.dialect.name, now)


def late(dialect: str, now: Any) -> ColumnElement[bool]:
    """`is_late` on a kind of database, at a time or a parameter."""
    return and_(job.c.state.in_(stored(OPEN)), is_over(dialect, now))


def is_over(dialect: str, now: Any) -> ColumnElement[bool]:
    """Condition that a job's deadline has passed, and that it expires then with rows left."""
    expires = or_(job.c.on_late.is_(None), job.c.on_late != OnLate.BEST_EFFORT.value)
    return and_(has_passed(dialect, job.c.deadline, now), expires)


def has_passed(dialect: str, moment: ColumnElement[Any], now: Any) -> ColumnElement[bool]:
    """Condition that a moment has passed; not known of a row without one.

    It has passed by the database's clock too where that has one: this machine's may be ahead of all others.
    """
    here = moment <= now
    return and_(here, moment <= CLOCK) if dialect == "postgresql" else here


def kept_deadline(tx: Connection, now: float) -> ColumnElement[float]:
    """Deadline of a job that goes on: none in place of one that has ended it, or would at the next look."""
    ended = or_(job.c.state == JobState.EXPIRED.value, is_over(tx.dialect.name, now))
    return case((ended, null()), else_=job.c.deadline)
