"""A plan once more, where another look at the engine would find the same: live decode steps, rows without time.

A look goes through much of the scheduler's memory, which the device's work has pushed out of the caches: 1.6 ms
on two slow cores, of a decode step of 26. Only rows lose by a plan that is repeated, a few iterations at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.request import Request

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import View
from conserve.engine.vllm.lane import is_running
from conserve.profiles.model import LatencyModel

MOST = 8  # iterations in a row without a look


class Repetition:
    """The last plan of a scheduler, as long as it holds."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._left = 0  # iterations for which the plan holds
        self._plan: Plan | None = None
        self._requests: list[Request] = []  # of the plan
        self._planned: tuple[Any, ...] = ()  # the policy and the bounds that it planned by
        self._reserved_blocks = 0

    def note(self, plan: Plan | None, view: View) -> None:
        """Note a plan that was made from a look."""
        self.forget()
        if plan is None or not self._is_of_live_steps_alone(plan, view):
            return
        self._left, self._plan = MOST, plan
        self._requests = [self._scheduler.requests[name] for name in plan.tokens]
        self._planned = (self._scheduler._planner, view.slo)
        self._reserved_blocks = view.reserved_blocks + view.kept_blocks

    def forget(self) -> None:
        """Repeat nothing until the next look, and hold no request."""
        self._left, self._plan, self._requests = 0, None, []

    def again(self, model: LatencyModel) -> Plan | None:
        """The plan with contexts that are a token longer; None if the engine has to be looked at."""
        plan = self._plan
        if plan is None or not self._left or not self._holds(plan):
            self.forget()
            return None
        self._left -= 1
        batch = plan.batch.copy()
        batch.context += batch.requests
        batch.product += batch.requests
        self._plan = replace(plan, batch=batch, predicted_ms=model.predict(batch))
        self._scheduler._reserve(self._reserved_blocks)
        return self._plan

    @property
    def _live_requests(self) -> int:
        """Number of live requests in the engine, running or not."""
        return len(self._scheduler.requests) - len(self._scheduler._offline)

    def _is_of_live_steps_alone(self, plan: Plan, view: View) -> bool:
        """True if each live request of the engine gets a decode step, and no other request anything."""
        scheduler, batch = self._scheduler, plan.batch
        if not getattr(scheduler._planner, "repeats", False) or scheduler._traffic.classified:
            return False
        if scheduler.scheduler_config.async_scheduling or plan.admitted or plan.restored or plan.evicted:
            return False
        if view.online_waited_ms or view.pushed:  # of this iteration alone: the next may be the rows' turn
            return False
        steps = bool(plan.tokens) and not batch.prefills and batch.tokens == batch.requests
        everyone = len(plan.tokens) == self._live_requests
        return steps and everyone and scheduler._offline.isdisjoint(plan.tokens)

    def _holds(self, plan: Plan) -> bool:
        """True if the live requests are the same and decode on, and no other wants anything of an iteration."""
        scheduler, requests, last = self._scheduler, self._requests, self._scheduler.last_iteration
        if last.plan is not plan or last.tokens != plan.tokens:  # others came between, or vLLM did otherwise
            return False
        if self._live_requests != len(requests):
            return False
        if scheduler.kv_holding_waiting or scheduler._grammars or scheduler._traffic.pushing.urgent:
            return False
        if scheduler._recordings.watches or self._planned != (scheduler._planner, scheduler._slo):
            return False
        blocks = len(requests) * max(1, len(scheduler.kv_groups))
        if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < blocks:
            return False
        return all(
            is_running(one) and one.num_tokens_with_spec - one.num_computed_tokens == 1 for one in requests
        )
