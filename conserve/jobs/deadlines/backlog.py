"""The backlog by deadline: seconds of work that is due within some hours, for programs that add engines. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from conserve.jobs.deadlines.work import QueuedJob

WITHIN_S = (3600, 4 * 3600, 12 * 3600, 24 * 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Predicted seconds of harvesting, at the rate that is usual now."""

    due_s: tuple[tuple[int, float], ...]  # (within so many seconds, work due by then), each with those before
    total_s: float
    load: float  # largest share, over all deadlines, of the time until it that the work until then takes


def backlog(jobs: Sequence[QueuedJob], tokens_per_s: float | None, *, now: float) -> Backlog | None:
    """Backlog of a queue; None before anything was harvested."""
    if not tokens_per_s:
        return None
    dated = dated_works(jobs, tokens_per_s, now=now)
    return Backlog(
        due_s=tuple(
            (within_s, sum(work_s for left_s, work_s in dated if left_s <= within_s)) for within_s in WITHIN_S
        ),
        total_s=sum(job.work.tokens for job in jobs) / tokens_per_s,
        load=load_of(jobs, tokens_per_s, now=now),
    )


def dated_works(jobs: Sequence[QueuedJob], tokens_per_s: float, *, now: float) -> list[tuple[float, float]]:
    """Seconds until each deadline and seconds of work due then, by deadline."""
    return sorted((job.deadline - now, job.work.tokens / tokens_per_s) for job in jobs if job.deadline)


def load_of(jobs: Sequence[QueuedJob], tokens_per_s: float, *, now: float) -> float:
    """Load of a queue: what is due waits for all work of higher priorities, with and without a deadline."""
    higher_s, load = 0.0, 0.0
    for _, level in groupby(sorted(jobs, key=lambda job: -job.priority), key=lambda job: job.priority):
        same = list(level)
        due_s = higher_s
        for left_s, work_s in dated_works(same, tokens_per_s, now=now):
            due_s += work_s
            load = max(load, due_s / max(left_s, 1.0))
        higher_s += sum(job.work.tokens for job in same) / tokens_per_s
    return load
