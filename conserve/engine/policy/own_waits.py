"""Waits of live requests that a user's policy leaves out of its plans, and the bound on them."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Candidate, View

MOST_PLANS = 4  # in a row that leave a live request out


class Wait(NamedTuple):
    """Plans in a row that left a live request out, and their predicted time."""

    plans: int = 0
    ms: float = 0.0


class Waits:
    """Waits of live requests by their names; a request that computes waits no longer."""

    def __init__(self) -> None:
        self._waits: dict[str, Wait] = {}

    def note(self, plan: Plan | None, view: View) -> None:
        """Note the plan that is followed; None, vLLM's own, leaves no live request out."""
        self._waits = {} if plan is None else {request.name: w for request, w in self._with(plan, view)}

    def too_long(self, plan: Plan, view: View) -> list[str]:
        """Live requests that would wait for too long under this plan."""
        return [request.name for request, wait in self._with(plan, view) if exceeds(request, wait, view)]

    def _with(self, plan: Plan, view: View) -> Iterator[tuple[Candidate, Wait]]:
        left = list(left_out(plan, view))
        ms = view.model.predict(plan.batch) if left else 0.0
        for request in left:
            before = self._waits.get(request.name, Wait())
            yield request, Wait(before.plans + 1, before.ms + ms)


def exceeds(request: Candidate, wait: Wait, view: View) -> bool:
    """True if so many plans leave the request out, or for so long, that its promise is broken."""
    slo = view.slo_of(request)
    late = wait.ms > slo.online_tbt_ms if request.decode else request.age_ms > slo.online_ttft_ms
    return late or wait.plans > MOST_PLANS


def left_out(plan: Plan, view: View) -> Iterator[Candidate]:
    """Live requests that get nothing from the plan: decode steps, running prompts, the first that waits.

    Prompts are not left out while others of them are computed and no row is: their order is the policy's.
    """
    prompts: list[Candidate] = []
    for request in (*view.online, *islice(view.waiting_online, 1)):
        if not serves(plan, request.name):
            if request.decode:
                yield request
            else:
                prompts.append(request)
    if prompts and not _only_live_prompts(plan, view):
        yield from prompts


def serves(plan: Plan, name: str) -> bool:
    """True if the request computes, or its KV begins to come back."""
    return name in plan.tokens or name in plan.restored


def _only_live_prompts(plan: Plan, view: View) -> bool:
    """True if the plan serves live prompts and no offline row."""
    others = {*plan.tokens, *plan.restored}.difference(one.name for one in view.online)
    if not others.isdisjoint(one.name for one in view.offline):
        return False
    moves = any(not request.decode and serves(plan, request.name) for request in view.online)
    for request in view.waiting_online if others else ():
        if request.name in others:
            moves = True
            others.remove(request.name)
            if not others:
                break
    return moves and not others
