"""HyGen's SLO-aware profiler (hygen section 4.2): the largest parameter with which test runs keep the promises."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from math import inf, pow, sqrt
from typing import NamedTuple, Self

import numpy as np

from conserve.bench.answers import Floats, LoadAnswer, RequestEnd, tbts_ms, ttfts_ms
from conserve.errors import EndpointUnusable, SettingsError
from conserve.units import parse_share

SCANNED = 7  # values of the range, before the binary search
STEPS = 4  # of a binary search: to 5 % of the value where the range spans a factor of 100
MOST_RUNS = 16  # of a search
STEEPEST, USUAL = 1.0, 0.25  # power of the value with which latencies change, at most and mostly
LEAST, MOST = 0.05, 0.5  # tolerance (hygen section 5.2)
STATISTICS = ("mean", "p50", "p90", "p99")
METRICS = ("ttft", "tbt")


class Promise(NamedTuple):
    """One latency that may grow by at most `tolerance` beside rows."""

    statistic: str  # of `STATISTICS`
    metric: str  # ttft or tbt
    tolerance: float  # share of the latency without rows

    def __str__(self) -> str:
        return f"{self.statistic} {self.metric.upper()} +{self.tolerance:.0%}"


class RunLatencies(NamedTuple):
    """TTFTs and TBTs of a test run's live requests, in ms; one of each is infinite for a failed request."""

    ttft_ms: Floats
    tbt_ms: Floats

    @classmethod
    def heard(cls, answers: Sequence[LoadAnswer]) -> Self:
        """Latencies as clients heard them: a request without a complete answer waits for ever."""
        complete = [one for one in answers if one.status is RequestEnd.OK]
        never = np.full(len(answers) - len(complete), inf)
        return cls(np.concatenate([ttfts_ms(complete), never]), np.concatenate([tbts_ms(answers), never]))

    def as_reference(self) -> Self:
        """Latencies to compare with, if all requests were answered; raises `EndpointUnusable`."""
        failed = int(np.isinf(self.ttft_ms).sum())
        if failed:
            raise EndpointUnusable(
                f"{failed} of {len(self.ttft_ms)} live requests failed with no row beside them, so the harm "
                "of rows cannot be told; see the server's log, and give a lower rate if requests took too long"
            )
        return self

    def of(self, promise: Promise) -> float:
        """The promised statistic; 0 without a value."""
        values = self.ttft_ms if promise.metric == "ttft" else self.tbt_ms
        if not len(values):
            return 0.0
        if promise.statistic == "mean":
            return float(values.mean())
        return float(np.percentile(values, int(promise.statistic[1:]), method="inverted_cdf"))


class Found(NamedTuple):
    """Result of a search."""

    value: float
    kept: bool  # False: no value of the range keeps the promises, and this one exceeds them least
    runs: int


TestRun = Callable[[float], Awaitable[RunLatencies]]
"""Plays the live requests with this value of the parameter."""

DEFAULT = (Promise("p99", "ttft", LEAST), Promise("p99", "tbt", LEAST))


def promises(text: str) -> Sequence[Promise]:
    """Parse `p99-ttft=5%,mean-tbt=10%`; raises `SettingsError`."""
    return [_promise(part.strip()) for part in text.split(",")]


def harmed(ttft: str | None, tbt: str | None) -> Sequence[Promise]:
    """Parse `p99=5%,mean=10%` of each latency; `DEFAULT` without any. Raises `SettingsError`."""
    found = [
        _harmed(metric, part.strip())
        for metric, text in zip(METRICS, (ttft, tbt), strict=True)
        for part in (text or "").split(",")
        if text is not None
    ]
    return found or DEFAULT


def _harmed(metric: str, text: str) -> Promise:
    statistic, _, share = text.partition("=")
    if statistic not in STATISTICS or not LEAST <= (tolerance := parse_share(share) or 0.0) <= MOST:
        raise _unreadable(f"--harm-{metric}", ", ".join(STATISTICS), "p99=5%,mean=10%", text)
    return Promise(statistic, metric, tolerance)


def _promise(text: str) -> Promise:
    latency, _, share = text.partition("=")
    statistic, _, metric = latency.partition("-")
    named = statistic in ("mean", "p99") and metric in METRICS
    if not named or not LEAST <= (tolerance := parse_share(share) or 0.0) <= MOST:
        raise _unreadable("--tolerance", "mean or p99 of ttft or tbt", "p99-ttft=5%,mean-tbt=10%", text)
    return Promise(statistic, metric, tolerance)


def _unreadable(flag: str, names: str, example: str, text: str) -> SettingsError:
    return SettingsError(
        f"{flag} takes {names} and {LEAST:.0%} to {MOST:.0%}, such as {example}, not {text!r}"
    )


def excess(found: RunLatencies, alone: RunLatencies, promised: Iterable[Promise]) -> float:
    """Largest ratio of a promised latency to its limit; all promises are kept up to 1."""
    limits = [(found.of(one), (1 + one.tolerance) * alone.of(one)) for one in promised]
    return max((value / limit if limit else inf for value, limit in limits if value), default=0.0)


class ExcessAt(NamedTuple):
    """A value of the parameter, and the excess that its test run gave."""

    value: float
    excess: float


async def search(
    low: float, high: float, run: TestRun, alone: RunLatencies, promised: Sequence[Promise]
) -> Found:
    """Largest value from `low` to `high` that keeps the promises; without one, the value that exceeds them least.

    The range is scanned from its upper end until a value keeps them, since too small a budget does harm as too
    large a one does: it cuts live prompts into slivers. Binary searches over ratios refine the value, and look
    between values that exceed the promises for one that keeps them. There are at most `MOST_RUNS` test runs.
    """
    tried: list[ExcessAt] = []

    async def keeps(value: float) -> bool:
        tried.append(ExcessAt(value, excess(await run(value), alone, promised)))
        return tried[-1].excess <= 1

    for value in np.geomspace(high, low, SCANNED).tolist():
        if await keeps(value):
            break
    before_last = (SCANNED - 1) << (STEPS - 1)  # parts of the range, before the last halving
    finest = (high / low) ** (0.75 / before_last)
    while len(tried) < MOST_RUNS and (middle := _between(tried, finest)) is not None:
        await keeps(middle)
    kept = [one.value for one in tried if one.excess <= 1]
    if kept:
        return Found(max(kept), True, len(tried))
    return Found(min(tried, key=lambda one: one[::-1]).value, False, len(tried))


def _between(tried: Sequence[ExcessAt], finest: float) -> float | None:
    """Middle of the two neighbours between which a value above the largest that keeps is likeliest to keep.

    None where all such neighbours are closer than the ratio `finest`, or none can have such a value between them.
    """
    found = sorted(tried)
    largest = max((one.value for one in found if one.excess <= 1), default=0.0)
    likely = [
        (below, above)
        for below, above in pairwise(found)
        if above.value > max(largest, finest * below.value) and _least(below, above, STEEPEST) <= 1
    ]
    if not likely:
        return None
    below, above = min(likely, key=lambda both: _least(both[0], both[1], USUAL))
    return sqrt(below.value * above.value)


def _least(below: ExcessAt, above: ExcessAt, steepness: float) -> float:
    """Square of the least excess between two values, if latencies change as this power of the value.

    It is 0 above a value that keeps the promises: the largest one that does lies between the two.
    """
    if below.excess <= 1:
        return 0.0
    return below.excess * above.excess * pow(below.value / above.value, steepness)
