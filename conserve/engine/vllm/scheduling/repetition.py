"""A plan once more, where another look at the engine would find the same: decode steps alone, of the same requests.

A look goes through much of the scheduler's memory, which the device's work has pushed out of the caches: 1.6 ms
on two slow cores, of a decode step of 26. Only rows lose by a plan that is repeated, a few iterations at most.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import Slo, View
from conserve.engine.vllm.lane import is_running
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing

MOST = 8  # iterations in a row without a look


class Repetition:
    """The last plan of a scheduler, as long as it holds."""

    def __init__(self, scheduler: CoServing) -> None:
        self._scheduler = scheduler
        self._left = 0  # iterations for which the plan holds
        self._plan: Plan | None = None
        self._requests: list[Request] = []  # of the plan
        self._planner: Any = None  # the policy that planned
        self._slo = Slo()  # the bounds that it planned by
        self._model: LatencyModel | None = None  # and its latency model
        self._next: Plan | None = None  # the plan to come, once it is prepared
        self._prepared = False
        self._quiet = False  # no live request was expected
        self._reserved_blocks = 0

    def note(self, plan: Plan | None, view: View) -> None:
        """Note a plan that was made from a look."""
        self.forget()
        if plan is None or not self._is_of_steps_alone(plan, view):
            return
        self._left, self._plan = MOST, plan
        self._requests = [self._scheduler.requests[name] for name in plan.tokens]
        self._planner, self._slo, self._model = self._scheduler.planner, view.slo, view.model
        self._quiet, self._reserved_blocks = view.quiet, view.set_aside_blocks

    def forget(self) -> None:
        """Repeat nothing until the next look, and hold no request: one has come or gone, or the regime changes."""
        self._left, self._plan, self._requests = 0, None, []
        self._next, self._prepared = None, False

    def prepare(self) -> None:
        """Compute the plan to come, if it is this one again: the workers compute meanwhile."""
        if self._plan is not None and self._left and self._model is not None:
            same = self._slo == self._scheduler.slo
            self._next, self._prepared = self._longer(self._plan, self._model) if same else None, True

    def again(self, model: LatencyModel) -> Plan | None:
        """The plan with contexts that are a token longer; None if the engine has to be looked at."""
        plan, again = self._plan, None
        if plan is not None and self._left and model is self._model and self._holds(plan):
            if not self._prepared:
                self.prepare()
            again = self._next
        if again is None:
            self.forget()
            return None
        self._left, self._plan, self._prepared = self._left - 1, again, False
        self._scheduler.reserve_blocks(self._reserved_blocks)
        self._scheduler.traffic.planned_quiet = self._quiet
        return again

    def _longer(self, plan: Plan, model: LatencyModel) -> Plan | None:
        """The plan with contexts that are a token longer; None if its rows have no time for that."""
        batch: Batch = plan.batch.copy()
        batch.context += batch.requests
        batch.product += batch.requests
        if plan.limit_ms is not None and plan.limit_ms < inf:
            last = Slice(1, self._requests[-1].num_computed_tokens, True)
            others = batch.copy()
            others.remove(*last)
            if not model.can_schedule(others, last, plan.limit_ms):
                return None
        predicted_ms = model.predict(batch)
        online_ms = plan.online_ms * predicted_ms / plan.predicted_ms if plan.predicted_ms else 0.0
        return replace(plan, batch=batch, predicted_ms=predicted_ms, online_ms=online_ms)

    def _is_of_steps_alone(self, plan: Plan, view: View) -> bool:
        """True if each live request of the engine gets a decode step, and rows get decode steps or nothing."""
        scheduler, batch = self._scheduler, plan.batch
        if not scheduler.planner.traits.repeats or scheduler.traffic.classified:
            return False
        if scheduler.scheduler_config.async_scheduling:
            return False
        if plan.admitted or plan.restored or plan.evicted or plan.parked:
            return False
        if view.online_waited_ms or view.pushed:  # of this iteration alone: the next may be the rows' turn
            return False
        if not plan.tokens or batch.prefills or batch.tokens != batch.requests:
            return False
        rows = scheduler.offline & plan.tokens.keys()
        return len(plan.tokens) - len(rows) == len(scheduler.requests) - len(scheduler.offline)

    def _holds(self, plan: Plan) -> bool:
        """True if the requests are the same and decode on, and no other wants anything of an iteration."""
        scheduler, requests, last = self._scheduler, self._requests, self._scheduler.last_iteration
        if last.plan is not plan or last.tokens != plan.tokens:  # others came between, or vLLM did otherwise
            return False
        if last.left or len(scheduler.kv_holding_waiting) > len(scheduler.parking.names):
            return False
        if scheduler.grammars or scheduler.traffic.pushing.urgent:
            return False
        if scheduler.recordings.watches or scheduler.planner is not self._planner:
            return False
        blocks = len(requests) * max(1, len(scheduler.kv_groups))
        kept = 0 if plan.limit_ms is None else self._reserved_blocks  # from rows, where there are any
        if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < blocks + kept:
            return False
        return all(
            is_running(one) and one.num_tokens_with_spec - one.num_computed_tokens == 1 for one in requests
        )
