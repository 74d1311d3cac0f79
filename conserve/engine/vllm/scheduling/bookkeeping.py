"""Notes of what an iteration teaches, made while the next one runs: live requests would wait for them.

A look at the engine finds the latencies of all iterations. The latency model that it plans by may lack the last
one. A plan that is repeated, and a pause of rows, may go by latencies that lack it too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from conserve.engine.vllm.iteration import Iteration
from conserve.profiles.model import smallest_ms

if TYPE_CHECKING:
    from conserve.engine.vllm.scheduling.scheduler import CoServing


class Ended(NamedTuple):
    """An iteration whose results vLLM has taken in."""

    iteration: Iteration
    at: float  # monotonic seconds
    outputs: Mapping[int, Any]  # vLLM's `EngineCoreOutputs` by client


class Bookkeeping:
    """The notes that one iteration is owed at most."""

    def __init__(self, scheduler: CoServing) -> None:
        self._scheduler = scheduler
        self._unnoted: Ended | None = None
        self._unlearned: Iteration | None = None

    def end(self, iteration: Iteration, outputs: Mapping[int, Any]) -> None:
        """Note when the iteration ended, and owe the rest. The one before it has been noted."""
        at = time.monotonic()
        self._scheduler.iterations.end(iteration, at)
        self._unnoted, self._unlearned = Ended(iteration, at, outputs), iteration

    def catch_up(self) -> None:
        """Note all that is owed: latencies, and what the latency model learns."""
        self.note_latencies()
        if self._unlearned is not None:
            iteration, self._unlearned = self._unlearned, None
            self._scheduler.iterations.learn(iteration)

    def note_latencies(self) -> None:
        """Note the tokens that live requests got, and the requests that have ended."""
        if self._unnoted is None:
            return
        (iteration, at, by_client), self._unnoted = self._unnoted, None
        traffic, finished = self._scheduler.traffic, self._scheduler.finished
        rows_s = iteration.rows_s
        traffic.rows_time.note(at - iteration.took_s, at, rows_s)
        plan, model = iteration.plan, self._scheduler.iterations.model
        if plan is not None and plan.online_ms > 0 and model is not None:
            live_s = iteration.took_s - rows_s
            traffic.live_busy.note(live_s * max(0.0, 1 - smallest_ms(model) / plan.online_ms), live_s)
        for outputs in by_client.values():
            answered = [answer.request_id for answer in outputs.outputs if answer.new_token_ids]
            traffic.tokens(answered, at=at)
        for name, aborted_at in finished.items():
            traffic.finished(name, aborted_at=aborted_at)
        finished.clear()


def live_first(outputs: Mapping[int, Any], rows: Set[str]) -> None:
    """Put tokens of live requests before those of rows, in what each client gets."""
    for one in outputs.values():
        one.outputs.sort(key=lambda answer: answer.request_id in rows)
