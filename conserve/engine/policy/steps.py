"""Decode steps of several requests, with running sums: what the first of them take together is known at once."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from conserve.engine.policy.kv_groups import KvGroup, blocks_lacking
from conserve.engine.policy.view import Candidate
from conserve.profiles.batch import Batch


class Steps:
    """Decode steps in the order in which they are added. There may be hundreds, and each sum is made once."""

    def __init__(self, requests: Sequence[Candidate], groups: Sequence[KvGroup], block_tokens: int) -> None:
        self.requests = requests
        contexts = [request.context for request in requests]
        tokens = [request.tokens for request in requests]
        self._contexts = [0, *accumulate(contexts)]
        self._tokens = [0, *accumulate(tokens)]
        self._single = self._tokens[-1] == len(requests)  # no speculative tokens
        self._growing = [  # place and new KV blocks of the few that take any
            (place, blocks_lacking(request, request.tokens, groups, block_tokens))
            for place, request in enumerate(requests)
            if groups or request.context + request.tokens > request.blocks * block_tokens
        ]

    def __len__(self) -> int:
        return len(self.requests)

    def tokens(self, count: int) -> int:
        """Tokens of the first `count` steps."""
        return self._tokens[count]

    def blocks(self, count: int) -> int:
        """New KV blocks that the first `count` steps take; most steps take none."""
        return sum(blocks for place, blocks in self._growing if place < count)

    def within_tokens(self, room: int) -> int:
        """Number of steps, in order, that have no more tokens than this together."""
        return max(0, bisect_right(self._tokens, room) - 1)

    def within_blocks(self, room: int) -> int:
        """Number of steps, in order, that take no more new KV blocks than this together."""
        if room < 0:
            return 0
        for place, blocks in self._growing:
            room -= blocks
            if room < 0:
                return place
        return len(self.requests)

    def add_to(self, batch: Batch, count: int) -> None:
        """Add the first `count` steps to a batch."""
        if self._single:
            batch.add_decodes(count, self._contexts[count])
            return
        for request in self.requests[:count]:
            batch.add(request.tokens, request.context, request.decode)

    def named(self, count: int) -> dict[str, int]:
        """Tokens of the first `count` steps by request."""
        if self._single:
            return dict.fromkeys([request.name for request in self.requests[:count]], 1)
        return {request.name: request.tokens for request in self.requests[:count]}
