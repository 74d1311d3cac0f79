"""Bins of latencies, 2 % wide on a logarithmic scale."""

from math import ceil, log

STEP = log(1.02)  # width of a bin, as a difference of logarithms


def bin_of(ms: float) -> int:
    """Bin of a latency; `exp(STEP * bin)` is its upper edge in ms."""
    return ceil(log(max(ms, 1e-3)) / STEP)
