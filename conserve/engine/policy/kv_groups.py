"""KV blocks of models whose layers keep their KV in several groups, or forget what is behind a window.

All groups take their blocks from one pool: a prompt takes the blocks of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from conserve.engine.policy.view import Candidate


class KvGroup(NamedTuple):
    """Layers that keep their KV in the same blocks."""

    block_tokens: int
    kept_tokens: int | None = None  # of those computed, the last ones that the layers still read; None: all
    most_blocks: int | None = None  # of one request at any moment; None without a bound

    def blocks(self, computed: int, end: int) -> int:
        """Blocks of a request with `computed` tokens that has room for its first `end` tokens."""
        taken = -(-end // self.block_tokens) - self.forgotten(computed)
        return taken if self.most_blocks is None else min(taken, self.most_blocks)

    def forgotten(self, computed: int) -> int:
        """Blocks that are free again, since no token to come reads them."""
        return 0 if self.kept_tokens is None else max(0, computed - self.kept_tokens) // self.block_tokens


def blocks_taken(groups: Iterable[KvGroup], computed: int, end: int) -> int:
    """Blocks of all groups of a request with `computed` tokens that has room for its first `end` tokens."""
    return sum(group.blocks(computed, end) for group in groups)


def blocks_lacking(candidate: Candidate, tokens: int, groups: Iterable[KvGroup], block_tokens: int) -> int:
    """Blocks that a request needs for its next tokens, beyond those that it has."""
    context, end = candidate.context, candidate.context + tokens
    wanted = blocks_taken(groups, context, end) if groups else -(-end // block_tokens)
    return max(0, wanted - candidate.blocks)
