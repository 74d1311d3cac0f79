"""The retry policy: decides, as data, about a row whose attempt ended in an error."""

from dataclasses import dataclass

from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointUnavailable,
    EngineDied,
    RequestRejected,
    RetryableError,
    ServerLost,
)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
REFUSED_ALONE = 3  # refusals of a row by an endpoint that answers others, from which on the row waits alone
SUSPECT_FAILURES = 2  # engines that die with a row alone in flight until the row is to blame


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHistory:
    """Attempts of a row and their ends; a field says whether the latest attempt counts in it."""

    attempts: int = 1
    """Attempts so far, the latest included."""
    faults: int = 0
    """Faulty answers before the latest attempt."""
    deaths: int = 0
    """Engines and servers that went down with the row alone, before the latest attempt."""
    refusals: int = 0
    """Refusals by a busy endpoint that answered other rows in between, the latest included."""
    suspect: bool = False
    """The row may be what takes servers down, and runs alone."""
    alone: bool = False
    """No other row was in flight during the latest attempt."""
    gained: bool = False
    """The latest attempt brought tokens for the next one to go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    """Either the row fails (`error_type` is set), or it waits `after_s` and is tried again."""

    error_type: str | None = None
    after_s: float = 0.0
    is_failure: bool = False  # of the row: it counts in the row's record
    suspect: bool = False  # the row runs alone next time
    lost: bool = False  # a server went down with the row
    hold_s: float = 0.0  # time in which no row should be sent to the endpoint


def decide(
    error: EndpointError, row: RowHistory, *, max_attempts: int, max_deaths: int = SUSPECT_FAILURES
) -> RetryDecision:
    """Judge an error by what it says about the row.

    | error | decision |
    |---|---|
    | rejection | final |
    | busy, or out of reach | says nothing about the row: all rows wait, as long as it takes |
    | busy `REFUSED_ALONE` times, while others were answered | this row waits, the others go on |
    | faulty answer | a failure; `max_attempts` of them fail the row |
    | faulty answer that brought tokens | no failure, since the row gets done by pieces |
    | the engine died | the row is a suspect; alone, it is to blame, and fails after `max_deaths` |
    | a server went down | a loss, by which the store finds suspects; a suspect is to blame |

    A suspect stays one while nothing is said about it.
    """
    if isinstance(error, RequestRejected):
        return RetryDecision(error_type=error.kind)
    if isinstance(error, EngineDied):
        return decide_death(error, row, max_deaths)
    if isinstance(error, EndpointBusy):
        hold_s = min(error.retry_after_s or FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        if row.refusals >= REFUSED_ALONE:
            alone_s = max(hold_s, backoff_s(row.refusals - REFUSED_ALONE))
            return RetryDecision(after_s=alone_s, suspect=row.suspect)
        return RetryDecision(hold_s=hold_s, suspect=row.suspect)
    if isinstance(error, EndpointUnavailable):
        return RetryDecision(hold_s=FIRST_BACKOFF_S, suspect=row.suspect)
    if isinstance(error, ServerLost):
        if row.gained:
            return RetryDecision(after_s=FIRST_BACKOFF_S, suspect=row.suspect)
        return decide_loss(error, row, max_deaths)
    assert isinstance(error, RetryableError), error
    if row.gained:
        return RetryDecision(after_s=backoff_s(row.attempts - 1))
    if row.faults + 1 >= max_attempts:
        return RetryDecision(error_type=error.kind)
    return RetryDecision(after_s=backoff_s(row.faults), is_failure=True)


def decide_death(error: EngineDied, row: RowHistory, max_deaths: int) -> RetryDecision:
    """Judge a row that was in flight when the engine died."""
    if row.alone and row.deaths + 1 >= max_deaths:
        return RetryDecision(error_type=error.kind)
    return RetryDecision(is_failure=row.alone, suspect=True)


def decide_loss(error: ServerLost, row: RowHistory, max_deaths: int) -> RetryDecision:
    """Judge a row that a server had when it went down, and that brought no tokens from it."""
    if row.suspect and row.deaths + 1 >= max_deaths:
        return RetryDecision(error_type=error.kind)
    return RetryDecision(after_s=FIRST_BACKOFF_S, is_failure=row.suspect, suspect=row.suspect, lost=True)


def backoff_s(failures: int) -> float:
    """Wait before the next attempt: 1, 2, 4, ... s with each failure, at most 60 s."""
    return min(FIRST_BACKOFF_S * 2.0 ** min(failures, 10), LONGEST_BACKOFF_S)
