"""Iterations scheduled ahead beside online requests (docs/adr/0032).

An iteration is planned while the one before it runs, so an online request that arrives waits for both, and nothing
leaves them. They have to be short. In return no gap between two tokens has the host's work in it.
"""

from math import inf

from conserve.engine.policy.harm import lengthened_ms
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import Slo, View
from conserve.profiles.model import LatencyModel, smallest_ms

LONG = 10.0  # smallest iterations: where gaps may be longer, rows gain more by leaving
WAITS = 2  # iterations that an arrival waits for


def pays(slo: Slo, model: LatencyModel) -> bool:
    """True if the promises to online requests ask for short iterations, in which the host's work counts.

    Scheduled ahead, an iteration is at most half as long as an arrival can wait for, and its constant part counts
    twice. Otherwise the host's work, half of a smallest iteration or more, is in each gap.
    """
    return slo.tbt_harm is not None or slo.tbt_ms <= LONG * smallest_ms(model)


def ahead_limit_ms(view: View, online_ms: float, enough_ms: float) -> float:
    """Longest iteration with offline tokens, in ms, if an arrival waits for `WAITS` of them.

    They take half of the TTFT slack together, and `enough_ms` at most; the other half is for queueing. The wait for
    the online requests in an iteration, `online_ms`, is no harm of rows, which add `PATIENCE` of the TTFT promise
    at most.
    """
    ttft_ms = view.slo.ttft_ms
    if ttft_ms == inf:
        return inf
    slack_ms = max(0.0, ttft_ms - view.typical_prompt_ms)
    least_ms = lengthened_ms(view.model, online_ms, PATIENCE * ttft_ms / WAITS)
    return max(min(slack_ms / 2, enough_ms) / WAITS, least_ms)
