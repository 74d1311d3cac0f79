"""Rows that have left an iteration: what they keep, what was lost, and when they have left often enough."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

SHRINK_AFTER = (
    4  # times in a row without getting any further, after each of which the next chunk is half as long
)
SHELTER_AFTER = 8  # such times, after which a row stays whoever arrives


class Lost(NamedTuple):
    """Work that was thrown away."""

    tokens: int  # to be computed again
    share: float  # of their layers that had been

    @property
    def worth(self) -> float:
        """The same in whole tokens."""
        return self.tokens * self.share


NOTHING = Lost(0, 0.0)


@dataclass(slots=True)
class Leaver:
    """A row from the time it leaves until it has computed what it left."""

    layer: int = 0  # at which it goes on; 0 where it begins anew
    kept: int = 0  # tokens that it goes on with
    chunk: int = 0  # tokens that it is to be given next, at most
    times: int = 0  # that it left without having got any further


class Leavers:
    """All rows that have left an iteration and not yet made up for it."""

    def __init__(self) -> None:
        self._rows: dict[str, Leaver] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def left(self, row: str, chunk: int, *, layer: int, layers_run: int, layers: int) -> Lost:
        """It left a chunk of so many tokens, and goes on at `layer`, or begins anew if that is 0."""
        leaver = self._rows.setdefault(row, Leaver())
        leaver.times = 1 if layer > leaver.layer else leaver.times + 1
        lost = Lost(chunk, layers_run / layers) if layers_run and not layer else NOTHING
        if layer != leaver.layer:  # else it left before it had joined, and has what it had
            if leaver.layer and leaver.kept > chunk:
                lost = Lost(leaver.kept - chunk, leaver.layer / layers)
            leaver.layer, leaver.kept = layer, chunk if layer else 0
        leaver.chunk = max(1, chunk // 2) if leaver.times >= SHRINK_AFTER else leaver.kept or chunk
        return lost

    def computed(self, rows: Mapping[str, int]) -> None:
        """These computed so many tokens; who was given only the beginning of what it had goes on with the rest."""
        for row in self._rows.keys() & rows.keys():
            leaver = self._rows[row]
            leaver.kept = leaver.chunk = leaver.kept - rows[row]
            leaver.times = 0
            if leaver.kept <= 0:
                del self._rows[row]

    def forget(self, row: str) -> None:
        """It is gone."""
        self._rows.pop(row, None)

    def lost_memory(self, row: str, layers: int) -> Lost:
        """Its KV blocks are gone, and what it would have gone on from with them."""
        leaver = self._rows.get(row)
        if leaver is None or not leaver.layer:
            return NOTHING
        lost = Lost(leaver.kept, leaver.layer / layers)
        leaver.layer = leaver.kept = 0
        return lost

    def chunk(self, row: str) -> int | None:
        """The most tokens that it should be given next, if it has left."""
        leaver = self._rows.get(row)
        return leaver.chunk if leaver is not None else None

    def is_sheltered(self, row: str) -> bool:
        """Whether it has left often enough."""
        leaver = self._rows.get(row)
        return leaver is not None and leaver.times >= SHELTER_AFTER

    def any_sheltered(self) -> bool:
        """Whether some row has."""
        return any(leaver.times >= SHELTER_AFTER for leaver in self._rows.values())
