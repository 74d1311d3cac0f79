"""Cost of an iteration for each class of live traffic, in prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conserve.engine.policy.view import DEFAULT_CLASS

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


def cost_by_class(scheduler: CoServing, tokens: Mapping[str, int]) -> dict[str, float]:
    """Cost of the online requests' tokens in the iteration that was scheduled last; a decode step by its worth."""
    worth, class_of = scheduler.iterations.worth, scheduler.traffic.class_of
    cost: dict[str, float] = {}
    for name in tokens.keys() - scheduler.offline:
        part, live_class = scheduler.scheduled_slice(name, tokens[name]), class_of.get(name, DEFAULT_CLASS)
        one = worth.of(1, part.context) if part.decode else part.tokens
        cost[live_class] = cost.get(live_class, 0.0) + one
    return cost
