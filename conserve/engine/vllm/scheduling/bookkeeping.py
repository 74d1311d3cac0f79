"""Notes of what an iteration teaches, made while the next one runs: live requests would wait for them.

A look at the engine finds the latencies of all iterations. The latency model that it plans by may lack the last
one. A plan that is repeated, and a pause of rows, may go by latencies that lack it too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import Request, RequestStatus

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
        self._ended: dict[
            str, float | None
        ] = {}  # requests whose last tokens are not noted; when they were aborted
        self.silent: set[str] = set()  # live requests that were answered, and whose client is to say more

    def ended(self, request: Request) -> None:
        """Note, with the latencies of its last tokens, that a request has ended."""
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        self._ended[request.request_id] = time.monotonic() if aborted else None
        self.silent.discard(request.request_id)

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
        traffic = self._scheduler.traffic
        rows_s = iteration.rows_s
        traffic.rows_time.note(at - iteration.took_s, at, rows_s)
        plan, model = iteration.plan, self._scheduler.iterations.model
        if plan is not None and plan.online_ms > 0 and model is not None:
            live_s = iteration.took_s - rows_s
            traffic.live_busy.note(live_s * max(0.0, 1 - smallest_ms(model) / plan.online_ms), live_s)
        for outputs in by_client.values():
            answered = [answer.request_id for answer in outputs.outputs if answer.new_token_ids]
            traffic.tokens(answered, at=at)
            self._note_silent(
                answer.request_id for answer in outputs.outputs if answer.finish_reason is not None
            )
        for name, aborted_at in self._ended.items():
            traffic.finished(name, aborted_at=aborted_at)
        self._ended.clear()

    def _note_silent(self, stopped: Iterable[str]) -> None:
        """Note requests whose prompt comes in parts, of which the last one that came is answered: none decodes."""
        for name in stopped:
            request = self._scheduler.requests.get(name)
            if request is None or request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                continue
            self._scheduler.traffic.finished(name)
            if name not in self._scheduler.offline:
                self.silent.add(name)


def live_first(outputs: Mapping[int, Any], rows: Set[str]) -> None:
    """Put tokens of live requests before those of rows, in what each client gets."""
    for one in outputs.values():
        one.outputs.sort(key=lambda answer: answer.request_id in rows)
