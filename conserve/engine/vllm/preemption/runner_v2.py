"""vLLM's V2 model runner: a batch made anew for each iteration, and counters on the device.

The counters move when an iteration is sampled, by what `sample` returns: the tokens of the chunk less the rejected
ones. So all tokens of a row that left are rejected, and none is sampled. That is written on the device without
reading from it, so the host does not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from conserve.engine.vllm.preemption.runner import RunnerBatch, VllmRunner
from conserve.engine.vllm.preemption.safepoints import Abandoned


class V2Runner(VllmRunner):
    """Implements `runner.Runner`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._batch: RunnerBatch | None = None
        self._left: frozenset[str] = frozenset()  # rows that get no token of the sampling under way
        self._refusing = False
        self._note_batches()
        self._reject_rows_that_left()

    @property
    def batch(self) -> RunnerBatch:
        assert self._batch is not None
        return self._batch

    def run_dummy(self, tokens: int) -> None:
        self._runner._dummy_run(tokens, skip_attn=True, is_profile=True, skip_eplb=True)

    @contextlib.contextmanager
    def discarding(self, left: frozenset[str]) -> Iterator[None]:
        """Random numbers need no care: they follow from a request's seed and the token's position."""
        asked = self._runner.prompt_logprobs_worker
        slots = [self._runner.req_states.req_id_to_index[name] for name in left]
        wanted = asked.uses_prompt_logprobs[slots]
        scored = getattr(asked, "token_id_scores", {})
        scores = {name: scored.pop(name) for name in left if name in scored}
        asked.uses_prompt_logprobs[slots] = False
        self._left = left
        try:
            yield
        finally:
            self._left = frozenset()
            asked.uses_prompt_logprobs[slots] = wanted
            scored.update(scores)

    def transferred(self, scheduler_output: Any) -> Any:
        return self._runner.kv_connector.post_forward(scheduler_output.finished_req_ids)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        self._refusing = True
        try:
            yield
        finally:
            self._refusing = False

    def transferred_alone(self, scheduler_output: Any) -> Any:
        return self._runner.kv_connector.no_forward(scheduler_output).kv_connector_output

    def _note_batches(self) -> None:
        prepare = self._runner.prepare_inputs

        def preparing(*args: Any, **kwargs: Any) -> Any:
            if self._refusing:
                raise Abandoned
            made = prepare(*args, **kwargs)
            places = {name: place for place, name in enumerate(made.req_ids)}
            self._batch = RunnerBatch(
                made.req_ids, places, made.query_start_loc_np, made.num_computed_tokens_np
            )
            return made

        self._runner.prepare_inputs = preparing

    def _reject_rows_that_left(self) -> None:
        sample = self._runner.sample

        def sampling(
            hidden: torch.Tensor, batch: Any, grammar: Any
        ) -> tuple[Any, torch.Tensor, torch.Tensor]:
            output, sampled, rejected = sample(hidden, batch, grammar)
            if self._left:
                gone = np.fromiter((name in self._left for name in batch.req_ids), np.bool_, batch.num_reqs)
                reject(
                    async_tensor_h2d(gone, device=sampled.device), batch.query_start_loc, sampled, rejected
                )
            return output, sampled, rejected

        self._runner.sample = sampling


def reject(gone: torch.Tensor, starts: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor) -> None:
    """Reject the whole chunks of requests that are gone, in place; all but `starts` are (requests,)."""
    sampled.masked_fill_(gone, 0)
    rejected.copy_(torch.where(gone, starts.diff()[: len(gone)], rejected))
