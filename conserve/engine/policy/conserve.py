"""ConServe's policy: online requests first, offline tokens in whatever time that leaves."""

from itertools import chain, islice
from math import inf, sqrt

from conserve.engine.policy.composer import Composer, smallest_ms
from conserve.engine.policy.offline import serve_least, serve_offline
from conserve.engine.policy.online import serve_online
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View
from conserve.profiles.batch import Batch, Slice

LARGEST_LOSS = 0.1  # of throughput, to iterations being shorter than they could be
LEAST_LOSS = 0.02  # the same, where only the time of a layer speaks for short ones
LEAST_ARRIVALS_PER_S = 1 / 60  # where none were seen for a minute


class Conserve:
    """Every iteration as full as the SLO allows (conserve-2026 section 4.2, conserve-2024 section 4.5)."""

    decides = True
    holds_offline = False
    spares_offline = False

    def plan(self, view: View) -> Plan:
        """Phase 1, then phase 2 within what the online requests, present and to come, leave."""
        composer = Composer(view)
        share = serve_online(composer, view, tbt_ms=view.slo.tbt_ms)
        if share.complete:
            limit_ms = min(share.limit_ms, arrival_limit_ms(view))
            running, waiting = share.running_offline, iter(view.waiting_offline)
            first = list(islice(waiting, 1))
            serve_offline(composer, running, chain(first, waiting), limit_ms)
            serve_least(composer, running, first, view.block_tokens)
        return composer.plan()


def arrival_limit_ms(view: View) -> float:
    """How long an iteration with offline tokens may last for the sake of who arrives while it runs."""
    if view.slo.ttft_ms == inf:
        return inf
    constant_ms = smallest_ms(view.model)
    if view.resumable:  # nobody waits for it, and nothing is lost by ending it
        return constant_ms / LEAST_LOSS
    limit_ms = bearable_ms(view, constant_ms)
    return min(limit_ms, cheapest_ms(view, constant_ms)) if view.preemptible else limit_ms


def cheapest_ms(view: View, constant_ms: float) -> float:
    """For iterations that begin anew once they were preempted: the length that costs the least throughput.

    A shorter one loses more to the constant part that every iteration has, a longer one loses more when an
    arrival ends it half-way: Young's optimum sqrt(2 * constant * time between arrivals) ("A first order
    approximation to the optimum checkpoint interval", 1974).
    """
    between_ms = 1e3 / max(view.arrivals_per_s, LEAST_ARRIVALS_PER_S)
    return sqrt(2 * constant_ms * between_ms)


def bearable_ms(view: View, constant_ms: float) -> float:
    """For iterations that an arrival may have to wait out: what its TTFT can bear.

    The wait spends TTFT slack: what the SLO leaves beyond the time of a typical prompt. Arrivals come in bursts,
    in which the slack is wanted for queueing, so the limit is no longer than throughput asks for: the smallest
    iteration, which is mostly the constant part of all, is a tenth of it. Where nobody came for a minute, that
    alone is the limit.
    """
    prompt = Batch.of([Slice(view.prompt_tokens, 0)] if view.prompt_tokens else [])
    slack_ms = view.slo.ttft_ms - view.model.predict(prompt)
    enough_ms = constant_ms / LARGEST_LOSS
    nobody = not view.online and not view.prompt_tokens
    return enough_ms if nobody else max(0.0, min(slack_ms, enough_ms))
