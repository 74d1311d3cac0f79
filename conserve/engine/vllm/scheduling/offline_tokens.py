"""Tokens computed for offline requests: their number, their worth, and how many were computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.worth import Worth

if TYPE_CHECKING:
    from vllm.v1.request import Request


class OfflineTokens:
    """Counts offline tokens as they are scheduled. Tokens that a request computes again do not count.

    Tokens are exact. Work is not: a row that was evicted with one token missing may count it as a prompt's token or
    as a decode step, and of speculated tokens only the step counts.
    """

    def __init__(self, step: int = 1) -> None:
        """A decode step has `step` tokens at most."""
        self.work = 0.0  # prompt tokens, and decode steps as the number of prompt tokens that cost as much
        self.steps = 0  # decode steps among the tokens
        self.again = 0  # tokens that were computed again after an eviction
        self._step = step
        self._had: dict[str, int] = {}  # tokens that evicted requests had computed

    def loses(self, request: Request) -> None:
        """Note how far an evicted request had got."""
        had = self._had.get(request.request_id, 0)
        self._had[request.request_id] = max(had, request.num_computed_tokens)

    def forget(self, name: str) -> None:
        """Forget a finished request."""
        self._had.pop(name, None)

    def count(
        self,
        scheduled: Mapping[str, int],
        requests: Mapping[str, Request],
        offline: Set[str],
        batch: Batch,
        worth: Worth,
    ) -> int:
        """Count the offline tokens of an iteration that was scheduled just now; returns the new ones.

        They are the batch's sums less the online requests' part, since there may be hundreds of offline requests.
        """
        tokens, prompts = batch.tokens, batch.prefill_tokens
        steps, contexts = batch.requests - batch.prefills, batch.context - batch.prefill_context
        online = [name for name in scheduled if name not in offline]  # of `offline` there may be thousands
        for name in online:
            live, request = scheduled[name], requests[name]
            tokens -= live
            context = request.num_computed_tokens - live
            if live <= self._step and context >= request.num_prompt_tokens:
                steps -= 1
                contexts -= context
            else:
                prompts -= live
        again = sum(
            self._again(name, scheduled[name], requests[name].num_computed_tokens - scheduled[name])
            for name in self._had.keys() & scheduled.keys()
        )
        self.again += again
        self.steps += steps
        self.work += prompts - again + worth.of(steps, contexts)
        return tokens - again

    def left(self, name: str, part: Slice, worth: Worth) -> int:
        """Uncount the part of a request that left the iteration; returns the tokens that had counted."""
        again = self._again(name, part.tokens, part.context)
        self.again -= again
        self.steps -= part.decode
        self.work -= worth.of(1, part.context) if part.decode else part.tokens - again
        return part.tokens - again

    def _again(self, name: str, tokens: int, context: int) -> int:
        return max(0, min(tokens, self._had.get(name, 0) - context))
