"""Slack order: whose rows go next so that jobs end by their deadlines. Pure.

Jobs with a deadline go earliest deadline first, and a share of the rows is kept for jobs without one. A row of a
later job may go ahead if it shares the prefix in progress and no job before it is tight. A job is tight once the
time to its deadline is shorter than four times the predicted time of all rows that are due by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from conserve.jobs.deadlines.work import QueuedJob

SHARE = 0.2  # of the rows, for jobs without a deadline while others have one
CAUTION = 4.0  # times the predicted time of the rows due by a deadline, below which a job is tight
MARGIN_S = 60.0  # before the deadline: rows in flight end, and results are written

TokensAndRows = Sequence[tuple[float, float]]
"""Tokens and rows that are left, of each job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackOrder:
    """Jobs with a deadline in order, and those whose rows may go ahead for a shared prefix."""

    urgent: tuple[int, ...] = ()
    riders: frozenset[int] = frozenset()  # of `urgent`
    others_ride: bool = False  # jobs without a deadline too
    share: float = SHARE


def slack_order(
    jobs: Sequence[QueuedJob], *, now: float, tokens_per_s: float | None, share: float = SHARE
) -> SlackOrder:
    """Order of the jobs; without a known rate every job counts as tight, so that no row goes ahead."""
    dated = sorted((job.deadline, job.seq, job.work.tokens) for job in jobs if job.deadline is not None)
    urgent = tuple(seq for _, seq, _ in dated)
    if not dated or not tokens_per_s:
        return SlackOrder(urgent=urgent, riders=frozenset(urgent[:1]), share=share)
    left = {
        kept: [(job.work.tokens, job.work.rows_left) for job in jobs if (job.deadline is None) == kept]
        for kept in (False, True)
    }
    usable = tokens_per_s * (1 - share_of_tokens(share, due=left[False], kept=left[True]))
    due = 0.0
    for place, (deadline, _, tokens_left) in enumerate(dated):
        due += tokens_left
        if deadline - now < CAUTION * due / usable + MARGIN_S:
            return SlackOrder(urgent=urgent, riders=frozenset(urgent[: place + 1]), share=share)
    return SlackOrder(urgent=urgent, riders=frozenset(urgent), others_ride=True, share=share)


def share_of_tokens(share: float, *, due: TokensAndRows, kept: TokensAndRows) -> float:
    """Share of the tokens that a `share` of the rows takes, of jobs with `kept` left beside jobs with `due` left.

    Long rows without a deadline take far more than their share of the rows.
    """
    others, its = row_tokens(due), row_tokens(kept)
    return share * its / max(share * its + (1 - share) * others, 1e-9)


def row_tokens(left: TokensAndRows) -> float:
    """Mean tokens of a row of these jobs; 0 if there is none."""
    return sum(tokens for tokens, _ in left) / max(1.0, sum(rows for _, rows in left))


def is_others_turn(turn: int, share: float) -> bool:
    """True on the turns of jobs without a deadline: evenly spread, `share` of all."""
    return int((turn + 1) * share) > int(turn * share)


def claim_order(jobs: Sequence[QueuedJob], turn: int) -> list[QueuedJob]:
    """Runnable jobs by priority, then by deadline; on the others' turns those without a deadline go first.

    Priority stands above deadlines: a job of a lower priority waits, whatever its deadline.
    """
    if all(job.deadline is None for job in jobs):
        return list(jobs)
    undated_first = is_others_turn(turn, SHARE)

    def place(job: QueuedJob) -> tuple[float, ...]:
        undated = job.deadline is None
        return -job.priority, undated != undated_first, job.deadline or 0.0, job.seq

    return sorted(jobs, key=place)
