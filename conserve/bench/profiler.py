"""HyGen's SLO-aware profiler (hygen section 4.2): the largest parameter with which test runs keep the promises."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from conserve.bench.answers import Floats
from conserve.errors import SettingsError

STEPS = 8  # of the binary search: the budget to 2 % of a range of a factor of 100
LEAST, MOST = 0.05, 0.5  # tolerance (hygen section 5.2)
STATISTICS = ("mean", "p99")


class Promise(NamedTuple):
    """One latency that may grow by at most `tolerance` beside rows."""

    statistic: str  # of `STATISTICS`
    metric: str  # ttft or tbt
    tolerance: float  # share of the latency without rows

    def __str__(self) -> str:
        return f"{self.statistic} {self.metric.upper()} +{self.tolerance:.0%}"


class Latencies(NamedTuple):
    """TTFTs and TBTs of a test run's live requests, in ms."""

    ttft_ms: Floats
    tbt_ms: Floats

    def of(self, promise: Promise) -> float:
        """The promised statistic; 0 without a value."""
        values = self.ttft_ms if promise.metric == "ttft" else self.tbt_ms
        if not len(values):
            return 0.0
        if promise.statistic == "mean":
            return float(values.mean())
        return float(np.percentile(values, 99, method="inverted_cdf"))


class Found(NamedTuple):
    """Result of a search."""

    value: float
    kept: bool  # False: no value of the range keeps the promises, and this is the smallest
    runs: int


TestRun = Callable[[float], Awaitable[Latencies]]
"""Plays the live requests with this value of the parameter."""

DEFAULT = (Promise("p99", "ttft", LEAST), Promise("p99", "tbt", LEAST))


def promises(text: str) -> Sequence[Promise]:
    """Parse `p99-ttft=5%,mean-tbt=10%`; raises `SettingsError`."""
    return [_promise(part.strip()) for part in text.split(",")]


def _promise(text: str) -> Promise:
    found = re.fullmatch(r"(mean|p99)-(ttft|tbt)=(\d+(?:\.\d+)?)%", text)
    tolerance = float(found[3]) / 100 if found else 0.0
    if found is None or not LEAST <= tolerance <= MOST:
        raise SettingsError(
            f"--tolerance takes mean or p99 of ttft or tbt and {LEAST:.0%} to {MOST:.0%}, such as "
            f"p99-ttft=5%,mean-tbt=10%, not {text!r}"
        )
    return Promise(found[1], found[2], tolerance)


def keeps(found: Latencies, alone: Latencies, promised: Iterable[Promise]) -> bool:
    """True if no promised latency exceeds the one without rows by more than its tolerance."""
    return all(found.of(one) <= (1 + one.tolerance) * alone.of(one) for one in promised)


async def search(
    low: float,
    high: float,
    run: TestRun,
    alone: Latencies,
    promised: Sequence[Promise],
    *,
    steps: int = STEPS,
) -> Found:
    """Largest value from `low` to `high` that keeps the promises, by a binary search over test runs.

    The search halves the ratio of the two ends. It takes for granted that a larger value never does less harm.
    """
    if keeps(await run(high), alone, promised):
        return Found(high, True, 1)
    kept = False
    for _ in range(steps):
        middle = (low * high) ** 0.5
        if keeps(await run(middle), alone, promised):
            low, kept = middle, True
        else:
            high = middle
    if not kept:
        kept = keeps(await run(low), alone, promised)
    return Found(low, kept, steps + 1 + (not kept))
