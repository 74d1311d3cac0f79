"""How many KV blocks may be copied beside an iteration: copies use the memory that it computes with."""

from math import inf
from typing import NamedTuple, Self

SMOOTHING = 0.2  # of what is learned
USUAL_MS = 50.0  # an iteration whose length nobody knows


class BlockMs(NamedTuple):
    """What copying one block takes, in ms, each way; None where nothing was copied."""

    to_host: float | None = None
    to_device: float | None = None

    def slower(self, other: Self) -> "BlockMs":
        """Of two workers' times, the longer."""
        pairs = zip(self, other, strict=True)
        return BlockMs(*(max((ms for ms in pair if ms is not None), default=None) for pair in pairs))


class CopyBudget:
    """A share of each iteration's time, in blocks; the two ways differ, since host memory may be touched first."""

    def __init__(self, usual: BlockMs, share: float) -> None:
        assert usual.to_host
        assert usual.to_device
        self.to_host_ms, self.to_device_ms = usual.to_host, usual.to_device
        self._share = share

    def learn(self, measured: BlockMs) -> None:
        """What copies took of late."""
        if measured.to_host:
            self.to_host_ms += SMOOTHING * (measured.to_host - self.to_host_ms)
        if measured.to_device:
            self.to_device_ms += SMOOTHING * (measured.to_device - self.to_device_ms)

    def beside(self, iteration_ms: float | None) -> float:
        """Milliseconds that copies may take beside it."""
        return self._share * (USUAL_MS if iteration_ms is None else iteration_ms)

    def restores(self, left_ms: float, wanted: int) -> int:
        """Of the blocks wanted on the device, how many may go; always one, or none would ever come back."""
        return within(left_ms, self.to_device_ms, wanted) or min(wanted, 1)

    def saves(self, left_ms: float, most: int) -> int:
        """How many blocks may go to the host."""
        return within(left_ms, self.to_host_ms, most)


def within(left_ms: float, each_ms: float, most: int) -> int:
    """How often one fits into the other, up to `most`."""
    return most if left_ms == inf else min(most, int(max(0.0, left_ms) / each_ms))
