"""Measured values in order, and their quantiles."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple, Self


class Moment(NamedTuple):
    """A value measured at a time."""

    at: float  # monotonic seconds
    value: float
    times: int = 1  # number of equal measurements
    promised: bool = True  # by the promises of its class


class Ranked:
    """Measured values in order, each once with how often: a minute has a million gaps of a few thousand lengths."""

    def __init__(self, moments: Iterable[Moment]) -> None:
        pairs = sorted([(moment.value, moment.times) for moment in moments])
        self._values = [value for value, _ in pairs]
        self._ranks = list(accumulate(times for _, times in pairs))  # of the values behind each of these
        self._sum = sum(value * times for value, times in pairs)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Values that were measured once."""
        return cls(Moment(0.0, value) for value in values)

    def __len__(self) -> int:
        return self._ranks[-1] if self._ranks else 0

    def at(self, q: float) -> float | None:
        """Smallest value that at least a share `q` of the values does not exceed; None without values."""
        if not self._values:
            return None
        place = max(0, min(len(self) - 1, -int(-q * len(self) // 1) - 1))
        return self._values[bisect_right(self._ranks, place)]

    @property
    def mean(self) -> float | None:
        """Mean of the values; None without values."""
        return self._sum / len(self) if self._values else None

    def within(self, limit: float) -> float:
        """Share of values within the limit; 1 without values."""
        place = bisect_right(self._values, limit)
        return (self._ranks[place - 1] if place else 0) / len(self) if self._values else 1.0


def quantiles(ranked: Ranked) -> dict[str, float | None]:
    """P50 and P99 of the values."""
    return {name: ranked.at(q) for name, q in (("p50", 0.5), ("p99", 0.99))}
