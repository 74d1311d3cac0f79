"""The workers' answer on vLLM's outputs, whichever model runner makes them and whenever they are read.

The V1 runner returns results. The V2 runner returns a promise of results that are still on the device, and so does
the V1 runner if iterations are scheduled ahead. vLLM reads such a promise later, maybe in another thread, when the
next iteration may have run. So the promise takes the outcome and the time of its own iteration along.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from conserve.engine.runtime.stopwatch import Lap
from conserve.engine.vllm.iteration import IterationOutcome, put, put_device_time


class Promised(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A promise of vLLM's whose results bring the outcome and the time of their iteration."""

    def __init__(
        self, promise: AsyncModelRunnerOutput, outcome: IterationOutcome | None, lap: Lap | None
    ) -> None:
        self._promise, self._outcome, self._lap = promise, outcome, lap

    def get_output(self) -> Any:
        """Wait for the results as vLLM does, and attach the outcome and the time."""
        output = with_outcome(self._promise.get_output(), self._outcome)
        if output is not None and self._lap is not None:
            put_device_time(output, self._lap.time())
        return output

    def get_kv_connector_output(self) -> Any:
        """The KV connector's output, which vLLM 0.33 and later read before the results."""
        return self._promise.get_kv_connector_output()


def with_outcome(output: Any, outcome: IterationOutcome | None, lap: Lap | None = None) -> Any:
    """vLLM's output with the outcome of its iteration; None, which is no output, stays None.

    A promise takes the iteration's `lap` along too.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        return output if outcome is None and lap is None else Promised(output, outcome, lap)
    if output is None or outcome is None:
        return output
    if output is EMPTY_MODEL_RUNNER_OUTPUT:  # one object for all iterations, which would keep the outcome
        output = copy(output)
    put(output, outcome)
    return output


def nothing_sampled(requests: list[str]) -> ModelRunnerOutput:
    """The output of an iteration that sampled no token."""
    return ModelRunnerOutput(
        req_ids=requests,
        req_id_to_index={name: index for index, name in enumerate(requests)},
        sampled_token_ids=[[] for _ in requests],
    )
