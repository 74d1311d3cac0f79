"""vLLM's V1 model runner: one batch on the host, which lasts from iteration to iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from vllm.config import CUDAGraphMode

from conserve.engine.vllm.preemption.runner import RunnerBatch, VllmRunner


class V1Runner(VllmRunner):
    """Implements `runner.Runner`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._kv_output: Any = None  # of vLLM's KV connector, for the iteration that runs
        self._keep_kv_output()

    @property
    def batch(self) -> RunnerBatch:
        runner, batch = self._runner, self._runner.input_batch
        return RunnerBatch(
            batch.req_ids, batch.req_id_to_index, runner.query_start_loc.np, batch.num_computed_tokens_cpu
        )

    def run_dummy(self, tokens: int) -> None:
        self._runner._dummy_run(tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)

    @contextlib.contextmanager
    def discarding(self, left: frozenset[str]) -> Iterator[None]:
        """Treat rows that left as vLLM treats chunks of prompts: their samples are dropped.

        Such chunks draw no random number either: vLLM would rewind their generators, which on a CPU is an error.
        """
        batch, discarded = self._runner.input_batch, self._runner.discard_request_mask.np
        for name in left:
            discarded[batch.req_id_to_index[name]] = True
        wanted = self._runner.num_prompt_logprobs
        logprobs = {name: wanted.pop(name) for name in left if name in wanted}
        unused = {index: batch.generators.pop(index) for index in list(batch.generators) if discarded[index]}
        try:
            yield
        finally:
            wanted.update(logprobs)
            batch.generators.update(unused)

    def transferred(self, scheduler_output: Any) -> Any:
        output, self._kv_output = self._kv_output, None
        return output

    def refusing(self) -> AbstractContextManager[None]:
        """Not implemented: V1's host lacks the tokens of the iteration before, so it is not scheduled ahead."""
        raise NotImplementedError

    def transferred_alone(self, scheduler_output: Any) -> Any:
        raise NotImplementedError

    def _keep_kv_output(self) -> None:
        """Keep the KV connector's output of each iteration, which vLLM's runner loses when one is abandoned."""
        asked = self._runner.maybe_get_kv_connector_output

        @contextlib.contextmanager
        def asking(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with asked(*args, **kwargs) as output:
                self._kv_output = output
                yield output

        self._runner.maybe_get_kv_connector_output = asking
