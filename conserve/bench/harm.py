"""The harm receipt: online latency with offline work over without, and the certainty of the ratio.

Confidence intervals are bootstrapped. Requests within a block share its queue and its disturbances, so whole
blocks are resampled where there are enough of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from conserve.bench.answers import Floats, LoadAnswer
from conserve.bench.slo_search import RunLatencies

FEWEST_BLOCKS = 4
DRAWS = 1000
RANKS_BELOW = 12  # the percentile that a resample's one is hardly ever below
CELLS = 2**22  # draws times values that are in memory at once
Resampled = Literal["blocks", "requests"]
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Interval(NamedTuple):
    """Middle 95 % of the bootstrap."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A percentile with and without offline work; `ratio` is with / without.

    With offline work it is infinite where so many requests failed.
    """

    with_ms: float
    without_ms: float
    difference_ms: float
    difference_ci_ms: Interval
    ratio: float | None
    ratio_ci: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """Changes of the online P50s and P99s by a policy's offline work; None without values to compare."""

    resampled: Resampled
    draws: int
    ttft_p99: Change | None
    tbt_p99: Change | None
    ttft_p50: Change | None = None
    tbt_p50: Change | None = None


class Clusters(NamedTuple):
    """Values in ascending order, each with its unit of resampling."""

    values: Floats
    unit: Integers
    units: int


def harm(
    with_offline: Sequence[Sequence[LoadAnswer]], without: Sequence[Sequence[LoadAnswer]], *, seed: int
) -> Harm:
    """Compare the blocks' answers with and without offline work."""
    enough = min(len(with_offline), len(without)) >= FEWEST_BLOCKS
    rng = np.random.default_rng(seed)
    if not enough:
        with_offline, without = ([[a] for block in side for a in block] for side in (with_offline, without))
    heard = [[RunLatencies.heard(unit) for unit in side] for side in (with_offline, without)]
    pools = [
        (clusters([of(unit) for unit in heard[0]]), clusters([of(unit) for unit in heard[1]]))
        for of in (attrgetter("ttft_ms"), attrgetter("tbt_ms"))
    ]
    ttft, tbt = (change(*pair, rng) for pair in pools)
    ttft_p50, tbt_p50 = (change(*pair, rng, 50) for pair in pools)
    return Harm(
        resampled="blocks" if enough else "requests",
        draws=DRAWS,
        ttft_p99=ttft,
        tbt_p99=tbt,
        ttft_p50=ttft_p50,
        tbt_p50=tbt_p50,
    )


def change(
    with_offline: Clusters, without: Clusters, rng: np.random.Generator, rank: int = 99
) -> Change | None:
    """Change of the percentile, with its interval; None if a side has no value, or no finite one without rows."""
    if not np.isfinite(with_offline.values).any() or not len(without.values):
        return None
    with_ms, without_ms = percentile(with_offline, rank), percentile(without, rank)
    if isinf(without_ms):
        return None
    drawn_with, drawn_without = (resampled(pool, rng, rank=rank) for pool in (with_offline, without))
    positive = bool(without_ms > 0 and np.nanmin(drawn_without) > 0)
    lost = np.isinf(drawn_with)  # draws in which the percentile with rows is a request that failed
    with np.errstate(invalid="ignore"):
        return Change(
            with_ms=with_ms,
            without_ms=without_ms,
            difference_ms=with_ms - without_ms,
            difference_ci_ms=interval(np.where(lost, inf, drawn_with - drawn_without)),
            ratio=with_ms / without_ms if positive else None,
            ratio_ci=interval(np.where(lost, inf, drawn_with / drawn_without)) if positive else None,
        )


def clusters(units: Sequence[Floats]) -> Clusters:
    """Pool the values of all units."""
    values = np.concatenate([np.zeros(0), *units])
    unit = np.repeat(np.arange(len(units)), [len(of) for of in units])
    order = np.argsort(values, kind="stable")
    return Clusters(values[order], unit[order], len(units))


def percentile(pool: Clusters, rank: int = 99) -> float:
    """Percentile of all values."""
    return float(np.percentile(pool.values, rank, method="inverted_cdf"))


def resampled(pool: Clusters, rng: np.random.Generator, draws: int = DRAWS, *, rank: int = 99) -> Floats:
    """Percentile of each of `draws` resamples of whole units with replacement; NaN for a draw without values."""
    chances = np.full(pool.units, 1 / pool.units)
    times = rng.multinomial(pool.units, chances, size=draws).astype(np.int32)  # (draws, units)
    found = _ranked_from(len(pool.values) * (rank - RANKS_BELOW) // 100, pool, times, rank)
    missed = np.isnan(found)  # a draw may repeat units that have no large value
    found[missed] = _ranked_from(0, pool, times[missed], rank)
    return found


def _ranked_from(first: int, pool: Clusters, times: Integers, rank: int) -> Floats:
    """Percentile of each draw; NaN if it lies before the pool's value number `first`."""
    sizes = np.bincount(pool.unit, minlength=pool.units)
    tail = pool.unit[first:]
    found = np.full(len(times), np.nan)
    step = max(1, CELLS // len(tail))
    for start in range(0, len(times), step):
        drawn = times[start : start + step]
        total = (drawn @ sizes)[:, None]  # (step, 1)
        seen = np.cumsum(drawn[:, tail], axis=1)  # (step, tail)
        before = total - seen[:, -1:]
        inside = (total > 0) & (100 * before < rank * total)
        place = first + np.argmax(100 * (before + seen) >= rank * total, axis=1)
        found[start : start + step] = np.where(inside[:, 0], pool.values[place], np.nan)
    return found


def interval(drawn: Floats) -> Interval:
    """Bounds of the middle 95 % of these values; between a finite and an infinite one is none."""
    between: Literal["linear", "inverted_cdf"] = "inverted_cdf" if np.isinf(drawn).any() else "linear"
    low, high = np.nanpercentile(drawn, [2.5, 97.5], method=between)
    return Interval(float(low), float(high))
