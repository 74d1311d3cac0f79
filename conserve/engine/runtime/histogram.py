"""Cumulative histogram of latencies, whose buckets Prometheus reads. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

TTFT_MS = (5, 10, 25, 50, 100, 250, 500, 1000, 1500, 2000, 3000, 5000, 7500, 10_000, 20_000, 30_000, 60_000)
TBT_MS = (2.5, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2500, 5000)


class LatencyHistogram:
    """Counts of latencies since the start, by the first bound that they do not exceed."""

    def __init__(self, bounds_ms: Sequence[float]) -> None:
        self._bounds_ms = bounds_ms
        self._counts = [0] * (len(bounds_ms) + 1)
        self._sum_ms = 0.0

    def note(self, ms: float, times: int = 1) -> None:
        """Note a latency that was measured so many times."""
        self._counts[bisect_left(self._bounds_ms, ms)] += times
        self._sum_ms += ms * times

    def report(self) -> dict[str, Any]:
        """Bounds and the counts between them, for JSON; the last count is of latencies above all bounds."""
        return {"bounds_ms": list(self._bounds_ms), "counts": list(self._counts), "sum_ms": self._sum_ms}


def added(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sum of counts with the same names."""
    return {name: sum(one[name] for one in several) for name in several[0]}


def together(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum of reports with the same bounds."""
    return {
        "bounds_ms": several[0]["bounds_ms"],
        "counts": [sum(counts) for counts in zip(*(one["counts"] for one in several), strict=True)],
        "sum_ms": sum(one["sum_ms"] for one in several),
    }
