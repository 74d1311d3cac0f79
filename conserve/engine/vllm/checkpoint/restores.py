"""Rows on their way back to the device, a part of their KV beside each iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Copy(NamedTuple):
    """One block on its way."""

    device: int
    host: int


@dataclass(slots=True)
class Restore:
    """One row on its way; vLLM waits for it and for nobody else."""

    left: deque[Copy]
    keys: frozenset[Hashable]  # what names its blocks
    last_event: int = -1  # the transfer with the last block that was sent for


class Restores:
    """Those under way, in the order in which they began."""

    def __init__(self) -> None:
        self._rows: dict[str, Restore] = {}
        self._awaited: dict[int, list[str]] = {}  # transfer -> rows that are whole with it

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Restore:
        return self._rows[name]

    @property
    def keys(self) -> frozenset[Hashable]:
        """What names the blocks that are on their way."""
        return frozenset().union(*(restore.keys for restore in self._rows.values()))

    @property
    def left(self) -> int:
        """Blocks that were not sent for yet."""
        return sum(len(restore.left) for restore in self._rows.values())

    @property
    def awaited(self) -> Mapping[int, list[str]]:
        """For every transfer under way, the rows that are whole once it has ended."""
        return self._awaited

    def begin(self, name: str, copies: Iterable[Copy], keys: frozenset[Hashable]) -> None:
        """The row has blocks on the device for its KV to come back into."""
        self._rows[name] = Restore(deque(copies), keys)

    def cancel(self, name: str) -> None:
        """Bring one more block at most: vLLM keeps the row's until the workers say that the last has come."""
        restore = self._rows.get(name)
        while restore is not None and len(restore.left) > 1:
            restore.left.pop()

    def next(self, most: int, event: int) -> tuple[list[Copy], list[str]]:
        """Blocks that this transfer brings, those of the row first whose restore began first; and the rows."""
        copies: list[Copy] = []
        rows: list[str] = []
        for name, restore in self._rows.items():
            if not restore.left:
                continue
            if len(copies) >= most:
                break
            rows.append(name)
            while restore.left and len(copies) < most:
                copies.append(restore.left.popleft())
            restore.last_event = event
            if not restore.left:
                self._awaited.setdefault(event, []).append(name)
        return copies, rows

    def end(self, name: str) -> None:
        """All of the row's blocks have come, or as many as were wanted."""
        restore = self._rows.pop(name, None)
        if restore is None:
            return
        names = self._awaited.get(restore.last_event, [])
        if name in names:
            names.remove(name)
            if not names:
                del self._awaited[restore.last_event]
