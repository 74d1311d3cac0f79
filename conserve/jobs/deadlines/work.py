"""Predicted work of a job: its rows that are left, times the tokens of a row. Pure.

Tokens are those that an engine computes: of prompts without those found in its prefix cache, and of answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

UNSEEN_TOKENS = 500.0  # of a row, in a store that has answered none


class AnswerTokens(Protocol):
    """Tokens of answers."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class WorkCounters(AnswerTokens, Protocol):
    """Counters of a job, as the store keeps them; failed rows count no tokens."""

    @property
    def succeeded(self) -> int: ...


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


def work_of(job: WorkCounters, rows_left: int, usual_tokens: float) -> RemainingWork:
    """Work left of a job; until a row of it is answered, rows take `usual_tokens` each."""
    if not job.succeeded:
        return RemainingWork(rows_left=rows_left, row_tokens=usual_tokens, rows_seen=0)
    mean = computed_tokens(job) / job.succeeded
    return RemainingWork(rows_left=rows_left, row_tokens=max(1.0, mean), rows_seen=job.succeeded)


def usual_row_tokens(jobs: Sequence[WorkCounters]) -> float:
    """Mean tokens of a row, each job with answered rows counting once; `UNSEEN_TOKENS` without any."""
    means = [computed_tokens(job) / job.succeeded for job in jobs if job.succeeded]
    return max(1.0, sum(means) / len(means)) if means else UNSEEN_TOKENS
