"""Prefixes that a server's cache is believed to hold, by the rows that were sent to it. Pure."""

from collections import OrderedDict

from conserve.jobs.window.prefix_tree import Key

MOST_BLOCKS = 1 << 16  # that are remembered of a server whose cache has an unknown size


class CachedPrefixes:
    """Blocks of the rows that a server got last, as many as its cache holds; the least recently used go first."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self._most = num_blocks or MOST_BLOCKS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def add(self, key: Key) -> None:
        """Note that a row with this key was sent; its first blocks stay longest, since more rows share them."""
        for block in reversed(key):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks: the server was started again."""
        self._blocks.clear()
