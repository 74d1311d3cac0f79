"""Contents of host memory by row.

A row's checkpoint is a list of host blocks: one for each of its full KV blocks from the first on, and for an
evicted row one more for its last, partly filled block. Rows that begin with the same tokens share blocks.
Source: conserve-2026 section 4.4.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from vllm.v1.request import Request

from conserve.engine.runtime.host_memory import HostMemory
from conserve.engine.vllm.checkpoint.restores import Copy


@dataclass(slots=True)
class Checkpoint:
    """One row's blocks in host memory, written or about to be."""

    request: Request
    blocks: list[int] = field(default_factory=list)  # host blocks, each held once for this row
    tail: int | None = None  # host block of the partly filled block after them
    tail_tokens: int = 0  # tokens in the tail
    whole: int = 0  # number of blocks known to be written; falls only after failures


class SavedRows:
    """Checkpoints by the names of their rows."""

    def __init__(
        self, memory: HostMemory, *, block_tokens: int, hashes_a_block: int = 1, shared: bool = True
    ) -> None:
        self.memory = memory
        self.refused = 0  # times that a block was refused because host memory was full
        self._block_tokens = block_tokens
        self._hashes_a_block = hashes_a_block
        self._shared = shared  # True: rows may use KV that others computed for the same tokens
        self._rows: dict[str, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def requests(self) -> Iterator[Request]:
        """The rows' requests."""
        return (checkpoint.request for checkpoint in self._rows.values())

    # Contents of a checkpoint.

    def blocks(self, name: str) -> Sequence[int]:
        """Host blocks of the row's full blocks, from its first on."""
        checkpoint = self._rows.get(name)
        return checkpoint.blocks if checkpoint is not None else ()

    def tail_tokens(self, name: str) -> int:
        """Number of tokens in the partly filled block; 0 without one."""
        checkpoint = self._rows.get(name)
        return checkpoint.tail_tokens if checkpoint is not None else 0

    def tokens(self, name: str) -> int:
        """Number of the row's first tokens that host memory has; blocks being copied do not count."""
        checkpoint = self._rows.get(name)
        if checkpoint is None:
            return 0
        tokens = self._arrived(checkpoint) * self._block_tokens
        if checkpoint.whole == len(checkpoint.blocks) and self._tail_arrived(checkpoint):
            tokens += checkpoint.tail_tokens
        return tokens

    def is_whole(self, name: str) -> bool:
        """True if no block of the row is being copied."""
        checkpoint = self._rows.get(name)
        if checkpoint is None:
            return True
        tail = checkpoint.tail is None or self._tail_arrived(checkpoint)
        return tail and self._arrived(checkpoint) == len(checkpoint.blocks)

    def _arrived(self, checkpoint: Checkpoint) -> int:
        written, blocks = self.memory.is_written, checkpoint.blocks
        while checkpoint.whole < len(blocks) and written(blocks[checkpoint.whole]):
            checkpoint.whole += 1
        return checkpoint.whole

    def _tail_arrived(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.tail is not None and self.memory.is_written(checkpoint.tail)

    def sources(self, name: str, first: int, last: int) -> Sequence[int]:
        """Host blocks of the row's blocks `first` to `last` - 1, of which the last may be the tail."""
        checkpoint = self._rows[name]
        sources = checkpoint.blocks[first:last]
        if len(sources) < last - first:
            assert checkpoint.tail is not None
            sources.append(checkpoint.tail)
        return sources

    def keys(self, request: Request, first: int = 0) -> Iterator[Hashable]:
        """Keys of the contents of a row's blocks: vLLM's hash of all tokens up to a block's end, if it has one."""
        hashes = request.block_hashes if self._shared else ()
        each = self._hashes_a_block
        for index in count(first):
            last = (index + 1) * each - 1
            yield hashes[last] if last < len(hashes) else (request.request_id, index)

    # Growth.

    def extend(
        self, request: Request, ids: Sequence[int], blocks: int, most: int | None = None
    ) -> list[Copy]:
        """Add the row's next `blocks` blocks, whose device blocks are in `ids`; blocks saved by others are shared.

        Returns the copies to make, at most `most`. Fewer blocks are added if host memory is full.
        """
        checkpoint = self._rows.setdefault(request.request_id, Checkpoint(request))
        copies: list[Copy] = []
        self._drop_tail(checkpoint)
        first = len(checkpoint.blocks)
        for device, key in islice(zip(ids[first:], self.keys(request, first), strict=False), blocks):
            host = self.memory.find(key)
            if host is not None:
                self.memory.hold(host)
            else:
                if most is not None and len(copies) >= most:
                    break
                host = self._allocate(key)
                if host is None:
                    break
                copies.append(Copy(device, host))
            checkpoint.blocks.append(host)
        return copies

    def add_tail(self, request: Request, ids: Sequence[int], tokens: int) -> list[Copy]:
        """Add the partly filled block after the full ones, which holds `tokens` tokens."""
        checkpoint = self._rows[request.request_id]
        full = len(checkpoint.blocks)
        host = self._allocate((request.request_id, full * self._block_tokens + tokens))
        if host is None:
            return []
        checkpoint.tail, checkpoint.tail_tokens = host, tokens
        return [Copy(ids[full], host)]

    def _allocate(self, key: Hashable) -> int | None:
        host = self.memory.allocate(key)
        self.refused += host is None
        return host

    def adopt(self, request: Request) -> None:
        """Hold what host memory has of the tokens that a row without a checkpoint begins with."""
        if request.request_id not in self._rows and (found := self._found(request)):
            for host in found:
                self.memory.hold(host)
            self._rows[request.request_id] = Checkpoint(request, found)

    def tokens_found(self, request: Request) -> int:
        """Number of the row's first tokens in host memory: its own, or KV that it could adopt."""
        if request.request_id in self._rows:
            return self.tokens(request.request_id)
        return len(self._found(request)) * self._block_tokens

    def _found(self, request: Request) -> list[int]:
        """Host blocks that have arrived with the tokens that the row begins with, whichever row they are of."""
        if not self._shared:
            return []
        found: list[int] = []
        each = self._hashes_a_block
        for key in islice(request.block_hashes, each - 1, None, each):
            host = self.memory.find(key)
            if host is None or not self.memory.is_written(host):
                break
            found.append(host)
        return found

    # Removal.

    def forget(self, name: str) -> None:
        """Give up the row's checkpoint; rows that begin with the same tokens may still find its blocks."""
        checkpoint = self._rows.pop(name, None)
        if checkpoint is not None:
            self._drop_tail(checkpoint)
            # The beginning of a row is the most useful part to others, so its end is released first.
            self.memory.release(reversed(checkpoint.blocks))

    def clear(self) -> None:
        """Give up all checkpoints, and empty all blocks without a holder."""
        for name in list(self._rows):
            self.forget(name)
        self.memory.clear()

    def unusable(self, name: str) -> int:
        """Remove a row's blocks, which failed to be restored, for all rows; returns their number."""
        blocks = self.blocks(name)
        for host in blocks:
            self.memory.forget(host)
        self.forget(name)
        return len(blocks)

    def lost(self, hosts: set[int]) -> None:
        """End every checkpoint before the first of these blocks, which were not written."""
        for checkpoint in self._rows.values():
            if checkpoint.tail in hosts:
                self._drop_tail(checkpoint)
            index = next((i for i, host in enumerate(checkpoint.blocks) if host in hosts), None)
            if index is not None:
                self._drop_tail(checkpoint)
                for host in checkpoint.blocks[index:]:
                    if host in hosts:
                        self.memory.forget(host)
                self.memory.release(reversed(checkpoint.blocks[index:]))
                del checkpoint.blocks[index:]
                checkpoint.whole = min(checkpoint.whole, index)

    def _drop_tail(self, checkpoint: Checkpoint) -> None:
        if checkpoint.tail is not None:
            self.memory.forget(checkpoint.tail)
            self.memory.release([checkpoint.tail])
            checkpoint.tail, checkpoint.tail_tokens = None, 0
