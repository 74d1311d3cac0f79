"""Pieces: rows that are placed together, since they share a prefix. Pure.

A piece is a whole subtree of the prefix tree of the rows that wait. A subtree is cut into its children only if it
is more than a server's share of the work, and if the work below its prefix makes up for computing the prefix again.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, Self

from conserve.jobs.window.prefix_tree import Key
from conserve.jobs.window.waiting import shared_blocks

MOST_AGAIN = 0.1  # share of a subtree's tokens that cutting it may add


class UnplacedRow(NamedTuple):
    """A row that waits for a server: its number, its key, and its tokens beyond the whole blocks of its key."""

    number: int
    key: Key
    tokens: float


class Piece(NamedTuple):
    """Rows that go to one server, in order of their keys."""

    rows: Sequence[UnplacedRow]

    @classmethod
    def of(cls, rows: Iterable[UnplacedRow]) -> Self:
        """Bring rows into the order of their keys."""
        return cls(sorted(rows, key=lambda row: (row.key, row.number)))

    @property
    def tokens(self) -> float:
        """Tokens of the rows beyond their keys."""
        return sum(row.tokens for row in self.rows)

    def branches(self) -> Iterator[tuple[int, UnplacedRow]]:
        """Yield each row with the number of blocks that it shares with the row before."""
        before: Key = ()
        for row in self.rows:
            yield shared_blocks(before, row.key), row
            before = row.key

    def blocks(self) -> Iterator[int]:
        """Yield each block once."""
        for begin, row in self.branches():
            yield from row.key[begin:]


def pieces(rows: Sequence[UnplacedRow], *, servers: int, block_tokens: int) -> list[Piece]:
    """Cut rows into pieces for so many servers: the piece with the row that waits longest comes first."""
    ordered = Piece.of(rows).rows
    most = work(ordered, block_tokens) / max(1, servers)
    found: list[Piece] = []
    whole = [ordered] if ordered else []
    while whole:
        group = whole.pop()
        if stays_together(group, most, servers, block_tokens):
            found.append(Piece(group))
        else:
            whole += parts(group)
    return sorted(found, key=lambda piece: min(row.number for row in piece.rows))


def stays_together(rows: Sequence[UnplacedRow], most: float, servers: int, block_tokens: int) -> bool:
    """True if these rows are one piece."""
    if len(rows) == 1:
        return True
    tokens = work(rows, block_tokens)
    prefix = shared_blocks(rows[0].key, rows[-1].key) * block_tokens
    return tokens <= most or prefix * (servers - 1) > MOST_AGAIN * tokens


def parts(rows: Sequence[UnplacedRow]) -> list[list[UnplacedRow]]:
    """Children of the branch that all these rows share; halves if their keys are equal."""
    depth = shared_blocks(rows[0].key, rows[-1].key)
    found = [list(part) for _, part in groupby(rows, lambda row: row.key[depth : depth + 1])]
    if len(found) > 1:
        return found
    half = len(rows) // 2
    return [list(rows[:half]), list(rows[half:])]


def work(rows: Sequence[UnplacedRow], block_tokens: int) -> float:
    """Tokens of rows in order of their keys, each shared block counted once."""
    if not rows:
        return 0.0
    shared = sum(shared_blocks(one.key, other.key) for one, other in pairwise(rows))
    blocks = sum(len(row.key) for row in rows) - shared
    return blocks * block_tokens + sum(row.tokens for row in rows)
