"""Rows being restored to the device, a part of their KV beside each iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Copy(NamedTuple):
    """One block to copy, by its numbers on both sides."""

    device: int
    host: int


@dataclass(slots=True)
class Restore:
    """One row being restored; vLLM holds this row back until it is restored."""

    left: deque[Copy]  # blocks not sent yet
    keys: frozenset[Hashable]  # keys of its blocks
    last_event: int = -1  # transfer with the last block sent


class Restores:
    """Restores under way, in the order in which they began."""

    def __init__(self) -> None:
        self._rows: dict[str, Restore] = {}
        self._awaited: dict[int, list[str]] = {}  # transfer -> rows that are complete with it

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Restore:
        return self._rows[name]

    @property
    def keys(self) -> frozenset[Hashable]:
        """Keys of the blocks being restored."""
        return frozenset().union(*(restore.keys for restore in self._rows.values()))

    @property
    def left(self) -> int:
        """Number of blocks not sent yet."""
        return sum(len(restore.left) for restore in self._rows.values())

    @property
    def awaited(self) -> Mapping[int, list[str]]:
        """Rows that are complete once a transfer under way has ended, by transfer."""
        return self._awaited

    def begin(self, name: str, copies: Iterable[Copy], keys: frozenset[Hashable]) -> None:
        """Begin to restore a row that has blocks on the device."""
        self._rows[name] = Restore(deque(copies), keys)

    def cancel(self, name: str) -> None:
        """Send one more block at most: vLLM keeps the row's blocks until the workers report the last one."""
        restore = self._rows.get(name)
        while restore is not None and len(restore.left) > 1:
            restore.left.pop()

    def next(self, most: int, event: int) -> tuple[list[Copy], list[str]]:
        """Blocks of the next transfer, from the row whose restore began first; and the rows in it."""
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
        """End a restore whose blocks have arrived, or were cancelled."""
        restore = self._rows.pop(name, None)
        if restore is None:
            return
        names = self._awaited.get(restore.last_event, [])
        if name in names:
            names.remove(name)
            if not names:
                del self._awaited[restore.last_event]
