"""Decode steps of several requests, with running sums: what the first of them take together is known at once."""

from collections.abc import Sequence
from itertools import accumulate

from conserve.engine.policy.kv_groups import KvGroup, blocks_lacking
from conserve.engine.policy.view import Candidate
from conserve.profiles.batch import Batch

READ_AT_ONCE = 8  # requests


class Steps:
    """The decode steps among some requests, in their order. There may be hundreds, and each sum is made once.

    Requests are looked at as far as steps are asked for: beside live requests there is mostly time for a few.
    """

    def __init__(self, among: Sequence[Candidate], groups: Sequence[KvGroup], block_tokens: int) -> None:
        self.requests: list[Candidate] = []  # those that have been looked at
        self._among, self._looked = among, 0
        self._groups, self._block_tokens = groups, block_tokens
        self._contexts = [0]
        self._tokens = [0]
        self._growing: list[tuple[int, int]] = []  # place and new KV blocks of the few that take any

    def __len__(self) -> int:
        self._look(self._among[self._looked :])
        return len(self.requests)

    def has(self, count: int) -> bool:
        """True if there are at least so many steps."""
        while len(self.requests) < count:
            missing = max(count - len(self.requests), READ_AT_ONCE)
            if not self._look(self._among[self._looked : self._looked + missing]):
                return False
        return True

    def _look(self, further: Sequence[Candidate]) -> int:
        """Take in the decode steps among the requests that come next; returns the number of these requests."""
        self._looked += len(further)
        first, steps = len(self.requests), [request for request in further if request.decode]
        contexts = [request.context for request in steps]
        tokens = [request.tokens for request in steps]
        self._contexts.extend(accumulate(contexts, initial=self._contexts.pop()))
        self._tokens.extend(accumulate(tokens, initial=self._tokens.pop()))
        groups, size = self._groups, self._block_tokens
        self._growing += [
            (place, blocks_lacking(request, request.tokens, groups, size))
            for place, request in enumerate(steps, first)
            if groups or request.context + request.tokens > request.blocks * size
        ]
        self.requests += steps
        return len(further)

    def tokens(self, count: int) -> int:
        """Tokens of the first `count` steps."""
        return self._tokens[count]

    def blocks(self, count: int) -> int:
        """New KV blocks that the first `count` steps take; most steps take none."""
        return sum(blocks for place, blocks in self._growing if place < count)

    def add_to(self, batch: Batch, count: int) -> None:
        """Add the first `count` steps to a batch."""
        self.has(count)
        if self._tokens[count] == count:  # no speculative tokens
            batch.add_decodes(count, self._contexts[count])
            return
        for request in self.requests[:count]:
            batch.add(request.tokens, request.context, request.decode)

    def named(self, count: int) -> dict[str, int]:
        """Tokens of the first `count` steps by request."""
        if self._tokens[count] == count:
            return dict.fromkeys([request.name for request in self.requests[:count]], 1)
        return {request.name: request.tokens for request in self.requests[:count]}
