"""Predicted work of a job: its rows that are left, times the tokens of a row. Pure.

Tokens are those that an engine computes: of prompts without those found in its prefix cache, and of answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conserve.store.books.shapes import AnswerTokens, CountedJob
from conserve.store.books.states import OnLate

UNSEEN_TOKENS = 500.0  # of a row, in a store that has answered none


def computed_tokens(answered: AnswerTokens, resumed: int = 0) -> int:
    """Tokens that the engine computed for answers, of which it took `resumed` over from earlier attempts."""
    prompt_tokens = max(0, answered.prompt_tokens - answered.cached_tokens)
    return prompt_tokens + answered.completion_tokens - resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """Rows of a job that have no result yet, and the tokens of a row."""

    rows_left: int
    row_tokens: float
    rows_seen: int  # rows of this job that `row_tokens` is the mean of; 0: it is another jobs' mean

    @property
    def tokens(self) -> float:
        """Predicted tokens that are left to compute."""
        return self.rows_left * self.row_tokens


class QueuedJob(NamedTuple):
    """A job that waits or runs, with the work that is left of it."""

    id: str
    seq: int
    work: RemainingWork
    priority: int = 0
    deadline: float | None = None  # None once it has passed and the job goes on all the same
    on_late: OnLate | None = None
    next_position: int = 0
    num_rows: int = 0

    @property
    def expires(self) -> bool:
        """True if the rows that are left at its deadline leave the queue."""
        return self.on_late is not OnLate.BEST_EFFORT

    @property
    def pushes(self) -> bool:
        """True if it may take more of what live requests bear, should it miss its deadline otherwise."""
        return self.deadline is not None and self.on_late is OnLate.PUSH


def queued_job(
    job: CountedJob,
    seq: int,
    work: RemainingWork,
    *,
    now: float,
    next_position: int = 0,
    num_rows: int = 0,
) -> QueuedJob:
    """A job of the store in the queue of this moment."""
    to_come = job.deadline is not None and job.deadline > now
    deadline = job.deadline if to_come else None
    late = None if job.on_late is None else OnLate(job.on_late)
    return QueuedJob(job.id, seq, work, job.priority, deadline, late, next_position, num_rows)


def work_of(job: CountedJob, rows_left: int, usual_tokens: float) -> RemainingWork:
    """Work left of a job; until a row of it is answered, rows take `usual_tokens` each."""
    if not job.succeeded:
        return RemainingWork(rows_left=rows_left, row_tokens=usual_tokens, rows_seen=0)
    mean = computed_tokens(job) / job.succeeded
    return RemainingWork(rows_left=rows_left, row_tokens=max(1.0, mean), rows_seen=job.succeeded)


def usual_row_tokens(jobs: Sequence[CountedJob]) -> float:
    """Mean tokens of a row, each job with answered rows counting once; `UNSEEN_TOKENS` without any."""
    means = [computed_tokens(job) / job.succeeded for job in jobs if job.succeeded]
    return max(1.0, sum(means) / len(means)) if means else UNSEEN_TOKENS
