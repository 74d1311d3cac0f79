"""Forecast: when the jobs of a queue will be done, with 50 and 90 % probability. Pure.

Many possible courses of the harvest are drawn, and on each the jobs end in the order of the harvester: by priority,
then by deadline, with a share for jobs without one. Row lengths are drawn too, closer the more rows were answered.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, inf, isfinite, sqrt
from random import Random

from conserve.jobs.deadlines.rate import Course, Rates
from conserve.jobs.deadlines.slack import SHARE, share_of_tokens
from conserve.jobs.deadlines.work import QueuedJob, RemainingWork

COURSES = 200
SPREAD = 0.6  # standard deviation of row lengths over their mean, as of tasks with short and long inputs
UNSEEN_SPREAD = 0.5  # of the mean itself, until a row of the job is answered


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


@dataclass(frozen=True, slots=True)
class Level:
    """Jobs of one priority, the same for all courses: those with a deadline in its order, and those without one."""

    dated: Sequence[QueuedJob]
    undated: Sequence[QueuedJob]
    spreads: Sequence[float]  # of the logarithm of a job's tokens, the dated jobs first

    @classmethod
    def of(cls, jobs: Iterable[QueuedJob]) -> "Level":
        """Level of the jobs of one priority."""
        dated: list[QueuedJob] = []
        undated: list[QueuedJob] = []
        for job in jobs:
            (undated if job.deadline is None else dated).append(job)
        dated.sort(key=lambda job: (job.deadline, job.seq))
        return cls(dated, undated, [spread(job.work) for job in (*dated, *undated)])

    def drawn_tokens(self, dice: Random) -> tuple[list[float], list[float]]:
        """Possible tokens left of each job: of those with a deadline, and of those without."""
        drawn = [
            job.work.tokens * exp(dice.gauss(-(spread**2) / 2, spread))
            for job, spread in zip((*self.dated, *self.undated), self.spreads, strict=True)
        ]
        return drawn[: len(self.dated)], drawn[len(self.dated) :]


def forecasts(
    jobs: Sequence[QueuedJob], rates: Rates, *, now: float, courses: int = COURSES
) -> Mapping[str, Forecast]:
    """Forecast of each job; none before anything was harvested."""
    if not rates.by_slot or not jobs:
        return {}
    levels = levels_of(jobs)
    ends: dict[str, list[float]] = {job.id: [] for job in jobs}
    for seed in range(courses):
        course_of_queue(levels, Course(rates, now=now, seed=seed), Random(-1 - seed), ends)
    return {job.id: forecast(sorted(ends[job.id]), job.deadline) for job in jobs}


def forecast(ends: Sequence[float], deadline: float | None) -> Forecast:
    """Forecast of one job by the moments at which its courses end, ascending."""
    half, most = ends[len(ends) // 2], ends[min(len(ends) - 1, len(ends) * 9 // 10)]
    return Forecast(
        done_50=half if isfinite(half) else None,
        done_90=most if isfinite(most) else None,
        in_time=None if deadline is None else bisect_right(ends, deadline) / len(ends),
    )


def levels_of(jobs: Iterable[QueuedJob]) -> list[Level]:
    """Jobs by priority, the highest first."""
    by_priority = sorted(jobs, key=lambda job: -job.priority)
    return [Level.of(level) for _, level in groupby(by_priority, key=lambda job: job.priority)]


def course_of_queue(
    levels: Iterable[Level], course: Course, dice: Random, ends: Mapping[str, list[float]]
) -> None:
    """Note the moment at which each job is done on one course."""
    done = 0.0
    for level in levels:
        done += course_of_level(level, course, dice, done, ends)


def spread(work: RemainingWork) -> float:
    """Spread of a job's tokens left: the mean of its rows is known the better the more were answered."""
    of_mean = SPREAD / sqrt(work.rows_seen) if work.rows_seen else UNSEEN_SPREAD
    return min(UNSEEN_SPREAD, sqrt(of_mean**2 + SPREAD**2 / max(1, work.rows_left)))


def course_of_level(
    level: Level, course: Course, dice: Random, done: float, ends: Mapping[str, list[float]]
) -> float:
    """Let the jobs of one priority end, once `done` tokens of others are; returns the tokens that they take."""
    dated_tokens, undated_tokens = level.drawn_tokens(dice)
    share, kept = 0.0, sum(undated_tokens)
    if level.dated:
        left = [
            [(tokens, job.work.rows_left) for tokens, job in zip(drawn, jobs, strict=True)]
            for drawn, jobs in ((dated_tokens, level.dated), (undated_tokens, level.undated))
        ]
        share = share_of_tokens(SHARE, due=left[0], kept=left[1])
    due = 0.0
    for job, tokens in zip(level.dated, dated_tokens, strict=True):
        assert job.deadline is not None
        end = course.when(done + with_others(due + tokens, share, kept))
        ends[job.id].append(end)
        if job.expires and end > job.deadline:  # the rest of it leaves the queue
            due = max(due, without_others(course.by(job.deadline) - done, share, kept))
        else:
            due += tokens
    for job, tokens in zip(level.undated, undated_tokens, strict=True):
        # Prefixes decide whose rows go first among jobs without a deadline: anything from its own rows to all.
        ahead = dice.random() * (kept - tokens)
        ends[job.id].append(course.when(done + with_others(tokens + ahead, 1 - share, due)))
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
