"""Iterations in flight, and when the next one is scheduled before they are settled.

With asynchronous scheduling vLLM plans an iteration while another runs. That hides the time of planning, and it
delays an online request that arrives: the iteration that was planned without it comes first. So while offline
requests are in the engine, iterations are scheduled ahead only as long as no online request is. The first one to
arrive finds an iteration that runs, which rows leave, and one that waits, which is refused
(`preemption.arrivals`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conserve.engine.vllm.iteration import Iteration


class Ahead:
    """Iterations that were scheduled and are not settled, the oldest first."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
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

    def scheduled(self, iteration: Iteration) -> None:
        """Note an iteration."""
        if self._in_flight and self._leaves:
            iteration.overlapped = self._in_flight[-1].overlapped = True
        self._in_flight.append(iteration)

    def settled(self, iteration: Iteration) -> None:
        """Note that the outcome of an iteration, the oldest, is known."""
        self._in_flight.remove(iteration)
        self._left = bool(iteration.left)

    def waits(self) -> bool:
        """True if the iterations in flight are to be settled before the next one is scheduled."""
        if not self._in_flight:
            return False
        if not self.refusable and not (self._leaves and self._scheduler._offline):
            return False  # as vLLM does
        return self._left or not self._leaves or not self._scheduler.offline_alone

    @property
    def _leaves(self) -> bool:
        """True if rows may leave the iterations that are scheduled from now on."""
        scheduler, policy = self._scheduler, self._scheduler._policy
        plans = policy.decides and not policy.holds_offline and scheduler._iterations.model is not None
        return bool(scheduler.arrival_monitor.on and plans)
