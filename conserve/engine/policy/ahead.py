"""Iterations scheduled ahead beside online requests (docs/adr/0032).

An iteration is planned while the one before it runs, so an online request that arrives waits for both: nobody can
leave them. They have to be short. For that, no gap between two tokens has the host's work in it.
"""

from math import inf

from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import Slo, View
from conserve.profiles.model import LatencyModel, smallest_ms

SHORT = 10.0  # smallest iterations: in a longer one the host's work between two iterations is a small share
WAITS = 2  # iterations that an arrival waits for


def pays(slo: Slo, model: LatencyModel) -> bool:
    """True if the promises to online requests ask for iterations so short that the host's work counts.

    Where an iteration may be longer, rows gain more by iterations that they can leave.
    """
    return slo.tbt_harm is not None or slo.tbt_ms <= SHORT * smallest_ms(model)


def ahead_limit_ms(view: View, limit_ms: float, online_ms: float) -> float:
    """Longest iteration with offline tokens, in ms, if an arrival waits for `WAITS` of them.

    `limit_ms` is the longest that an arrival can wait for, and `online_ms` the time of the online requests in the
    iteration. The wait for these is no harm of rows, which add `PATIENCE` of the TTFT promise at most.
    """
    if limit_ms == inf:
        return inf
    return max(limit_ms / WAITS, online_ms + PATIENCE * view.slo.ttft_ms / WAITS)
