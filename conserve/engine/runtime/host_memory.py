"""Blocks of host memory that keep KV: who holds them, what is in them, and which goes first when it is full.

A block is held while a row wants it or a copy writes it. One that nobody holds keeps what it has, for whoever
has the same tokens, until the memory is wanted: the block released first goes first.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Block:
    key: Hashable
    holders: int = 1
    written: bool = False


@dataclass(slots=True)
class HostMemory:
    """The bookkeeping of `capacity` blocks; the bytes are the workers'."""

    capacity: int
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _by_key: dict[Hashable, int] = field(default_factory=dict)
    _released: dict[int, None] = field(default_factory=dict)  # in the order in which they may go
    _never_used: int = 0
    _empty: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Blocks that `allocate` could give out."""
        return len(self._released) + len(self._empty) + self.capacity - self._never_used

    @property
    def used(self) -> int:
        """Blocks with something in them."""
        return len(self._blocks)

    def find(self, key: Hashable) -> int | None:
        """The block with this content, written or about to be."""
        return self._by_key.get(key)

    def is_written(self, block: int) -> bool:
        """Whether the content has arrived."""
        return self._blocks[block].written

    def allocate(self, key: Hashable) -> int | None:
        """A block to write this content into, held once; None where all are held."""
        assert key not in self._by_key
        if self._empty:
            block = self._empty.pop()
        elif self._never_used < self.capacity:
            block, self._never_used = self._never_used, self._never_used + 1
        elif self._released:
            block = next(iter(self._released))
            self._drop(block)
            self._empty.pop()
        else:
            return None
        self._blocks[block] = _Block(key)
        self._by_key[key] = block
        return block

    def written(self, block: int) -> None:
        """Its content has arrived."""
        self._blocks[block].written = True

    def hold(self, block: int) -> None:
        """Keep it for one more."""
        self._blocks[block].holders += 1
        self._released.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks up; of those that nobody holds any more, the last one given goes last."""
        for block in blocks:
            entry = self._blocks[block]
            entry.holders -= 1
            if entry.holders:
                continue
            if entry.written and self._by_key.get(entry.key) == block:
                self._released[block] = None
            else:
                self._drop(block)

    def forget(self, block: int) -> None:
        """Nobody shall find it again: it was not written, or not rightly."""
        entry = self._blocks[block]
        if self._by_key.get(entry.key) == block:
            del self._by_key[entry.key]
        if not entry.holders:
            self._drop(block)

    def clear(self) -> None:
        """Empty every block that nobody holds."""
        for block in list(self._released):
            self._drop(block)

    def _drop(self, block: int) -> None:
        entry = self._blocks.pop(block)
        self._released.pop(block, None)
        if self._by_key.get(entry.key) == block:
            del self._by_key[entry.key]
        self._empty.append(block)
