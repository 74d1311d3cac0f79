"""The backlog by deadline: seconds of work that is due within some hours, for programs that add engines. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from conserve.jobs.deadlines.forecast import QueuedJob

WITHIN_S = (3600, 4 * 3600, 12 * 3600, 24 * 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Predicted seconds of harvesting, at the rate that is usual now."""

    due_s: tuple[tuple[int, float], ...]  # (within so many seconds, work due by then), each with those before
    total_s: float
    load: float  # largest share, over all deadlines, of the time until it that the work due by then takes


def backlog(jobs: Sequence[QueuedJob], tokens_per_s: float | None, *, now: float) -> Backlog | None:
    """Backlog of a queue; None before anything was harvested."""
    if not tokens_per_s:
        return None
    dated = sorted((job.deadline - now, job.work.tokens / tokens_per_s) for job in jobs if job.deadline)
    due, load = 0.0, 0.0
    for left_s, work_s in dated:
        due += work_s
        load = max(load, due / max(left_s, 1.0))
    return Backlog(
        due_s=tuple(
            (within_s, sum(work_s for left_s, work_s in dated if left_s <= within_s)) for within_s in WITHIN_S
        ),
        total_s=sum(job.work.tokens for job in jobs) / tokens_per_s,
        load=load,
    )
