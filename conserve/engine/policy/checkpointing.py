"""Which KV blocks are copied to host memory before the next iteration.

The interface is conserve-2024's (section 4.4): rows that computed are marked, and just before the next batch
the policy says which of their blocks go. A block is a full one, computed and not copied yet.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple, Protocol

FREE = 0.5  # share of the device's blocks below which `Adaptive` begins (conserve-2024)
LITTLE = 0.125  # below which online rows are copied too: vLLM may soon preempt one of them
FEW = 4  # blocks that `Adaptive` copies at least
SMOOTHING = 0.2  # of how fast memory is consumed


class Marked(NamedTuple):
    """A row whose KV may be lost."""

    name: str
    blocks: int  # full, computed, and not copied yet
    online: bool = False


class Pressure(NamedTuple):
    """How the memories stand, in blocks."""

    total: int  # of the device
    free: int  # of the device
    host_room: int  # blocks that host memory takes
    budget: int  # blocks that may be copied beside the next iteration
    reserved: int = 0  # of the free ones, kept for live requests to come

    @property
    def share_free(self) -> float:
        """Of the device."""
        return self.free / self.total if self.total else 1.0

    @property
    def share_left(self) -> float:
        """Of the device, for offline rows: free, and not reserved."""
        return max(0, self.free - self.reserved) / self.total if self.total else 1.0


class CheckpointPolicy(Protocol):
    """Decides what is copied. A class of your own is named by its path: `--kv-checkpoint package.module.Class`."""

    def wants_marks(self, pressure: Pressure) -> bool:
        """Whether there is anything to decide; asked before the rows are looked at, since it is every iteration."""

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """After an iteration: these rows, those that would be preempted first in front, have blocks to copy."""

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """Before the next: how many blocks of which rows, in the order in which they are copied."""


class Eager:
    """All blocks of offline rows; those of online rows where memory is short."""

    def __init__(self) -> None:
        self._rows: Sequence[Marked] = ()

    def wants_marks(self, pressure: Pressure) -> bool:
        """Always."""
        return pressure.budget > 0

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Take note of them."""
        self._rows = rows

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """As many as may be copied."""
        rows = [row for row in self._rows if not row.online]
        if pressure.share_free < LITTLE:
            rows += [row for row in self._rows if row.online]
        return first_blocks(rows, min(pressure.budget, pressure.host_room))


class Adaptive:
    """None while memory is plentiful; then as fast as it is consumed, for ever more rows (conserve-2024).

    Rows are taken in the order in which they would be preempted, so that what is preempted next is what was
    copied first.
    """

    def __init__(self) -> None:
        self._rows: Sequence[Marked] = ()
        self._free: int | None = None  # before the last iteration
        self._consumed = 0.0  # blocks an iteration, of late

    def wants_marks(self, pressure: Pressure) -> bool:
        """Once less than half of the device is free, or would be with the live requests to come."""
        short = pressure.share_left < FREE
        if not short:
            self._free, self._consumed = None, 0.0
        return short and pressure.budget > 0

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        """Take note of them."""
        self._rows = rows

    def blocks_to_checkpoint(self, pressure: Pressure) -> Mapping[str, int]:
        """Blocks of the first rows: more of them the less is free."""
        if self._free is not None:
            consumed = max(0, self._free - pressure.free)
            self._consumed += SMOOTHING * (consumed - self._consumed)
        self._free = pressure.free
        urgency = max(0.0, 1.0 - pressure.share_left / FREE)  # 0 where it begins, 1 where nothing is left
        offline = [row for row in self._rows if not row.online]
        rows = offline[: ceil(urgency * len(offline))]
        if pressure.share_free < LITTLE:
            rows += [row for row in self._rows if row.online]
        # What is left to copy is to be copied by the time what is free is consumed.
        left = sum(row.blocks for row in rows)
        in_time = self._consumed * left / max(1, pressure.free)
        most = max(FEW, ceil(max(in_time, self._consumed)), ceil(urgency**2 * left))
        return first_blocks(rows, min(most, pressure.budget, pressure.host_room))


def first_blocks(rows: Sequence[Marked], most: int) -> Mapping[str, int]:
    """At most so many blocks, row after row."""
    chosen: dict[str, int] = {}
    for row in rows:
        if most <= 0:
            break
        if row.blocks:
            chosen[row.name] = min(row.blocks, most)
            most -= chosen[row.name]
    return chosen


CHECKPOINTS: Mapping[str, type[CheckpointPolicy]] = {"adaptive": Adaptive, "eager": Eager}
ADAPTIVE, OFF = "adaptive", "off"
HOST_BYTES = 4 << 30  # of host memory, where nothing else is asked for


def policy_named(name: str) -> CheckpointPolicy:
    """A policy by its name, or one of the user's by its class path; raises ValueError with what is wrong."""
    from importlib import import_module

    if name in CHECKPOINTS:
        return CHECKPOINTS[name]()
    module, dot, cls = name.rpartition(".")
    known = ", ".join((*CHECKPOINTS, OFF))
    if not dot:
        raise ValueError(
            f"there is no checkpoint policy {name!r}; there are {known}, or give package.module.Class"
        )
    try:
        policy = getattr(import_module(module), cls)()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"the checkpoint policy {name} cannot be made ({why})") from error
    methods = ("wants_marks", "checkpoint", "blocks_to_checkpoint")
    missing = [method for method in methods if not callable(getattr(policy, method, None))]
    if missing:
        raise ValueError(f"the checkpoint policy {name} has no {' and no '.join(missing)}")
    return policy  # type: ignore[no-any-return]
