"""Harm: how much longer offline tokens may make live latency than it would be without them (docs/adr/0015).

The bound is relative, so it needs no number from the user: it is a share of the time that the latency model
predicts for the online requests alone. It holds for each iteration, and so for the median as well as for the tail.
"""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import View


def harm_limit_ms(composer: Composer, view: View) -> float:
    """Longest iteration with offline tokens beside the online requests in the batch, in ms.

    The offline tokens add at most a share `harm` of the predicted time of the online requests alone. Where a prompt
    is among them they add `PATIENCE` at most: requests queue for prompts, so time added there adds up.
    """
    harm = view.slo.harm
    if harm is None:
        return inf
    share = min(harm, PATIENCE) if composer.batch.prefills else harm
    alone_ms = view.model.predict(composer.batch)
    # The margin is on what is added alone: noise makes the iteration longer with offline tokens and without.
    return view.model.margin(alone_ms) * alone_ms + share * alone_ms + composer.surcharge_ms
