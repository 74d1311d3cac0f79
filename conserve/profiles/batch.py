"""The work of one engine iteration, reduced to the sums that latency models need.

A request's part in an iteration is a `Slice`: p tokens computed after c tokens whose KV is already there. A
`Batch` keeps sums over the slices, so that adding or removing a request is O(1) for any size of the batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self


class Slice(NamedTuple):
    """The part of one request: `tokens` (p >= 1) computed after `context` (c >= 0) tokens held in KV blocks.

    A decode step computes the token after the ones generated so far. Everything else is a prefill chunk, of any
    length and any part of the prompt.
    """

    tokens: int
    context: int
    decode: bool = False


@dataclass(slots=True, kw_only=True)
class Batch:
    """Sums over the slices of one iteration; all are exact integers, so the order of adding never matters."""

    requests: int = 0
    tokens: int = 0  # sum of p
    context: int = 0  # sum of c
    square: int = 0  # sum of p * p
    product: int = 0  # sum of p * c
    prefills: int = 0  # slices that are not decode steps
    prefill_tokens: int = 0  # sum of p over prefills
    prefill_context: int = 0  # sum of c over prefills

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Self:
        """The batch of these slices."""
        batch = cls()
        for tokens, context, decode in slices:
            batch.add(tokens, context, decode)
        return batch

    def add(self, tokens: int, context: int, decode: bool = False) -> None:
        """Add a request that computes `tokens` tokens after `context` others."""
        self.requests += 1
        self.tokens += tokens
        self.context += context
        self.square += tokens * tokens
        self.product += tokens * context
        if not decode:
            self.prefills += 1
            self.prefill_tokens += tokens
            self.prefill_context += context

    def copy(self) -> "Batch":
        """Copy the sums, so that what is added to one batch leaves the other as it is."""
        return Batch(
            requests=self.requests,
            tokens=self.tokens,
            context=self.context,
            square=self.square,
            product=self.product,
            prefills=self.prefills,
            prefill_tokens=self.prefill_tokens,
            prefill_context=self.prefill_context,
        )

    def add_decodes(self, count: int, context: int) -> None:
        """Add `count` decode steps with `context` tokens before them together: many calls of `add` at once."""
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
