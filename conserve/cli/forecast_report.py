"""Forecasts in words, tables and JSON. Imports no typer: see shortcuts."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from conserve.cli import output
from conserve.jobs.deadlines.forecast import Forecast
from conserve.jobs.deadlines.queue import LIKELY
from conserve.store.books.readings import JobReading
from conserve.store.books.states import JobState

FAR = "weeks away"
WEEKS = "weeks from now"  # in a sentence
IDLE = "if rows run from now on"  # where `none_runs`


def none_runs(jobs: Iterable[JobReading]) -> bool:
    """True if no job runs, so that a forecast supposes that rows run from now on."""
    return not any(job.state is JobState.RUNNING for job in jobs)


def header() -> Sequence[str]:
    """Heads of the table's columns."""
    return "JOB", "ROWS LEFT", "DONE (50 %)", "DONE (90 %)", "DEADLINE", "IN TIME"


def row(job: JobReading, found: Forecast, now: float) -> Sequence[str]:
    """A job's line in the table."""
    in_time = percent(found)
    if found.in_time is not None and found.in_time < LIKELY:
        in_time = output.coloured(in_time, "red" if found.is_late else "yellow")
    moments = [when(moment, now) for moment in (found.done_50, found.done_90)]
    deadline = "-" if job.deadline is None else when(job.deadline, now)
    return [job.id, f"{job.unanswered:,}", *moments, deadline, in_time]


def document(job: JobReading, found: Forecast | None) -> Mapping[str, Any]:
    """Forecast of a job as JSON (docs/reference/json.md)."""
    return {
        "job_id": job.id,
        "rows_left": job.unanswered,
        "done_50": output.iso(found.done_50) if found else None,
        "done_90": output.iso(found.done_90) if found else None,
        "deadline": output.iso(job.deadline),
        "in_time": found.in_time if found else None,
    }


def sentence(found: Forecast, deadline: float | None, now: float) -> str:
    """Forecast of a job in words."""
    done = f"done {both_ends(found.done_50, found.done_90, now)}"
    if deadline is None or found.in_time is None:
        return done
    return f"{done}; in time with {percent(found)}"


def queue_sentence(found: Mapping[str, Forecast], now: float) -> str:
    """Forecast of all jobs in words: the last one's end, and jobs that may be late."""
    ends = [
        max((at(one, name) for one in found.values()), key=lambda end: (end is None, end or 0.0))
        for name in ("done_50", "done_90")
    ]
    words = f"all done {both_ends(ends[0], ends[1], now)}"
    late = [job_id for job_id, one in found.items() if one.in_time is not None and one.in_time < LIKELY]
    return f"{words}; may miss its deadline: {', '.join(late)}" if late else words


def at(found: Forecast, name: str) -> float | None:
    """One of a forecast's moments."""
    moment: float | None = getattr(found, name)
    return moment


def warning(found: Forecast, deadline: float, now: float) -> str | None:
    """Warning that a job will not, or may not, be done by its deadline; None for one that will."""
    if found.in_time is None or found.in_time >= LIKELY:
        return None
    verb = "will not make it" if found.is_late else "may not make it"
    return f"{verb}: {percent(found)} by {when(deadline, now)} (done {by(found.done_90, now)} with 90 %)"


def both_ends(done_50: float | None, done_90: float | None, now: float) -> str:
    """Moments of a forecast, of 50 and of 90 %, in words."""
    if done_50 is None:
        return f"{WEEKS} (50 and 90 %)"
    return f"by {when(done_50, now)} (50 %), {WEEKS if done_90 is None else when(done_90, now)} (90 %)"


def by(moment: float | None, now: float) -> str:
    """A moment by which a job is done, in words."""
    return WEEKS if moment is None else f"by {when(moment, now)}"


def percent(found: Forecast) -> str:
    """Probability that a job is done in time."""
    return "-" if found.in_time is None else f"{100 * found.in_time:.0f} %"


def when(moment: float | None, now: float) -> str:
    """Local time of a moment to the minute, with its date unless it is today."""
    if moment is None:
        return FAR
    local, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(now)
    return local.strftime("%H:%M" if local.date() == today.date() else "%Y-%m-%d %H:%M")
