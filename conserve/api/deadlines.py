"""Deadlines as Python says them: a moment, or a length of time from now."""

import time
from datetime import UTC, datetime, timedelta

from conserve.errors import UsageError
from conserve.store.books.states import LONGEST_DEADLINE_S, OnLate


def moment_of(deadline: datetime | timedelta | None) -> float | None:
    """Seconds since 1970 of a deadline; a moment without a time zone is local time."""
    if deadline is None:
        return None
    now = time.time()
    if isinstance(deadline, timedelta):
        moment = now + deadline.total_seconds()
    elif isinstance(deadline, datetime):
        moment = deadline.timestamp()
    else:
        raise UsageError(f"deadline is a datetime or a timedelta, not {type(deadline).__name__}")
    if not now < moment <= now + LONGEST_DEADLINE_S:
        raise UsageError("a deadline lies in the future, at most 365 days away")
    return moment


def on_late_of(text: str | None, deadline: datetime | timedelta | None) -> OnLate | None:
    """Fate of a job at its deadline, by the name that a caller gives; raises `UsageError`."""
    if text is None:
        return None
    if deadline is None:
        raise UsageError("on_late wants a deadline")
    if text not in tuple(OnLate):
        raise UsageError(f"on_late is {' or '.join(OnLate)}, not {text!r}")
    return OnLate(text)


def to_datetime(moment: float | None) -> datetime | None:
    """A moment in s since 1970 as a datetime in UTC."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC)
