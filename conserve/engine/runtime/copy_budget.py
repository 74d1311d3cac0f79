"""Number of KV blocks that may be copied beside an iteration: copies slow it down, since both use memory."""

from math import inf
from typing import NamedTuple, Self

SMOOTHING = 0.2  # weight of the newest measurement
USUAL_MS = 50.0  # assumed length of an iteration without a prediction


class BlockMs(NamedTuple):
    """Time of copying one block in each direction, in ms; None if nothing was copied."""

    to_host: float | None = None
    to_device: float | None = None

    def slower(self, other: Self) -> "BlockMs":
        """The longer of two workers' times, for each direction."""
        pairs = zip(self, other, strict=True)
        return BlockMs(*(max((ms for ms in pair if ms is not None), default=None) for pair in pairs))


class CopyBudget:
    """Number of blocks whose copies take a set share of an iteration's time.

    The two directions have their own times, since copying to the host may touch its memory for the first time.
    """

    def __init__(self, usual: BlockMs, share: float) -> None:
        assert usual.to_host
        assert usual.to_device
        self.to_host_ms, self.to_device_ms = usual.to_host, usual.to_device
        self._share = share

    def learn(self, measured: BlockMs) -> None:
        """Average the times of recent copies into the budget."""
        if measured.to_host:
            self.to_host_ms += SMOOTHING * (measured.to_host - self.to_host_ms)
        if measured.to_device:
            self.to_device_ms += SMOOTHING * (measured.to_device - self.to_device_ms)

    def beside(self, iteration_ms: float | None) -> float:
        """Milliseconds that copies may take beside an iteration of this length."""
        return self._share * (USUAL_MS if iteration_ms is None else iteration_ms)

    def restores(self, left_ms: float, wanted: int) -> int:
        """Number of wanted blocks to copy to the device; at least 1, or none would ever come back."""
        return within(left_ms, self.to_device_ms, wanted) or min(wanted, 1)

    def saves(self, left_ms: float, most: int) -> int:
        """Number of blocks to copy to the host, at most `most`."""
        return within(left_ms, self.to_host_ms, most)


def within(left_ms: float, each_ms: float, most: int) -> int:
    """Number of times that `each_ms` fits into `left_ms`, at most `most`."""
    return most if left_ms == inf else min(most, int(max(0.0, left_ms) / each_ms))
