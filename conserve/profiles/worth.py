"""What a decode step costs, counted in tokens of a prompt.

A prompt's token is cheap, since many go through the weights together; a decode step reads its whole context for
one. How many tokens per second an engine computes is therefore also a matter of which ones: policies whose rows are
at different stages compare only in what their tokens cost.
"""

from __future__ import annotations

from typing import NamedTuple

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

CHUNK = 256  # tokens


class Worth(NamedTuple):
    """In tokens of a prompt."""

    step: float = 1.0  # a decode step
    context: float = 0.0  # each token of its context

    def of(self, steps: int, contexts: int) -> float:
        """So many decode steps, whose contexts have so many tokens together."""
        return self.step * steps + self.context * contexts

    @classmethod
    def by(cls, model: LatencyModel) -> Worth:
        """What the model says of long chunks and of steps in a full batch: without an iteration's constant part."""
        token_ms = (_prompt_ms(model, 2 * CHUNK) - _prompt_ms(model, CHUNK)) / CHUNK
        near_ms, far_ms = _step_ms(model, CHUNK), _step_ms(model, 2 * CHUNK)
        if token_ms <= 0 or near_ms <= 0:
            return cls()
        context_ms = max(0.0, far_ms - near_ms) / CHUNK
        return cls((near_ms - CHUNK * context_ms) / token_ms, context_ms / token_ms)


def _prompt_ms(model: LatencyModel, tokens: int) -> float:
    return model.predict(Batch.of([Slice(tokens, 0)]))


def _step_ms(model: LatencyModel, context: int) -> float:
    """One decode step more."""
    step = Slice(1, context, True)
    return (model.predict(Batch.of([step] * 33)) - model.predict(Batch.of([step]))) / 32
