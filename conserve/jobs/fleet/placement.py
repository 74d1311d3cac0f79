"""Placement: the server that each piece goes to, and the rows that go to another one. Pure.

All is counted in tokens. A piece is done soonest where the tokens in front of it and its own, without those that
the server's prefix cache saves, take the least time. So a piece stays where its prefix is until that server is
behind by more than the piece is worth: `WORTH` times the tokens of prefixes that another one would compute again.
"""

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import partial

from conserve.jobs.fleet.pieces import Piece
from conserve.jobs.window.prefix_tree import Key

# Tokens of waiting that a saved token is worth. A server that is behind has rows to run meanwhile and loses
# nothing; a prefix that is computed again is lost for good.
WORTH = 4.0


@dataclass(slots=True, kw_only=True)
class ServerLoad:
    """A server as a placement sees it; `place` adds to it."""

    tokens_per_s: float
    tokens: float  # in flight or waiting at the server
    cached: Container[int]  # blocks that its prefix cache holds
    coming: set[int] = field(default_factory=set)  # blocks of rows that wait at the server

    @property
    def wait_s(self) -> float:
        """Time until the rows that it has are done."""
        return self.tokens / self.tokens_per_s

    def missing(self, piece: Piece, block_tokens: int) -> int:
        """Tokens of the piece's prefixes that the server would compute: all behind the first block it lacks."""
        return block_tokens * sum(
            len(row.key)
            - bisect_left(range(begin, len(row.key)), True, key=partial(self._lacks, row.key))
            - begin
            for begin, row in piece.branches()
        )

    def _lacks(self, key: Key, place: int) -> bool:
        return key[place] not in self.cached and key[place] not in self.coming

    def take(self, piece: Piece, block_tokens: int) -> None:
        """Add a piece."""
        self.tokens += piece.tokens + self.missing(piece, block_tokens)
        self.coming.update(piece.blocks())


def place(found: Sequence[Piece], loads: Sequence[ServerLoad], *, block_tokens: int) -> list[int]:
    """Choose the index of a server for each piece; the loads have the pieces afterwards."""
    chosen = []
    for piece in found:
        costs = [cost_s(piece, load, block_tokens) for load in loads]
        best = costs.index(min(costs))
        loads[best].take(piece, block_tokens)
        chosen.append(best)
    return chosen


def cost_s(piece: Piece, load: ServerLoad, block_tokens: int, worth: float = WORTH) -> float:
    """Seconds until the piece would be done, with each token of a prefix that is missing counted `worth` times."""
    missing = load.missing(piece, block_tokens)
    return load.wait_s + (piece.tokens + worth * missing) / load.tokens_per_s


def pays(piece: Piece, slow: ServerLoad, spare: ServerLoad, *, block_tokens: int) -> bool:
    """True if the last piece of a slow server is done sooner on one with places to spare.

    A server with nothing to run computes a prefix in time that nothing else would use.
    """
    worth = WORTH if spare.tokens > 0 else 1.0
    return cost_s(piece, spare, block_tokens, worth) < slow.wait_s
