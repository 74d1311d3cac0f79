"""Harm: how much longer offline tokens may make live latency than it would be without them (docs/adr/0015).

The bound is relative, so it needs no number from the user: it is a share of the time that the latency model
predicts for the online requests alone. It holds for each iteration, and so for the median as well as for the tail.
"""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import DEFAULT_CLASS, View, least, tightest
from conserve.profiles.correction import limit_ms_for
from conserve.profiles.model import LatencyModel


def harm_limit_ms(composer: Composer, view: View, scale: float = 1.0) -> float:
    """Longest iteration with offline tokens beside the online requests in the batch, in ms.

    At a `scale` it is so many times as long, and `harm` a share of (1 + harm) * scale - 1.

    Offline tokens have what our own scheduling leaves of a share `harm` of the predicted time that stock vLLM would
    take for the online requests alone; where it leaves nothing, they add nothing. Where a prompt is among them the
    share is `PATIENCE` at most: requests queue for prompts, so time added there adds up.
    """
    harm = harm_promised(composer, view)
    if harm is None:
        return inf
    share = (1 + (min(harm, PATIENCE) if composer.batch.prefills else harm)) * scale - 1
    alone_ms = view.model.predict(composer.batch)  # of which stock vLLM would not take `own_ms`
    added_ms = max(0.0, share * alone_ms - (1 + share) * view.own_ms)
    return lengthened_ms(view.model, alone_ms, added_ms) + composer.surcharge_ms if added_ms else 0.0


def harm_promised(composer: Composer, view: View) -> float | None:
    """Smallest harm to gaps of requests in the batch, and to first tokens beside a prompt; None without one."""
    slo = view.slo
    if view.slos:
        slo = tightest(view.slos[view.classes.get(name, DEFAULT_CLASS)] for name in composer.tokens)
    return least(slo.tbt_harm, slo.ttft_harm) if composer.batch.prefills else slo.tbt_harm


def lengthened_ms(model: LatencyModel, alone_ms: float, added_ms: float) -> float:
    """Limit in ms under which offline tokens add so much to an iteration that takes `alone_ms` without them.

    The margin is on what is added alone: noise makes the iteration longer with offline tokens and without.
    """
    return limit_ms_for(model.margin, alone_ms + added_ms / model.margin(alone_ms + added_ms))
