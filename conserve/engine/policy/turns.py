"""Turns: iterations of offline rows alone, between those of online requests that decode (docs/adr/0012).

Where rows cannot leave on their own, an iteration is left as a whole or not at all. One with online requests in it
is never left, so an arrival waits for its end, and it has to be short. An iteration of offline rows alone can be
left, so it may be long, but the online requests wait for it. The latency model says which of the two computes more.
"""

from math import inf

from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.view import View
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import smallest_ms


def offline_turn_ms(view: View, limit_ms: float) -> float:
    """Longest iteration of offline rows alone to come next, in ms; 0.0 if it is the online requests' turn.

    `limit_ms` is the longest iteration with offline tokens that an arrival can wait for. Online requests wait for
    one such iteration at a time, and only while all of them decode: an unfinished prompt goes first. A turn adds
    more than any `harm` allows.
    """
    if view.slo.tbt_harm is not None:
        return 0.0
    if not view.apart or view.online_waited_ms or not view.online or view.queued_online:
        return 0.0
    if any(not request.decode for request in view.online) or any(True for _ in view.waiting_online):
        return 0.0
    online_ms = view.model.predict(
        Batch.of(Slice(request.tokens, request.context, True) for request in view.online)
    )
    turn_ms = min(limit_ms, view.slo_among(view.online).tbt_ms - online_ms)
    return turn_ms if gained(view, turn_ms, online_ms) > mixed_gain(view, limit_ms, online_ms) else 0.0


def gained(view: View, turn_ms: float, online_ms: float) -> float:
    """Share of the time that computes offline tokens if such turns alternate with the online requests'."""
    if turn_ms == inf:
        return 1.0
    return max(0.0, turn_ms - smallest_ms(view.model)) / (turn_ms + online_ms) if turn_ms > 0 else 0.0


def mixed_gain(view: View, limit_ms: float, online_ms: float) -> float:
    """Share of the time that computes offline tokens if they go beside the online requests."""
    mixed_ms = min(mixed_limit_ms(view, limit_ms), view.slo_among(view.online).tbt_ms)
    if mixed_ms == inf:
        return 1.0
    return max(0.0, mixed_ms - online_ms) / mixed_ms if mixed_ms > 0 else 0.0


def mixed_limit_ms(view: View, limit_ms: float) -> float:
    """Longest iteration with online and offline tokens, in ms.

    Where such an iteration cannot be left, an arrival loses `PATIENCE` of its TTFT promise to it at most.
    """
    return min(limit_ms, PATIENCE * view.slo.ttft_ms) if view.apart else limit_ms
