"""Harm: how much longer offline tokens may make live latency than it would be without them (docs/adr/0015).

The bound is relative, so it needs no number from the user: it is a share of the time that the latency model predicts
for the online requests alone. It holds for each iteration, and so for the median as well as for the tail.
"""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import View
from conserve.profiles.batch import Batch, Slice

LEAST_WAIT = 2.0  # smallest iterations; a shorter one would spend more than half of its time on its constant part


def harm_limit_ms(composer: Composer, view: View) -> float:
    """Longest iteration with offline tokens beside the online requests in the batch, in ms.

    The offline tokens add at most a share `harm` of the predicted time of the online requests alone. Where a prompt
    is among them they add `PATIENCE` at most: requests queue for prompts, so time added there adds up.
    """
    harm = view.slo.harm
    if harm is None or not composer.tokens:
        return inf
    share = min(harm, PATIENCE) if composer.batch.prefills else harm
    alone_ms = view.model.predict(composer.batch)
    # The margin is on what is added alone: noise makes the iteration longer with offline tokens and without.
    return view.model.margin(alone_ms) * alone_ms + share * alone_ms + composer.surcharge_ms


def harm_layers_ms(view: View, least_ms: float) -> float:
    """Longest iteration of which one layer takes half of what an arrival may wait, in ms; `least_ms` at least.

    Without a recent online request the length of prompts is unknown, and nothing is bounded.
    """
    if view.slo.harm is None or not view.prompt_tokens:
        return inf
    return max(least_ms, view.layers * view.slo.harm / 2 * typical_prompt_ms(view))


def typical_prompt_ms(view: View) -> float:
    """Predicted time of a typical prompt alone, in ms."""
    return view.model.predict(Batch.of([Slice(view.prompt_tokens, 0)] if view.prompt_tokens else []))


def harm_wait_ms(view: View, constant_ms: float) -> float:
    """Longest iteration of offline rows alone that an online request may have to wait out, in ms.

    Where rows leave, an arrival waits for none. Elsewhere it waits a share `harm` of a typical prompt's own time,
    or `LEAST_WAIT` iterations if that is more.
    """
    if view.slo.harm is None or view.rows_leave:
        return inf
    return max(LEAST_WAIT * constant_ms, view.slo.harm * typical_prompt_ms(view))
