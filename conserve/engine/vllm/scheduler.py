"""vLLM's scheduler, watched by a latency model and held to its predictions.

Every iteration is timed and compared with its prediction, so that the model follows the machine. With a time
limit, the iteration's token budget is what the model says fits; vLLM's own `schedule` does the rest.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from conserve.engine.policy.pacing import token_budget
from conserve.engine.vllm.pacing import Installed
from conserve.engine.vllm.warm_up import WarmUp, is_warm_up
from conserve.profiles.batch import Batch, Slice

log = logging.getLogger(__name__)
SAVE_S = 30.0  # between two saves of what was learned


class Scheduled(NamedTuple):
    """An iteration under way."""

    batch: Batch
    started: float  # monotonic seconds


class Paced:
    """Mixed into vLLM's schedulers, of which it uses what `compat.INTERNALS` lists."""

    running: list[Request]
    waiting: Any
    requests: dict[str, Request]
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    kv_cache_manager: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        installed = Installed.read(vllm_config.additional_config)
        self._model = installed.model
        self._tbt_ms = installed.tbt_ms
        self._correction_file = installed.correction_file
        self._warm_up = WarmUp() if installed.model is None else None
        self._most_tokens = self.max_num_scheduled_tokens
        self._in_flight: dict[int, Scheduled] = {}  # by id() of vLLM's SchedulerOutput
        self._ended = 0.0
        self._stalled = False
        self._save_at = time.monotonic() + SAVE_S

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as vLLM does, within the budget of tokens that fits the time."""
        if self._warm_up is not None:
            self._end_warm_up_if_over()
        started = time.monotonic()
        if self._tbt_ms is not None and self._model is not None and not self._stalled:
            # Decode steps first: a long prefill that is cut short must not keep them from their token.
            self.running.sort(key=self._is_prefilling)
            budget = max(token_budget(self._model, self._wanted(), self._tbt_ms), 1 + self.num_spec_tokens)
            self.max_num_scheduled_tokens = min(self._most_tokens, budget)
        try:
            output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = self._most_tokens
        # Some requests take all of their tokens or none; then the next iteration has no limit.
        self._stalled = not output.total_num_scheduled_tokens and bool(self.running or self.waiting)
        self._in_flight[id(output)] = Scheduled(self._batch(output), started)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        """Take the results in as vLLM does, and learn from the time they took."""
        updated = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        ended = time.monotonic()
        batch, started = self._in_flight.pop(id(scheduler_output))
        # Where batches overlap (asynchronous scheduling), one begins in earnest when the last has ended.
        ms = (ended - max(started, self._ended)) * 1e3
        self._ended = ended
        if batch.tokens:
            self._learn(batch, ms)
        if self._correction_file is not None and ended >= self._save_at:
            self._save()
        return updated

    def shutdown(self) -> None:
        """Save what was learned."""
        self._save()  # never raises
        super().shutdown()  # type: ignore[misc]

    def _learn(self, batch: Batch, ms: float) -> None:
        if self._model is not None:
            self._model.observe(batch, ms)
        elif self._warm_up is not None:
            self._warm_up.add(batch, ms)

    def _save(self) -> None:
        self._save_at = time.monotonic() + SAVE_S
        if self._model is None or self._correction_file is None:
            return
        try:
            self._model.correction.save(self._correction_file)
        except OSError as error:
            log.warning("what was learned about iteration times could not be saved: %s", error)

    def _end_warm_up_if_over(self) -> None:
        """Fit a model once somebody else's request comes, if enough was seen by then."""
        assert self._warm_up is not None
        if all(is_warm_up(name) for name in self.requests):
            return
        self._model = self._warm_up.fitted()
        if self._model is not None:
            self._warm_up = None

    def _wanted(self) -> Iterator[Slice]:
        """What the requests would compute next, in the order in which vLLM serves them."""
        for request in self.running:
            context = request.num_computed_tokens
            tokens = request.num_tokens_with_spec + request.num_output_placeholders - context
            if tokens > 0:
                yield Slice(tokens, context, not self._is_prefilling(request))
        for request in itertools.islice(self.waiting, self.max_num_running_reqs - len(self.running)):
            context = request.num_computed_tokens or self._cached_tokens(request)
            yield Slice(max(1, request.num_tokens - context), context)

    def _cached_tokens(self, request: Request) -> int:
        """How much of a waiting request's prompt is in the prefix cache."""
        return int(self.kv_cache_manager.get_computed_blocks(request)[1])

    def _is_prefilling(self, request: Request) -> bool:
        return bool(request.num_computed_tokens < request.num_prompt_tokens)

    def _batch(self, output: SchedulerOutput) -> Batch:
        """What this iteration computes; the requests' counters have moved on by it already."""
        batch = Batch()
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            context = request.num_computed_tokens - tokens
            decode = context >= request.num_prompt_tokens and tokens <= 1 + self.num_spec_tokens
            batch.add(tokens, context, decode)
        return batch


class PacedScheduler(Paced, Scheduler):  # type: ignore[misc]
    """For engines that finish one iteration before they schedule the next."""


class PacedAsyncScheduler(Paced, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule ahead."""
