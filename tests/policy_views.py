"""Views for tests of the policies: an idle engine with one thing changed, and a latency model for mental sums."""

from collections.abc import Sequence
from typing import Any

from conserve.engine.policy.composer import Composer
from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Candidate, Slo, View
from conserve.profiles.conserve import ConServeModel

MS_PER_TOKEN = ConServeModel.of(1, 0, 0, 0, 0, 0, 0, 10)  # and 10 ms for each iteration
ROW = Candidate("row", 100, 0, restorable=99)  # 7 KV blocks, to come back from host memory
FRESH = Candidate("fresh", 100, 0)


def view_of(**changes: Any) -> View:
    """An idle engine with room for everything."""
    room = {
        "model": MS_PER_TOKEN,
        "slo": Slo(),
        "max_tokens": 2048,
        "free_slots": 50,
        "free_blocks": 1000,
        "block_tokens": 16,
    }
    return View(**{**room, **changes})


def plan_of(**changes: Any) -> Plan:
    """ConServe's plan for the view; its batch and its tokens must agree."""
    plan = Conserve().plan(view_of(**changes))
    assert plan.batch.requests == len(plan.tokens)
    assert plan.total == sum(plan.tokens.values())
    return plan


def decodes(count: int, name: str = "decode") -> list[Candidate]:
    """Running requests that need no further KV block yet."""
    return [Candidate(f"{name}{n}", 1, 20, True, 2) for n in range(count)]


def add_steps(composer: Composer, requests: Sequence[Candidate]) -> None:
    """Add decode steps of all these requests."""
    composer.add_first(composer.steps(requests), len(requests))


def fitting(composer: Composer, requests: Sequence[Candidate], limit_ms: float) -> int:
    """Number of decode steps of these requests that fit into the time."""
    return composer.fitting_decodes(composer.steps(requests), limit_ms)
