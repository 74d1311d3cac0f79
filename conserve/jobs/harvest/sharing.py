"""Claims of rows by shares: each group of jobs in turn, as many rows as its weight allows."""

from collections.abc import Callable, Sequence

from conserve.jobs.harvest.outbox import Outbox
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.window.shares import Group, Shares

ClaimOf = Callable[[Group, int], list[ReadyRow]]


def claim_by_shares(shares: Shares, groups: Sequence[Group], limit: int, claim_of: ClaimOf) -> list[ReadyRow]:
    """Claim up to `limit` rows; what one group has not goes to the others. Rows of a group stay together."""
    works: list[ReadyRow] = []
    waiting = list(groups)
    while waiting and len(works) < limit:
        for group, rows in shares.allot(waiting, limit - len(works)).items():
            found = claim_of(group, rows)
            shares.claimed(group, {work.key: work.epoch for work in found})
            works += found
            if not found:
                waiting.remove(group)
    return works


def settle(shares: Shares, outbox: Outbox) -> None:
    """Count the tokens of rows that have ended, and of no row that goes back."""
    for finished in outbox.finished:
        tokens = finished.result.prompt_tokens + finished.result.completion_tokens
        shares.settled((finished.job_id, finished.position), tokens)
    for work, _ in outbox.returned:
        shares.settled(work.key, 0)
