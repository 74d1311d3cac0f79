"""Bookkeeping of host memory blocks for KV: their holders, their contents, and the order in which they are reused.

A block is held while a row needs it or a copy writes it. A released block keeps its contents, for any row with the
same tokens, until the memory is needed: the block released first is reused first.
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
    """Bookkeeping of `capacity` blocks. The bytes are in the workers."""

    capacity: int
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _by_key: dict[Hashable, int] = field(default_factory=dict)
    _released: dict[int, None] = field(default_factory=dict)  # in the order of reuse
    _never_used: int = 0
    _empty: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Number of blocks that `allocate` could give out."""
        return len(self._released) + len(self._empty) + self.capacity - self._never_used

    @property
    def used(self) -> int:
        """Number of blocks with contents."""
        return len(self._blocks)

    def find(self, key: Hashable) -> int | None:
        """The block with these contents, written or about to be written."""
        return self._by_key.get(key)

    def is_written(self, block: int) -> bool:
        """True if the contents have arrived."""
        return self._blocks[block].written

    def allocate(self, key: Hashable) -> int | None:
        """A block to write these contents into, held once; None if all blocks are held."""
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
        """Note that the block's contents have arrived."""
        self._blocks[block].written = True

    def hold(self, block: int) -> None:
        """Add a holder to the block."""
        self._blocks[block].holders += 1
        self._released.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder of each block; blocks left without one are reused in the order given here."""
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
        """Let `find` no longer return this block, whose contents were not written or are wrong."""
        entry = self._blocks[block]
        if self._by_key.get(entry.key) == block:
            del self._by_key[entry.key]
        if not entry.holders:
            self._drop(block)

    def clear(self) -> None:
        """Empty every block without a holder."""
        for block in list(self._released):
            self._drop(block)

    def _drop(self, block: int) -> None:
        entry = self._blocks.pop(block)
        self._released.pop(block, None)
        if self._by_key.get(entry.key) == block:
            del self._by_key[entry.key]
        self._empty.append(block)
