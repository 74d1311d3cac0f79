"""Rows that have left an iteration: tokens they keep, work that was lost, and when they need not leave again.

A row may leave again with fewer tokens than it left with before, further on. Then it keeps two parts: those tokens
at the later layer, and the others, which come behind them, at the earlier one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

SHRINK_AFTER = 4  # times that a row left without progress; from then on each next chunk is half as long
SHELTER_AFTER = 8  # such times, after which the row stays in every iteration


class RowPart(Protocol):
    """Successive tokens of a row that have run through the layers before `layer`."""

    @property
    def layer(self) -> int:
        """Layer at which the tokens join a pass."""

    @property
    def tokens(self) -> int:
        """Number of the tokens, at least 1."""

    def after(self, tokens: int) -> Self:
        """The part without its first tokens."""


P = TypeVar("P", bound=RowPart)


def behind(parts: Sequence[P], tokens: int) -> tuple[P, ...]:
    """Parts that remain without their first `tokens` tokens."""
    for place, part in enumerate(parts):
        if tokens < part.tokens:
            return (part.after(tokens) if tokens else part, *parts[place + 1 :])
        tokens -= part.tokens
    return ()


def with_first(first: P, parts: Sequence[P]) -> tuple[P, ...]:
    """Parts of a row that left with the tokens of `first`; it keeps what it had if it got no further."""
    if parts and parts[0].layer == first.layer:
        return tuple(parts)
    return (first, *behind(parts, first.tokens))


class KeptPart(NamedTuple):
    """A part, as the scheduler knows it."""

    layer: int
    tokens: int

    def after(self, tokens: int) -> "KeptPart":
        return KeptPart(self.layer, self.tokens - tokens)


class Lost(NamedTuple):
    """Work that was thrown away."""

    tokens: int  # tokens to compute again
    worth: float  # the same in whole tokens: each counts by the share of layers it had run through


NOTHING = Lost(0, 0.0)


@dataclass(slots=True)
class Leaver:
    """A row from the time it leaves until it has computed the tokens that it left with."""

    parts: tuple[KeptPart, ...] = ()  # none: it begins anew
    chunk: int = 0  # most tokens to give it next
    times: int = 0  # times that it left without progress in between

    @property
    def layer(self) -> int:
        """Layer where it joins again; 0 if it begins anew."""
        return self.parts[0].layer if self.parts else 0


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
        lost = NOTHING
        if layer < leaver.layer:
            lost = _lost(leaver.parts, layers)
        elif layers_run and not layer:
            lost = Lost(chunk, chunk * layers_run / layers)
        kept = leaver.parts if layer >= leaver.layer else ()
        leaver.parts = with_first(KeptPart(layer, chunk), kept) if layer else ()
        first = leaver.parts[0].tokens if leaver.parts else chunk
        leaver.chunk = max(1, chunk // 2) if leaver.times >= SHRINK_AFTER else first
        return lost

    def computed(self, rows: Mapping[str, int]) -> None:
        """Note the tokens that rows computed; a row that computed part of what it keeps has the rest still."""
        for row in self._rows.keys() & rows.keys():
            leaver = self._rows[row]
            leaver.parts = behind(leaver.parts, rows[row])
            leaver.times = 0
            if leaver.parts:
                leaver.chunk = leaver.parts[0].tokens
            else:
                del self._rows[row]

    def forget(self, row: str) -> None:
        """Drop a row that has finished."""
        self._rows.pop(row, None)

    def evicted(self, row: str, layers: int) -> Lost:
        """Note that a row's KV blocks are gone, and with them the layers it had computed; returns the lost work."""
        leaver = self._rows.get(row)
        if leaver is None:
            return NOTHING
        lost, leaver.parts = _lost(leaver.parts, layers), ()
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


def _lost(parts: Sequence[KeptPart], layers: int) -> Lost:
    return Lost(sum(part.tokens for part in parts), sum(part.tokens * part.layer for part in parts) / layers)
