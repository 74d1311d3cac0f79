"""Distributions of t statistics of the mean over clusters: drawn by a paired bootstrap, or Student's. Pure.

Errors are clustered and draws studentised by them (Cameron, Gelbach and Miller, Review of Economics and Statistics
90, 2008).
"""

from collections.abc import Hashable, Iterable
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

Floats = NDArray[np.float64]

DRAWS = 2000  # resamples of a bootstrap
AT_ONCE = 4_000_000  # clusters that are drawn at once: 32 MB


def source_numbers(sources: Iterable[Hashable]) -> NDArray[np.int64]:
    """Number of each item's source, from 0 in their order; as texts in an array, long ones would all be as long."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(source, len(numbers)) for source in sources], np.int64)


def clustered_error(sums: Floats, sizes: Floats) -> Floats:
    """Standard error of the mean over clusters along the last axis, from their sums and sizes."""
    clusters, n = sums.shape[-1], sizes.sum(-1, keepdims=True)
    residuals = sums - sizes * sums.sum(-1, keepdims=True) / n
    factor = clusters / max(1, clusters - 1)
    error: Floats = np.sqrt(factor * (residuals**2).sum(-1)) / n[..., 0]
    return error


def sorted_t(sums: Floats, sizes: Floats, rng: np.random.Generator) -> Floats:
    """Sorted t statistics of means of resampled clusters, about the mean of all."""
    mean, clusters = sums.sum() / sizes.sum(), len(sums)
    found = []
    for begin in range(0, DRAWS, step := max(1, AT_ONCE // clusters)):
        drawn = rng.integers(clusters, size=(min(step, DRAWS - begin), clusters))
        some, weights = sums[drawn], sizes[drawn]
        off = some.sum(-1) / weights.sum(-1) - mean
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append(np.nan_to_num(off / clustered_error(some, weights), posinf=inf, neginf=-inf))
    return np.sort(np.concatenate(found))


class Drawn(NamedTuple):
    """Distribution of t statistics that were drawn, sorted."""

    draws: Floats
    test: str = "bootstrap"

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.draws, share, method="nearest"))

    def at_most(self, value: float) -> float:
        return float(1 + np.searchsorted(self.draws, value, side="right")) / (1 + len(self.draws))

    def below(self, value: float) -> float:
        return float(np.searchsorted(self.draws, value, side="left")) / (1 + len(self.draws))


class Student(NamedTuple):
    """Student's distribution."""

    freedom: int
    test: str = "t"

    def quantile(self, share: float) -> float:
        return float(t.ppf(share, self.freedom))

    def at_most(self, value: float) -> float:
        return float(t.cdf(value, self.freedom))

    def below(self, value: float) -> float:
        return self.at_most(value)
