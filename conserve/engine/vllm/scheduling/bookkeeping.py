"""What an iteration has taught, noted while the next one runs.

Live requests would wait for it between two iterations. A look at the engine comes after it, and so does whatever
else reads or changes the latencies and the latency model. A plan that is repeated, and a pause of rows, may go by
notes that lack the last iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from conserve.engine.vllm.iteration import Iteration


class Ended(NamedTuple):
    """An iteration whose results vLLM has taken in."""

    iteration: Iteration
    at: float  # monotonic seconds
    outputs: Mapping[int, Any]  # vLLM's `EngineCoreOutputs` by client


class Bookkeeping:
    """The notes of one iteration at most: its time, live requests' latencies, and the requests that have ended."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._owed: Ended | None = None

    def owe(self, ended: Ended) -> None:
        """Leave an iteration to be noted."""
        self.catch_up()
        self._owed = ended

    def catch_up(self) -> None:
        """Note the iteration that is owed, if one is."""
        if self._owed is None:
            return
        (iteration, at, by_client), self._owed = self._owed, None
        iterations, traffic = self._scheduler._iterations, self._scheduler._traffic
        finished: dict[str, float | None] = self._scheduler._finished
        iterations.end(iteration, at)
        traffic.rows_time.note(at - iteration.took_s, at, iteration.rows_s)
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
