"""Rows that have left an iteration: tokens they keep, work that was lost, and when they need not leave again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

SHRINK_AFTER = 4  # times that a row left without progress; from then on each next chunk is half as long
SHELTER_AFTER = 8  # such times, after which the row stays in every iteration


class Lost(NamedTuple):
    """Work that was thrown away."""

    tokens: int  # tokens to compute again
    share: float  # share of the layers that they had run through

    @property
    def worth(self) -> float:
        """Lost work as a number of whole tokens."""
        return self.tokens * self.share


NOTHING = Lost(0, 0.0)


@dataclass(slots=True)
class Leaver:
    """A row from the time it leaves until it has computed the tokens that it left with."""

    layer: int = 0  # where it joins again; 0: it begins anew
    kept: int = 0  # tokens that it joins with
    chunk: int = 0  # most tokens to give it next
    times: int = 0  # times that it left without progress in between


class Leavers:
    """All rows that have left an iteration and have not caught up yet."""

    def __init__(self) -> None:
        self._rows: dict[str, Leaver] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def left(self, row: str, chunk: int, *, layer: int, layers_run: int, layers: int) -> Lost:
        """Note that a row left with a chunk of so many tokens; it joins at `layer`, or begins anew if that is 0."""
        leaver = self._rows.setdefault(row, Leaver())
        leaver.times = 1 if layer > leaver.layer else leaver.times + 1
        lost = Lost(chunk, layers_run / layers) if layers_run and not layer else NOTHING
        if layer != leaver.layer:  # at the same layer: it left before it had joined, and keeps what it had
            if leaver.layer and leaver.kept > chunk:
                lost = Lost(leaver.kept - chunk, leaver.layer / layers)
            leaver.layer, leaver.kept = layer, chunk if layer else 0
        leaver.chunk = max(1, chunk // 2) if leaver.times >= SHRINK_AFTER else leaver.kept or chunk
        return lost

    def computed(self, rows: Mapping[str, int]) -> None:
        """Note the tokens that rows computed; a row that computed part of its chunk keeps the remaining tokens."""
        for row in self._rows.keys() & rows.keys():
            leaver = self._rows[row]
            leaver.kept = leaver.chunk = leaver.kept - rows[row]
            leaver.times = 0
            if leaver.kept <= 0:
                del self._rows[row]

    def forget(self, row: str) -> None:
        """Drop a row that has finished."""
        self._rows.pop(row, None)

    def evicted(self, row: str, layers: int) -> Lost:
        """Note that a row's KV blocks are gone, and with them the layers it had computed; returns the lost work."""
        leaver = self._rows.get(row)
        if leaver is None or not leaver.layer:
            return NOTHING
        lost = Lost(leaver.kept, leaver.layer / layers)
        leaver.layer = leaver.kept = 0
        return lost

    def chunk(self, row: str) -> int | None:
        """Most tokens to give the row next; None if it has not left."""
        leaver = self._rows.get(row)
        return leaver.chunk if leaver is not None else None

    def is_sheltered(self, row: str) -> bool:
        """True if the row has left `SHELTER_AFTER` times without progress."""
        leaver = self._rows.get(row)
        return leaver is not None and leaver.times >= SHELTER_AFTER

    def any_sheltered(self) -> bool:
        """True if any row is sheltered."""
        return any(leaver.times >= SHELTER_AFTER for leaver in self._rows.values())
