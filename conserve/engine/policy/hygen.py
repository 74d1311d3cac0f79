"""HyGen's two-phase scheduler (hygen Algorithms 1, 2 and 4), and its variants without an SLO.

What the paper leaves to vLLM is shared with ConServe's policy: which rows give up memory, and that a row begins
only where its whole prompt has KV blocks. The latency budget is the profiler's (`bench/slo_search`), and the view's
model is HyGen's own predictor, without correction.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from math import inf
from zlib import crc32

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.offline import serve_least, serve_offline
from conserve.engine.policy.online import add_steps, make_place, place, rows_left
from conserve.engine.policy.plan import Plan, Traits
from conserve.engine.policy.victims import Victims
from conserve.engine.policy.view import Candidate, View

MOST_ORDERED = 512  # waiting rows that are put into the tree's order


class HyGen:
    """Live requests first, then rows in what the token budget and the latency budget leave."""

    traits = Traits(predicts_as_hygen=True)

    def __init__(self, *, budgeted: bool, rated: bool, ordered: bool) -> None:
        """`budgeted`: by predicted time; `rated`: rows begin at a fixed rate; `ordered`: by their prefixes."""
        self._budgeted, self._rated, self._ordered = budgeted, rated, ordered

    def plan(self, view: View) -> Plan:
        """Plan the online phase, then the offline one."""
        composer = Composer(view)
        budget_ms = view.budget_ms if self._budgeted and view.budget_ms is not None else inf
        running = online_phase(composer, view, budget_ms)
        if running is not None:
            waiting: Iterator[Candidate] = iter(view.waiting_offline)
            if self._ordered:
                waiting = by_prefix(waiting, view.utility)
            if self._rated:
                waiting = islice(waiting, view.rows_due)  # all where no rate is given
            first = list(islice(waiting, 1))
            running = serve_offline(composer, running, chain(first, waiting), budget_ms)
            serve_least(composer, running, first, view.block_tokens)
        return composer.plan()


def sarathi_plus() -> HyGen:
    """HyGen's first baseline: rows in the rest of the token budget, no SLO (hygen section 5.1)."""
    return HyGen(budgeted=False, rated=False, ordered=False)


def hygen_star() -> HyGen:
    """HyGen's second baseline: the same with rows at a fixed rate (hygen section 5.1)."""
    return HyGen(budgeted=False, rated=True, ordered=False)


def hygen() -> HyGen:
    """HyGen."""
    return HyGen(budgeted=True, rated=False, ordered=True)


def online_phase(composer: Composer, view: View, budget_ms: float) -> Sequence[Candidate] | None:
    """Add all decode steps, then prompts within the budget, evicting rows for their memory.

    Returns the running rows that were not evicted; None if a live request is left without all of its tokens.
    """
    victims = Victims(view.offline)
    add_steps(composer, victims, [request for request in view.online if request.decode])
    prompts = ((request, False) for request in view.online if not request.decode)
    for request, waiting in chain(prompts, ((request, True) for request in view.waiting_online)):
        if waiting and not composer.adapter_comes(request, victims):
            continue
        if request.restorable:
            if composer.tokens_left < 1 or not make_place(composer, victims, request):
                return None
            composer.restore(request)
            continue
        tokens = composer.token_budget(request, budget_ms)
        if not tokens and not composer.tokens:  # a budget below the smallest iteration would stop all work
            tokens = composer.token_budget(request, inf)
        if not tokens or not place(composer, victims, request, tokens, waiting=waiting):
            return None
        if tokens < request.tokens:
            return None
    return rows_left(view, composer) if composer.free_blocks >= 0 else None


def by_prefix(waiting: Iterable[Candidate], utility: float) -> Iterator[Candidate]:
    """Rows in the depth-first order of their prefix tree, or the stalest one, with probability `utility`.

    The draw is a hash of the two contenders' names: equal views get equal plans, and a row that is passed over
    meets another draw next time.
    """
    stale = list(islice(waiting, MOST_ORDERED))
    left = {row.name: row for row in stale}  # the stalest first
    for near in depth_first(stale):
        while near.name in left:
            old = next(iter(left.values()))
            chosen = near if draw(old.name, near.name) < utility else old
            del left[chosen.name]
            yield chosen


def depth_first(rows: Sequence[Candidate], depth: int = 0) -> Iterator[Candidate]:
    """Rows in the order of their prefix tree, the branches by the age of their oldest row.

    Equal beginnings have equal names of KV blocks; all of these rows share their first `depth` blocks.
    """
    if len(rows) > 1:
        shortest = min(len(row.prefix) for row in rows)
        while depth < shortest and len({row.prefix[depth] for row in rows}) == 1:
            depth += 1
    branches: dict[Hashable, list[Candidate]] = {}
    for row in rows:
        name = row.prefix[depth] if depth < len(row.prefix) else None
        branches.setdefault(name, []).append(row)
    for name, branch in branches.items():
        yield from branch if name is None or len(branch) == 1 else depth_first(branch, depth)


def draw(*names: str) -> float:
    """Number of these names, at least 0 and below 1, evenly spread."""
    return crc32("\n".join(names).encode()) / (1 << 32)
