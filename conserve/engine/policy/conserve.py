"""ConServe's policy: online requests first, offline tokens in the time that they leave."""

from itertools import chain, islice
from math import inf, sqrt

from conserve.engine.policy.ahead import WAITS, ahead_limit_ms
from conserve.engine.policy.composer import Composer
from conserve.engine.policy.harm import harm_limit_ms
from conserve.engine.policy.offline import serve_least, serve_offline, serve_pushed
from conserve.engine.policy.online import OnlineShare, serve_online
from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.preemption import PATIENCE
from conserve.engine.policy.turns import mixed_limit_ms, offline_turn_ms
from conserve.engine.policy.view import View
from conserve.profiles.model import smallest_ms

# Share of an iteration that its constant part takes, which is lost throughput. A limit is the constant part divided
# by its share: a smaller share means longer iterations.
USUAL_SHARE = 0.1
HARM_SHARE = 0.2  # where a harm is promised and rows join again at their layer
JOIN_SHARE = 0.02  # where rows join again at their layer: an arrival waits for one layer at most
QUIET_SHARE = 0.01  # after a quiet minute
# Smallest iterations that an arrival waits for: shorter ones are more than half constant part.
LEAST_WAIT = 2.0
LEAST_GAIN = 0.1  # of the time of rows, for which a push makes iterations longer
LEAST_ARRIVALS_PER_S = 1 / 60  # assumed rate after a minute without arrivals


class Conserve:
    """Fills every iteration as far as the SLO allows (conserve-2026 section 4.2, conserve-2024 section 4.5)."""

    traits = Traits(
        repeats=True,  # a plan of decode steps alone holds while nothing but their contexts changes
        pauses_rows=True,
        rows_may_leave=True,
        guards_prefixes=True,
    )

    def plan(self, view: View) -> Plan:
        """Plan online requests first (phase 1), then fill the remaining time with offline tokens (phase 2)."""
        composer = Composer(view)
        limit_ms = arrival_limit_ms(view)
        if turn_ms := offline_turn_ms(view, limit_ms):
            composer.is_turn = True
            running = serve_offline(composer, view.offline, iter(view.waiting_offline), turn_ms)
            if composer.tokens:
                if view.pushed:
                    pushed_ms = worth_ms(turn_ms, turn_ms * view.push_scale, smallest_ms(view.model))
                    serve_pushed(composer, view, running, pushed_ms)
                return composer.plan()
            composer = Composer(view)
        share = serve_online(composer, view)
        if share.complete:
            mixed, prompts = bool(composer.tokens), bool(composer.batch.prefills)  # of online requests
            if view.ahead and not view.quiet:
                enough_ms = smallest_ms(view.model) / USUAL_SHARE
                limit_ms = ahead_limit_ms(view, composer.predicted_ms, enough_ms)
            time_ms = time_budget_ms(share, view, limit_ms, mixed=mixed)
            budget_ms = min(time_ms, harm_limit_ms(composer, view) if mixed else harmless_wait_ms(view))
            if prompts and not composer.has_time(budget_ms):
                return composer.plan()  # without a look at rows, which first tokens would wait for
            pushes = bool(view.pushed) and not prompts
            pushed_ms = pushed_limit_ms(composer, view, time_ms, budget_ms) if pushes else 0.0
            waiting = iter(view.waiting_offline)
            first = list(islice(waiting, 1))
            running = serve_offline(composer, share.running_offline, chain(first, waiting), budget_ms)
            serve_least(composer, running, first, view.block_tokens)
            serve_pushed(composer, view, running, pushed_ms)
        return composer.plan()


def time_budget_ms(share: OnlineShare, view: View, limit_ms: float, *, mixed: bool) -> float:
    """Time budget of an iteration with offline tokens, in ms; its token budget is as many tokens as fit into it.

    The smaller limit of the online requests in the iteration, if it is `mixed` with them, and of those that may
    arrive: `limit_ms` (docs/adr/0006, 0012).
    """
    return min(share.limit_ms, mixed_limit_ms(view, limit_ms) if mixed else limit_ms)


def pushed_limit_ms(composer: Composer, view: View, time_ms: float, budget_ms: float) -> float:
    """Longest iteration that rows which push may fill, in ms: `push_scale` times every limit (docs/adr/0030).

    `composer` has the online requests, `time_ms` is their time budget, and `budget_ms` the usual limit. 0 where
    a push would gain too little.
    """
    scale = view.push_scale
    harm_ms = harm_limit_ms(composer, view, scale) if composer.tokens else scale * harmless_wait_ms(view)
    taken_ms = max(smallest_ms(view.model), composer.predicted_ms)
    return worth_ms(budget_ms, min(scale * time_ms, harm_ms), taken_ms)


def worth_ms(limit_ms: float, longer_ms: float, taken_ms: float) -> float:
    """The longer limit where it gives rows at least `LEAST_GAIN` more of the time, else 0; all in ms.

    Rows have the share of an iteration that neither its constant part nor online requests take: `taken_ms`.
    """
    if longer_ms <= taken_ms or limit_ms == inf:
        return 0.0
    usual = max(0.0, 1 - taken_ms / limit_ms) if limit_ms > 0 else 0.0
    return longer_ms if 1 - taken_ms / longer_ms >= (1 + LEAST_GAIN) * usual else 0.0


def arrival_limit_ms(view: View) -> float:
    """Longest iteration with offline tokens that an online request arriving during it can wait for, in ms."""
    if view.slo.ttft_ms == inf:
        return inf
    if view.quiet:
        return quiet_limit_ms(view)
    constant_ms = smallest_ms(view.model)
    if view.rows_join:
        return layer_limit_ms(view, constant_ms)
    limit_ms = bearable_ms(view, constant_ms)
    return min(limit_ms, cheapest_ms(view, constant_ms)) if view.rows_leave else limit_ms


def layer_limit_ms(view: View, constant_ms: float) -> float:
    """Longest iteration that rows leave at once and lose nothing by, in ms: an arrival waits for a layer at most.

    A layer takes at most half of the TTFT slack, as far as that costs `USUAL_SHARE` of throughput at most; the
    other half is for queueing. The slack is that of a typical prompt under the tightest promise of any class.
    """
    slack_ms = max(0.0, view.slo.ttft_ms - view.typical_prompt_ms)
    return min(constant_ms / JOIN_SHARE, max(constant_ms / USUAL_SHARE, view.layers * slack_ms / 2))


def quiet_limit_ms(view: View) -> float:
    """Longest iteration in batching mode: no online request is expected within the next iterations, in ms.

    The next one waits for a layer where rows leave, or for half of its TTFT promise where they cannot. Where such
    requests are not rare, a layer takes `PATIENCE` of the promise at most, as far as that costs `USUAL_SHARE` of
    throughput at most. Source: conserve-2026 section 4.2, the offline-optimized mode.
    """
    constant_ms = smallest_ms(view.model)
    if view.rows_join:
        layer_ms = PATIENCE * view.slo.ttft_ms
        return inf if view.rare_starts else max(constant_ms / USUAL_SHARE, view.layers * layer_ms)
    if view.rows_leave:  # an arrival makes all of them begin anew
        return cheapest_ms(view, constant_ms)
    return max(constant_ms / USUAL_SHARE, view.slo.ttft_ms / 2 / waits_for(view))


def waits_for(view: View) -> int:
    """Iterations that an arrival waits for where rows do not leave them."""
    return WAITS if view.ahead else 1


def cheapest_ms(view: View, constant_ms: float) -> float:
    """Length of an abandonable iteration that costs the least throughput, in ms.

    A shorter iteration loses more to the constant part that each one has; a longer one loses more when an arrival
    abandons it half-way. The optimum is Young's sqrt(2 * constant * time between arrivals) ("A first order
    approximation to the optimum checkpoint interval", 1974).
    """
    between_ms = 1e3 / max(view.arrivals_per_s, LEAST_ARRIVALS_PER_S)
    return sqrt(2 * constant_ms * between_ms)


def bearable_ms(view: View, constant_ms: float) -> float:
    """Longest iteration that an arrival can wait out without missing its TTFT, in ms.

    The wait uses TTFT slack: the SLO minus the time of a typical prompt. Arrivals come in bursts, which need that
    slack for queueing, so the limit is at most the length at which the constant part of an iteration costs
    `USUAL_SHARE` of throughput. After a minute without online requests that length alone is the limit.
    """
    slack_ms = view.slo.ttft_ms - view.typical_prompt_ms
    enough_ms = constant_ms / USUAL_SHARE
    idle = not view.online and not view.prompt_tokens
    return enough_ms if idle else max(0.0, min(slack_ms, enough_ms))


def harmless_wait_ms(view: View) -> float:
    """Longest iteration of offline rows alone that `harm` allows for the sake of arrivals, in ms.

    An arrival waits a share `harm` of a typical prompt's own time at most: for the whole iteration where rows
    cannot leave, for a layer where they join again, and for nothing where they begin anew. In batching mode only
    the constant part of an iteration limits it. Requests that end a quiet minute wait for a layer of it, or for
    what is behind the last one, or for all of it, so it is that long only while such requests are rare.
    """
    harm = view.slo.ttft_harm
    if harm is None:
        return inf
    constant_ms = smallest_ms(view.model)
    longest_ms, enough_ms = constant_ms / JOIN_SHARE, constant_ms / USUAL_SHARE
    if view.quiet:
        return constant_ms / QUIET_SHARE if view.rare_starts else enough_ms
    wait_ms = harm * view.typical_prompt_ms / waits_for(view)
    if view.rows_join:
        shortest_ms = constant_ms / HARM_SHARE
        return min(longest_ms, max(shortest_ms, view.layers * wait_ms / 2))
    if view.rows_leave:
        return min(enough_ms, cheapest_ms(view, constant_ms))
    return min(enough_ms, max(LEAST_WAIT * constant_ms, wait_ms))
