"""The queue as the forecast sees it, from the readings of the store."""

from collections.abc import Iterable, Mapping, Sequence

from conserve.jobs.deadlines.forecast import COURSES, Forecast, forecasts
from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.work import QueuedJob, RemainingWork, queued_job, usual_row_tokens, work_of
from conserve.store.books.shapes import ListedJob
from conserve.store.books.slots import HarvestedQuarter
from conserve.store.books.states import GOING, OnLate

LIKELY = 0.9  # a job is said to make its deadline from this probability on
NEW = "(new)"  # id of a job that is about to be queued


def queued(jobs: Sequence[ListedJob], *, now: float) -> list[QueuedJob]:
    """Jobs with rows to run, oldest first as they are given; those past their deadline end at the next look."""
    usual = usual_row_tokens(jobs)
    return [
        queued_job(job, seq, work_of(job, job.unanswered, usual), now=now)
        for seq, job in enumerate(jobs)
        if job.state in GOING and job.unanswered and not is_over(job, now)
    ]


def is_over(job: ListedJob, now: float) -> bool:
    """True of a job whose deadline has passed, and with it its rows."""
    passed = job.deadline is not None and job.deadline <= now
    return passed and job.on_late is not OnLate.BEST_EFFORT


def forecast_queue(
    jobs: Sequence[ListedJob],
    slots: Iterable[HarvestedQuarter],
    *,
    now: float,
    courses: int = COURSES,
) -> Mapping[str, Forecast]:
    """Forecast of each job with rows to run, by its id; none before anything was harvested."""
    return forecasts(queued(jobs, now=now), Rates.of(list(slots)), now=now, courses=courses)


def forecast_new(
    jobs: Sequence[ListedJob],
    slots: Iterable[HarvestedQuarter],
    *,
    rows: int,
    priority: int,
    deadline: float | None,
    now: float,
) -> Forecast | None:
    """Forecast of a job that would be queued behind these; None before anything was harvested."""
    waiting = queued(jobs, now=now)
    work = RemainingWork(rows_left=rows, row_tokens=usual_row_tokens(jobs), rows_seen=0)
    new = QueuedJob(id=NEW, seq=len(jobs), work=work, priority=priority, deadline=deadline)
    return forecasts([*waiting, new], Rates.of(list(slots)), now=now).get(NEW)
