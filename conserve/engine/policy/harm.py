"""Harm: how much longer offline tokens may make live latency than it would be without them (docs/adr/0015).

The bound is relative, so it needs no number from the user: it is a share of the time that the latency model
predicts for the online requests alone. It holds for each iteration, and so for the median as well as for the tail.
Where online requests wait for each other, iterations may be longer by less than latencies may.
"""

from math import inf

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import DEFAULT_CLASS, Slo, View, least
from conserve.profiles.margin import limit_ms_for
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
    """Share that TBTs, and first tokens beside a prompt, leave to the next iteration; None without a harm.

    Of several classes in the iteration, the smallest share holds.
    """
    if not view.slos:
        return harm_of(view.slo, composer, view)
    classes = {view.classes.get(name, DEFAULT_CLASS) for name in composer.tokens}
    return least(*(harm_of(view.slos[name], composer, view) for name in classes))


def harm_of(slo: Slo, composer: Composer, view: View) -> float | None:
    """Share that the promises of one class leave to the next iteration."""
    tbt = of_an_iteration(slo.tbt_harm, slo, slo.tbt_ms, view.live_busy)
    if not composer.batch.prefills:
        return tbt
    return least(tbt, of_an_iteration(slo.ttft_harm, slo, slo.ttft_ms, view.live_busy))


def of_an_iteration(harm: float | None, slo: Slo, promised_ms: float, live_busy: float) -> float | None:
    """Share by which iterations may be longer for a latency to be longer by `harm`.

    Where the harm stands in for a promise in ms that is not kept, it is of iterations and not of latencies.
    """
    broken = slo.harm is None and promised_ms < inf
    return harm if harm is None or broken else without_queueing(harm, live_busy)


def without_queueing(harm: float, live_busy: float) -> float:
    """Share of longer service that makes latencies longer by `harm`, as more requests are there at a time.

    A shared processor that is busy for a share b of the time takes s / (1 - b) for what takes s alone. With service
    that is longer by h it takes (1 + h) s / (1 - (1 + h) b). Here s is the constant part of an iteration, and b the
    share of live iterations beyond it. Source: Kleinrock, "Queueing Systems" (1976), processor sharing.
    """
    return harm * (1 - live_busy) / (1 + harm * live_busy)


def lengthened_ms(model: LatencyModel, alone_ms: float, added_ms: float) -> float:
    """Limit in ms under which offline tokens add so much to an iteration that takes `alone_ms` without them.

    The margin is on what is added alone: noise makes the iteration longer with offline tokens and without.
    """
    return limit_ms_for(model.margin, alone_ms + added_ms / model.margin(alone_ms + added_ms))
