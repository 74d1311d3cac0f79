"""Cost of a decode step, in prompt tokens.

A prompt token is cheap, since many of them share one pass through the weights; a decode step reads its whole
context for one token. So the tokens per second of an engine depend on the kind of tokens: policies whose rows
are at different stages can only be compared by the cost of their tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from conserve.profiles.batch import Slice
from conserve.profiles.model import LatencyModel, added_ms

CHUNK = 256  # tokens of the chunks and contexts that are compared


class Worth(NamedTuple):
    """Costs in prompt tokens."""

    step: float = 1.0  # a decode step
    context: float = 0.0  # each token of its context

    def of(self, steps: float, contexts: float) -> float:
        """Cost of `steps` decode steps whose contexts have `contexts` tokens together."""
        return self.step * steps + self.context * contexts

    @classmethod
    def by(cls, model: LatencyModel) -> Worth:
        """Costs by the model, for long chunks and steps in a full batch: without an iteration's constant part."""
        one_ms = token_ms(model)
        near_ms, far_ms = (added_ms(model, Slice(1, context, True)) for context in (CHUNK, 2 * CHUNK))
        if one_ms <= 0 or near_ms <= 0:
            return cls()
        context_ms = max(0.0, far_ms - near_ms) / CHUNK
        return cls((near_ms - CHUNK * context_ms) / one_ms, context_ms / one_ms)


def token_ms(model: LatencyModel) -> float:
    """Time that a token of a long prompt adds to an iteration, in ms: the unit of costs."""
    return (added_ms(model, Slice(2 * CHUNK, 0)) - added_ms(model, Slice(CHUNK, 0))) / CHUNK
