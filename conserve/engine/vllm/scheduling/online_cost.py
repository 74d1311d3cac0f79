"""Cost of an iteration for each class of live traffic, in prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conserve.engine.policy.view import DEFAULT_CLASS


def cost_by_class(scheduler: Any, tokens: Mapping[str, int]) -> dict[str, float]:
    """Cost of the online requests' tokens in the iteration that was scheduled last; a decode step by its worth."""
    worth, class_of = scheduler._iterations.worth, scheduler._traffic.class_of
    cost: dict[str, float] = {}
    for name in tokens.keys() - scheduler._offline:
        part, live_class = scheduler._slice(name, tokens[name]), class_of.get(name, DEFAULT_CLASS)
        one = worth.of(1, part.context) if part.decode else part.tokens
        cost[live_class] = cost.get(live_class, 0.0) + one
    return cost
