"""Iterations in flight, and when the next one is scheduled before they are settled.

With asynchronous scheduling vLLM plans an iteration while another runs. That hides the host's work between two
iterations, and it delays an online request that arrives: the iteration that was planned without it comes first.

While offline requests have the engine to themselves, iterations are long and rows may leave them. The first online
request to arrive finds an iteration that runs, which rows leave, and one that waits, which is refused
(`preemption.arrivals`). Beside online requests iterations are scheduled ahead where these want short ones
(`policy.ahead`). Nothing leaves such an iteration: at a safepoint the host would wait for the device, and read the
tokens of the iteration before only then. Where they do not, the next iteration waits for the results of the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from conserve.engine.policy.ahead import pays
from conserve.engine.vllm.iteration import Iteration
from conserve.engine.vllm.lane import is_online
from conserve.profiles.model import LatencyModel

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


class Ahead:
    """Iterations that were scheduled and are not settled, the oldest first."""

    def __init__(self, scheduler: CoServing, *, asynchronous: bool) -> None:
        # No row leaves the newest iteration, or the one that is being planned, and the next one may overlap it.
        self.beside = False
        self.count = 0  # iterations that were scheduled while another ran
        self._scheduler = scheduler
        self._asynchronous = asynchronous
        self._in_flight: list[Iteration] = []
        self._left = False  # requests left the last settled iteration: one in flight may be refused

    @property
    def refusable(self) -> bool:
        """True if requests may leave an iteration in flight, so that the next one may have to be refused."""
        return any(iteration.registers_late for iteration in self._in_flight)

    def computing(self) -> Iterator[str]:
        """Yield requests with a part of a prompt in flight whose KV blocks are registered later."""
        for iteration in self._in_flight:
            if iteration.registers_late:
                yield from (name for name, tokens in iteration.tokens.items() if tokens > 1)

    def begin(self) -> None:
        """Decide for the iteration that is to be planned whether rows may leave it, or the next one overlaps it."""
        self.beside = self._asynchronous and (not self._leaves or self._beside_online)

    def scheduled(self, iteration: Iteration) -> None:
        """Note an iteration."""
        last = self._in_flight[-1] if self._in_flight else None
        iteration.follows = last is not None and bool(last.tokens)
        iteration.cold = not iteration.follows and self._asynchronous and not iteration.registers_late
        if iteration.stamp is not None:
            self.count += iteration.ahead
        elif iteration.tokens and not iteration.registers_late:
            self.count += iteration.follows
        if last is not None and (last.registers_late or iteration.registers_late):
            iteration.overlapped = last.overlapped = True
        self._in_flight.append(iteration)

    def forget(self) -> None:
        """Wait for no iteration in flight: vLLM has finished all requests, and no results may come."""
        self._in_flight, self._left = [], False
        self._scheduler.arrival_monitor.forget_iterations()

    def settled(self, iteration: Iteration, now: float) -> None:
        """Note that the outcome of an iteration, the oldest, is known: the next one runs since its end.

        The host may read the outcome long after the end, behind the launch of the next iteration.
        """
        self._in_flight = [one for one in self._in_flight if one is not iteration]
        ended = now if iteration.ended is None else min(now, iteration.ended)
        if self._in_flight:
            self._in_flight[0].started = max(self._in_flight[0].started, ended)
        self._left = bool(iteration.left)

    def waits(self) -> bool:
        """True if the iterations in flight are to be settled before the next one is scheduled."""
        if not self._in_flight:
            return False
        # The next iteration counts on what this one encodes, which may be refused.
        if any(iteration.ahead and iteration.encodes for iteration in self._in_flight):
            return True
        if not self.refusable and not self._rows_may_leave_next:
            return False  # as vLLM does
        alone = self._leaves and self._scheduler.offline_alone  # an arrival refuses the one that waits
        return self._left or not alone

    @property
    def _rows_may_leave_next(self) -> bool:
        """True if there are rows, and they may leave the iteration that would be scheduled now."""
        return self._leaves and bool(self._scheduler.offline) and not self._beside_online

    @property
    def _beside_online(self) -> bool:
        """True if online requests are in the engine, or on their way, and want iterations scheduled ahead."""
        scheduler, model = self._scheduler, self._scheduler.iterations.model
        if not (self._asynchronous and self._leaves and scheduler.arrival_monitor.workers_read_flag):
            return False
        if model is None or scheduler.offline_alone or not pays(scheduler.slo, model):
            return False
        # A request that waits for its grammar, its KV or its input keeps rows from nothing.
        blocked = scheduler._is_blocked_waiting_status
        waits = any(not blocked(request.status) for request in scheduler.waiting.online)
        return waits or any(map(is_online, scheduler.running)) or scheduler.arrival_monitor.expects

    def rest_ms(self, now: float) -> float:
        """Time until the iterations in flight are over, by what was predicted; in ms."""
        model = self._scheduler.iterations.model
        if model is None or not self._in_flight:
            return 0.0
        took_ms = (now - self._in_flight[0].started) * 1e3
        return max(0.0, sum(self._predicted_ms(one, model) for one in self._in_flight) - took_ms)

    @staticmethod
    def _predicted_ms(iteration: Iteration, model: LatencyModel) -> float:
        if iteration.plan is not None:
            return iteration.plan.predicted_ms
        return model.predict(iteration.batch) if iteration.batch is not None else 0.0

    @property
    def _leaves(self) -> bool:
        """True if rows may leave the iterations that are scheduled from now on."""
        scheduler = self._scheduler
        traits = scheduler.planner.traits  # in a pause there are no rows to leave
        plans = traits.decides and not traits.defers_offline and scheduler.iterations.model is not None
        return bool(scheduler.arrival_monitor.enabled and plans)
