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
class RetryDecision:
    """Either the row fails (`error_type` is set), or it waits `after_s` and is tried again."""

    error_type: str | None = None
    after_s: float = 0.0
    counts: bool = False  # as a failure of the row
    suspect: bool = False  # the row runs alone next time
    lost: bool = False  # a server went down with the row
    hold_s: float = 0.0  # time in which no row should be sent to the endpoint


def decide(
    error: EndpointError,
    *,
    faults: int,
    max_attempts: int,
    alone: bool,
    gained: bool = False,
    attempts: int = 1,
    deaths: int = 0,
    max_deaths: int = SUSPECT_FAILURES,
    suspect: bool = False,
    refusals: int = 0,
) -> RetryDecision:
    """Judge an error by what it says about the row.

    A rejection is final. An endpoint that is busy or cannot be reached says nothing about the row, which waits as
    long as it takes, as a `suspect` if it is one. All others wait with it, unless the endpoint has answered others
    between `REFUSED_ALONE` of its `refusals`. A faulty answer counts, and `max_attempts` of them fail the row;
    `faults` is their number so far. A faulty answer that brought tokens for the next attempt to go on from
    (`gained`) does not count, since the row gets done by pieces; each of its `attempts` is waited for longer than
    the one before. Rows in flight when an engine died are suspects: each runs alone, and one that was alone when
    `max_deaths` engines died fails; `deaths` is their number so far. A server that goes down is a loss of each row
    that it had and that got no further, from which the store finds suspects; a suspect had it alone.
    """
    if isinstance(error, RequestRejected):
        return RetryDecision(error_type=error.kind)
    if isinstance(error, EngineDied):
        return decide_suspect(error, deaths=deaths, alone=alone, max_deaths=max_deaths)
    if isinstance(error, EndpointBusy):
        hold_s = min(error.retry_after_s or FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        if refusals >= REFUSED_ALONE:
            alone_s = max(hold_s, backoff_s(refusals - REFUSED_ALONE))
            return RetryDecision(after_s=alone_s, suspect=suspect)
        return RetryDecision(hold_s=hold_s, suspect=suspect)
    if isinstance(error, EndpointUnavailable):
        return RetryDecision(hold_s=FIRST_BACKOFF_S, suspect=suspect)
    if isinstance(error, ServerLost):
        if gained:
            return RetryDecision(after_s=FIRST_BACKOFF_S, suspect=suspect)
        return decide_lost(error, deaths=deaths, suspect=suspect, max_deaths=max_deaths)
    assert isinstance(error, RetryableError), error
    if gained:
        return RetryDecision(after_s=backoff_s(attempts - 1))
    if faults + 1 >= max_attempts:
        return RetryDecision(error_type=error.kind)
    return RetryDecision(after_s=backoff_s(faults), counts=True)


def decide_suspect(error: EngineDied, *, deaths: int, alone: bool, max_deaths: int) -> RetryDecision:
    """Judge a row that was in flight when the engine died."""
    if alone and deaths + 1 >= max_deaths:
        return RetryDecision(error_type=error.kind)
    return RetryDecision(counts=alone, suspect=True)


def decide_lost(error: ServerLost, *, deaths: int, suspect: bool, max_deaths: int) -> RetryDecision:
    """Judge a row that a server had when it went down, and that brought no tokens from it."""
    if suspect and deaths + 1 >= max_deaths:
        return RetryDecision(error_type=error.kind)
    return RetryDecision(after_s=FIRST_BACKOFF_S, counts=suspect, suspect=suspect, lost=True)


def backoff_s(failures: int) -> float:
    """Wait before the next attempt: 1, 2, 4, ... s with each failure, at most 60 s."""
    return min(FIRST_BACKOFF_S * 2.0 ** min(failures, 10), LONGEST_BACKOFF_S)
