"""Tokens computed for offline requests: how many, what they are worth, and how many of them were computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.worth import Worth

if TYPE_CHECKING:
    from vllm.v1.request import Request


class OfflineTokens:
    """Counts them as they are scheduled; what a request computes again counts for nothing.

    Exact in tokens. In work, a row that comes back with one token missing may count that as a prompt's or as a
    step; of speculated tokens only the step counts.
    """

    def __init__(self, step: int = 1) -> None:
        """A decode step has `step` tokens at most."""
        self.work = 0.0  # tokens of prompts, and decode steps as so many of them as they cost
        self.again = 0  # tokens that were computed again, since their request had lost its memory
        self._step = step
        self._had: dict[str, int] = {}  # tokens that requests had when they lost it

    def loses(self, request: Request) -> None:
        """It loses its memory."""
        had = self._had.get(request.request_id, 0)
        self._had[request.request_id] = max(had, request.num_computed_tokens)

    def forget(self, name: str) -> None:
        """It is over."""
        self._had.pop(name, None)

    def count(
        self,
        scheduled: Mapping[str, int],
        requests: Mapping[str, Request],
        offline: Set[str],
        batch: Batch,
        worth: Worth,
    ) -> int:
        """These were scheduled just now, by request, which makes this batch; returns the offline ones' new tokens.

        From the batch's sums, less what is not theirs: there may be hundreds of them in every iteration.
        """
        tokens, prompts = batch.tokens, batch.prefill_tokens
        steps, contexts = batch.requests - batch.prefills, batch.context - batch.prefill_context
        for name in scheduled.keys() - offline:
            live, request = scheduled[name], requests[name]
            tokens -= live
            context = request.num_computed_tokens - live
            if live <= self._step and context >= request.num_prompt_tokens:
                steps -= 1
                contexts -= context
            else:
                prompts -= live
        again = sum(
            self._again(requests[name], scheduled[name]) for name in self._had.keys() & scheduled.keys()
        )
        self.again += again
        self.work += prompts - again + worth.of(steps, contexts)
        return tokens - again

    def left(self, request: Request, part: Slice, worth: Worth) -> int:
        """The request left the iteration before it had computed its part; returns how many tokens had counted."""
        again = self._again(request, part.tokens)
        self.again -= again
        self.work -= worth.of(1, part.context) if part.decode else part.tokens - again
        return part.tokens - again

    def _again(self, request: Request, tokens: int) -> int:
        begun = request.num_computed_tokens - tokens
        again: int = self._had.get(request.request_id, 0) - begun
        return max(0, min(tokens, again))
