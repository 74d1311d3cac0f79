"""Claims of rows by shares: each group of jobs in turn, as many rows as its weight allows."""

from collections.abc import Callable, Sequence

from conserve.errors import EndpointFault, EngineDied
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import Outcomes
from conserve.jobs.window.shares import Group, Shares

FAILED_ATTEMPTS = (EndpointFault.kind, EngineDied.kind)
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


def settle(shares: Shares, outcomes: Outcomes) -> None:
    """Count the tokens of rows that have ended, the charge of attempts that failed, and nothing of other rows.

    A row that times out holds a place of the endpoint for as long as many others.
    """
    for finished in outcomes.finished:
        row, result = (finished.job_id, finished.position), finished.result
        if result.error_type in FAILED_ATTEMPTS:
            shares.stands(row)
        else:
            shares.settled(row, result.prompt_tokens + result.completion_tokens)
    for work, decision in outcomes.returned:
        if decision.is_failure:
            shares.stands(work.key)
        else:
            shares.settled(work.key, 0)
