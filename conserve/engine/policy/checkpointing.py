"""Checkpoint policies: which KV blocks are copied to host memory before the next iteration.

The interface is that of conserve-2024 (section 4.4): after an iteration the policy is told the rows with blocks to
copy (marked), and before the next one it says how many blocks of each row to copy. Only blocks that are full,
computed and not copied yet are counted.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple, Protocol

FREE = 0.5  # share of the device's blocks that are free, below which `Adaptive` begins (conserve-2024 section 4.4)
LITTLE = 0.125  # share of free blocks below which online rows are copied too: vLLM may soon evict one of them
FEW = 4  # fewest blocks that `Adaptive` copies at once
SMOOTHING = 0.2  # weight of the newest value in the average of consumed blocks


class Marked(NamedTuple):
    """A row whose KV blocks may be evicted."""

    name: str
    blocks: int  # full, computed, and not copied yet
    online: bool = False


class Pressure(NamedTuple):
    """State of device memory and host memory, in blocks."""

    total: int  # of the device
    free: int  # of the device
    host_room: int  # blocks that host memory can still take
    budget: int  # blocks that may be copied beside the next iteration
    reserved: int = 0  # free blocks kept for online requests to come

    @property
    def share_free(self) -> float:
        """Share of the device's blocks that are free, from 0 to 1."""
        return self.free / self.total if self.total else 1.0

    @property
    def share_left(self) -> float:
        """Share of the device's blocks that offline rows may take (free and not reserved), from 0 to 1."""
        return max(0, self.free - self.reserved) / self.total if self.total else 1.0


class CheckpointPolicy(Protocol):
    """Decides which KV blocks are copied to host memory (conserve-2024 section 4.4).

    A user's own class is named by its path: `--kv-checkpoint package.module.Class` (`own_checkpoints`).
    """

    def wants_marks(self, pressure: Pressure) -> bool:
        """True if the policy has anything to decide. Called in every iteration, before rows are collected."""

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Take the rows that have blocks to copy, in eviction order. Called after an iteration."""

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """Number of blocks to copy of each row, in copying order. Called before the next iteration."""


class Eager:
    """Copies all blocks of offline rows, and of online rows while device memory is short."""

    def __init__(self) -> None:
        self._rows: Sequence[Marked] = ()

    def wants_marks(self, pressure: Pressure) -> bool:
        """True whenever blocks may be copied at all."""
        return pressure.budget > 0

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Remember the marked rows."""
        self._rows = rows

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """Choose blocks as far as the copy budget and host memory allow."""
        rows = [row for row in self._rows if not row.online]
        if pressure.share_free < LITTLE:
            rows += [row for row in self._rows if row.online]
        return first_blocks(rows, min(pressure.budget, pressure.host_room))


class Adaptive:
    """Copies nothing while memory is plentiful, then as fast as memory is consumed (conserve-2024 section 4.4).

    Rows are copied in eviction order, so that the next row to be evicted was copied first. The less memory is
    free, the more rows are copied.
    """

    def __init__(self) -> None:
        self._rows: Sequence[Marked] = ()
        self._free: int | None = None  # free blocks before the last iteration
        self._consumed = 0.0  # blocks consumed per iteration, averaged

    def wants_marks(self, pressure: Pressure) -> bool:
        """True once less than `FREE` of the device is left for offline rows."""
        short = pressure.share_left < FREE
        if not short:
            self._free, self._consumed = None, 0.0
        return short and pressure.budget > 0

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Remember the marked rows."""
        self._rows = rows

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """Blocks of the first rows in eviction order; more rows the less memory is free."""
        if self._free is not None:
            consumed = max(0, self._free - pressure.free)
            self._consumed += SMOOTHING * (consumed - self._consumed)
        self._free = pressure.free
        urgency = max(0.0, 1.0 - pressure.share_left / FREE)  # 0 at the threshold, 1 with nothing left
        offline = [row for row in self._rows if not row.online]
        rows = offline[: ceil(urgency * len(offline))]
        if pressure.share_free < LITTLE:
            rows += [row for row in self._rows if row.online]
        # The rest has to be copied by the time the free blocks are consumed.
        left = sum(row.blocks for row in rows)
        in_time = self._consumed * left / max(1, pressure.free)
        most = max(FEW, ceil(max(in_time, self._consumed)), ceil(urgency**2 * left))
        return first_blocks(rows, min(most, pressure.budget, pressure.host_room))


def first_blocks(rows: Sequence[Marked], most: int) -> Mapping[str, int]:
    """The first `most` blocks, row after row."""
    chosen: dict[str, int] = {}
    for row in rows:
        if most <= 0:
            break
        if row.blocks:
            chosen[row.name] = min(row.blocks, most)
            most -= chosen[row.name]
    return chosen


ADAPTIVE = "adaptive"
CHECKPOINTS: Mapping[str, type[CheckpointPolicy]] = {ADAPTIVE: Adaptive, "eager": Eager}
HOST_BYTES = 4 << 30  # bytes of host memory without `--kv-host-memory`
