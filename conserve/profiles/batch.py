"""What one engine iteration computes, reduced to the sums that latency models need.

A request's part in an iteration is a `Slice`: p tokens computed after c tokens whose KV is already there. A
`Batch` keeps sums over the slices, so that adding or removing a request is O(1) whatever the batch's size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


class Slice(NamedTuple):
    """The part of one request: `tokens` (p >= 1) computed after `context` (c >= 0) tokens held in KV blocks.

    A decode step computes the token after the ones generated so far; everything else is a prefill chunk,
    whichever part of its prompt it is and however short.
    """

    tokens: int
    context: int
    decode: bool = False


@dataclass(slots=True, kw_only=True)
class Batch:
    """Sums over the slices of one iteration, all exact integers, so that order never matters."""

    requests: int = 0
    tokens: int = 0  # sum of p
    context: int = 0  # sum of c
    square: int = 0  # sum of p * p
    product: int = 0  # sum of p * c
    prefills: int = 0  # slices that are no decode step
    prefill_tokens: int = 0  # their p
    prefill_context: int = 0  # their c

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Self:
        """The batch of these slices."""
        batch = cls()
        for tokens, context, decode in slices:
            batch.add(tokens, context, decode)
        return batch

    def add(self, tokens: int, context: int, decode: bool = False) -> None:
        """Let a request compute `tokens` tokens after `context` others."""
        self.requests += 1
        self.tokens += tokens
        self.context += context
        self.square += tokens * tokens
        self.product += tokens * context
        if not decode:
            self.prefills += 1
            self.prefill_tokens += tokens
            self.prefill_context += context

    def add_decodes(self, contexts: Sequence[int]) -> None:
        """Let a request each compute one token after so many others: many `add`s at once."""
        count, context = len(contexts), sum(contexts)
        self.requests += count
        self.tokens += count
        self.square += count
        self.context += context
        self.product += context

    def remove(self, tokens: int, context: int, decode: bool = False) -> None:
        """Undo `add` with the same arguments."""
        self.requests -= 1
        self.tokens -= tokens
        self.context -= context
        self.square -= tokens * tokens
        self.product -= tokens * context
        if not decode:
            self.prefills -= 1
            self.prefill_tokens -= tokens
            self.prefill_context -= context
