"""Forecast: when the jobs of a queue will be done, with 50 and 90 % probability. Pure.

Many possible courses of the harvest are drawn, and on each the jobs end in the order of the harvester: by priority,
then by deadline, with a share for jobs without one. Row lengths are drawn too, closer the more rows were answered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, inf, isfinite, sqrt
from random import Random

from conserve.jobs.deadlines.rate import Course, Rates
from conserve.jobs.deadlines.slack import SHARE, share_of_tokens
from conserve.jobs.deadlines.work import RemainingWork

COURSES = 200
SPREAD = 0.6  # standard deviation of row lengths over their mean, as of tasks with short and long inputs
UNSEEN_SPREAD = 0.5  # of the mean itself, until a row of the job is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One job that waits or runs."""

    id: str
    seq: int
    work: RemainingWork
    priority: int = 0
    deadline: float | None = None
    expires: bool = True  # at its deadline, with the rows that are left


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Moments at which a job is done if a harvester runs; None for one that is weeks away."""

    done_50: float | None
    done_90: float | None
    in_time: float | None  # probability that it is done by its deadline; None without one

    @property
    def is_late(self) -> bool:
        """True if the job will rather miss its deadline than keep it."""
        return self.in_time is not None and self.in_time < 0.5


def forecasts(
    jobs: Sequence[QueuedJob], rates: Rates, *, now: float, courses: int = COURSES
) -> Mapping[str, Forecast]:
    """Forecast of each job; none before anything was harvested."""
    if not rates.by_slot or not jobs:
        return {}
    ends: dict[str, list[float]] = {job.id: [] for job in jobs}
    for seed in range(courses):
        course, dice = Course(rates, now=now, seed=seed), Random(-1 - seed)
        for job_id, end in course_of_queue(jobs, course, dice).items():
            ends[job_id].append(end)
    return {job.id: forecast(sorted(ends[job.id]), job.deadline) for job in jobs}


def forecast(ends: Sequence[float], deadline: float | None) -> Forecast:
    """Forecast of one job by the moments at which its courses end, ascending."""
    half, most = ends[len(ends) // 2], ends[min(len(ends) - 1, len(ends) * 9 // 10)]
    return Forecast(
        done_50=half if isfinite(half) else None,
        done_90=most if isfinite(most) else None,
        in_time=None if deadline is None else sum(end <= deadline for end in ends) / len(ends),
    )


def course_of_queue(jobs: Sequence[QueuedJob], course: Course, dice: Random) -> Mapping[str, float]:
    """Moment at which each job is done on one course."""
    ends: dict[str, float] = {}
    tokens = {job.id: drawn_tokens(job.work, dice) for job in jobs}
    done = 0.0
    by_priority = sorted(jobs, key=lambda job: -job.priority)
    for _, level in groupby(by_priority, key=lambda job: job.priority):
        done += course_of_level(list(level), tokens, course, dice, done, ends)
    return ends


def drawn_tokens(work: RemainingWork, dice: Random) -> float:
    """Possible tokens left of a job: the mean of its rows is known the better the more were answered."""
    if not work.rows_left:
        return 0.0
    of_mean = SPREAD / sqrt(work.rows_seen) if work.rows_seen else UNSEEN_SPREAD
    spread = min(UNSEEN_SPREAD, sqrt(of_mean**2 + SPREAD**2 / work.rows_left))
    return work.tokens * exp(dice.gauss(-(spread**2) / 2, spread))


def course_of_level(
    jobs: Sequence[QueuedJob],
    tokens: Mapping[str, float],
    course: Course,
    dice: Random,
    done: float,
    ends: dict[str, float],
) -> float:
    """Let the jobs of one priority end, once `done` tokens of others are; returns the tokens that they take."""
    dated = sorted((job for job in jobs if job.deadline is not None), key=lambda job: (job.deadline, job.seq))
    undated = [job for job in jobs if job.deadline is None]
    kept = sum(tokens[job.id] for job in undated)
    left = [[(tokens[job.id], job.work.rows_left) for job in some] for some in (dated, undated)]
    share = share_of_tokens(SHARE, due=left[0], kept=left[1]) if dated else 0.0
    due = 0.0
    for job in dated:
        assert job.deadline is not None
        ends[job.id] = course.when(done + with_others(due + tokens[job.id], share, kept))
        if job.expires and ends[job.id] > job.deadline:  # the rest of it leaves the queue
            due = max(due, without_others(course.by(job.deadline) - done, share, kept))
        else:
            due += tokens[job.id]
    for job in undated:
        # Prefixes decide whose rows go first among jobs without a deadline: anything from its own rows to all.
        ahead = dice.random() * (kept - tokens[job.id])
        ends[job.id] = course.when(done + with_others(tokens[job.id] + ahead, 1 - share, due))
    return due + kept


def with_others(tokens: float, share: float, others: float) -> float:
    """Tokens done by when `tokens` of one class are, if another class gets `share` until its `others` are done."""
    if share >= 1:
        return tokens + others
    alongside = tokens / (1 - share)
    return alongside if alongside * share <= others else tokens + others


def without_others(tokens: float, share: float, others: float) -> float:
    """Inverse of `with_others`: tokens of the first class among so many of both."""
    return max(0.0, tokens * (1 - share) if tokens * share <= others else tokens - others)


def finite(moment: float | None) -> float:
    """A forecast's moment for comparisons."""
    return inf if moment is None else moment
