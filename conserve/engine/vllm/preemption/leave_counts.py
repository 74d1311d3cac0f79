"""Counts of iterations that rows left, and of the work that was lost with them."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from conserve.engine.runtime.leavers import Lost
from conserve.engine.runtime.ranked import Ranked, quantiles
from conserve.engine.vllm.iteration import Iteration, IterationOutcome

REMEMBERED = 1000  # reaction times


@dataclass(kw_only=True)
class LeaveCounts:
    """Counts since the start, by their names in the report."""

    iterations_left: int = 0
    abandoned: int = 0  # iterations among them that all left
    rows: int = 0
    layers_run: int = 0  # before rows left
    refused: int = 0  # iterations scheduled ahead, left before anything of them was computed
    tokens_redone: int = 0
    tokens_wasted: float = 0.0
    live_tokens_recomputed: int = 0

    def __post_init__(self) -> None:
        self._reactions_ms: deque[float] = deque(maxlen=REMEMBERED)

    def left(self, iteration: Iteration, outcome: IterationOutcome) -> None:
        """Count an iteration that rows left; what they lost is counted by `lost`."""
        left = iteration.left
        offline = {request.request_id for request, _ in iteration.rows}
        self.live_tokens_recomputed += sum(iteration.tokens[name] for name in left - offline)
        self.iterations_left += 1
        self.abandoned += len(left) == len(iteration.tokens)
        self.rows += len(left)
        self.layers_run += outcome.layers_run
        self._reactions_ms.append((time.monotonic() - iteration.raised_at) * 1e3)

    def lost(self, lost: Lost) -> None:
        """Count the work that a row lost as it left, or as it was evicted later."""
        self.tokens_redone += lost.tokens
        self.tokens_wasted += lost.worth

    def report(self) -> dict[str, Any]:
        """The counts, and the time from the decision that rows leave, for JSON."""
        return {**asdict(self), "reaction_ms": quantiles(Ranked.of(self._reactions_ms))}
