"""An answer continued from saved tokens, equal to one that was never interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from conserve.engine.vllm.requests.preparation import Prompt


class Continuation:
    """One answer, put together from saved and new tokens.

    The engine gets the saved tokens as part of the prompt and no stop strings. Text, stop strings and the finish
    reason come from vLLM's own detokeniser, which gets every token in turn under the original parameters. So
    whatever straddles the cut (a character of several tokens, a stop string) is seen whole.
    """

    def __init__(self, prompt: Prompt, saved: Sequence[int], llm: AsyncLLM) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self._prompt = prompt
        self._context = llm.model_config.max_model_len
        self._params = _with_model_stops(prompt.params, llm)
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            llm.renderer.tokenizer,
            EngineCoreRequest(
                request_id="",
                prompt_token_ids=prompt.token_ids,
                mm_features=None,
                sampling_params=self._params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
        )
        self._num_tokens = len(prompt.token_ids)  # of prompt and output
        self.cached_tokens = 0
        self._told = 0  # tokens given out in deltas
        self.finish_reason: str | None = None
        self.extend(saved)

    @property
    def token_ids(self) -> list[int]:
        """Every output token so far."""
        return list(self._detokenizer.output_token_ids)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the next tokens; tokens past the end of the answer are dropped."""
        for token in tokens:
            if self.finish_reason is None:
                self._append(token)

    def rest(self) -> tuple[EngineInput, SamplingParams]:
        """Prompt and parameters for the rest of the answer; only while it is unfinished."""
        from vllm.sampling_params import RequestOutputKind

        token_ids = self.token_ids
        params = self._prompt.params.clone()
        params.max_tokens -= len(token_ids)
        params.min_tokens = max(0, params.min_tokens - len(token_ids))
        params.stop, params.detokenize = [], False
        params.output_kind = RequestOutputKind.DELTA
        if self._prompt.params.stop:  # looked for here: tokens behind one would be computed for nothing
            params.stream_interval = None
        prompt = {
            **self._prompt.engine_input,
            "prompt_token_ids": [*self._prompt.token_ids, *token_ids],
        }
        return prompt, params

    def output(self) -> RequestOutput:
        """The finished answer, as the engine would have given it."""
        text = self._detokenizer.get_next_output_text(finished=True, delta=False)
        return self._output(text, self.token_ids)

    def delta(self) -> RequestOutput:
        """The output since the last delta."""
        token_ids = self.token_ids
        new, self._told = token_ids[self._told :], len(token_ids)
        finished = self.finish_reason is not None
        return self._output(self._detokenizer.get_next_output_text(finished=finished, delta=True), new)

    def _output(self, text: str, token_ids: list[int]) -> RequestOutput:
        from vllm.outputs import CompletionOutput, RequestOutput

        answer = CompletionOutput(
            index=0,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=self.finish_reason,
        )
        prompt_ids = self._prompt.token_ids
        return RequestOutput(
            request_id="",
            prompt=None,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=None,
            outputs=[answer],
            finished=self.finish_reason is not None,
            num_cached_tokens=min(self.cached_tokens, len(prompt_ids)),
        )

    def _append(self, token: int) -> None:
        self._num_tokens += 1
        reason = self._engine_reason(token)
        if self._detokenizer.update([token], reason == "stop"):
            reason = "stop"  # a stop string
        self.finish_reason = reason

    def _engine_reason(self, token: int) -> str | None:
        """The engine's finish reason after a token, checked in the order of vllm.v1.core.sched.utils.check_stop."""
        params = self._params
        if token == params.eos_token_id or token in (params.stop_token_ids or ()):
            return "stop"
        num_output = self._num_tokens - len(self._prompt.token_ids)
        if self._num_tokens >= self._context or num_output >= params.max_tokens:
            return "length"
        return None


async def continued(
    llm: AsyncLLM,
    prompt: Prompt,
    saved: Sequence[int],
    generate: Callable[[EngineInput, SamplingParams], AsyncGenerator[RequestOutput, None]],
) -> AsyncIterator[Continuation]:
    """Yield the answer as it grows from its saved tokens; the engine is not used if they end it."""
    answer = Continuation(prompt, saved, llm)
    yield answer
    if answer.finish_reason is not None:
        return
    generating = generate(*answer.rest())
    async with contextlib.aclosing(generating):  # closing withdraws a request that a stop string has ended
        async for output in generating:
            (new,) = output.outputs
            answer.extend(new.token_ids)
            answer.cached_tokens = output.num_cached_tokens or 0
            answer.finish_reason = answer.finish_reason or new.finish_reason
            yield answer
            if answer.finish_reason is not None:
                return


def why_not(saved: object, prompt: object, params: SamplingParams, vocabulary: int) -> str | None:
    """Reason that a generation with these parameters cannot continue from saved tokens; None if it can.

    `resumable` in endpoints/protocol.py decides the same for request bodies, and explains it.
    """
    if not isinstance(saved, list) or not all(type(token) is int for token in saved):
        return "it takes the token ids of one answer"
    if not all(0 <= token < vocabulary for token in saved):
        return f"a token id is not one of this model's {vocabulary:,}"
    if not isinstance(prompt, dict) or not prompt.get("prompt_token_ids"):
        return "the prompt has no token ids"
    lost = {
        "several choices": params.n != 1,
        "logprobs": any(
            (params.logprobs is not None, params.prompt_logprobs is not None, params.logprob_token_ids)
        ),
        "structured output": params.structured_outputs is not None,
        "presence and frequency penalties": bool(params.presence_penalty or params.frequency_penalty),
        "bad words": bool(params.bad_words),
        "a thinking budget": params.thinking_token_budget is not None,
        "repetition detection": params.repetition_detection is not None,
        "a seed, unless the temperature is 0": params.seed is not None and params.temperature > 0,
    }
    found = next((name for name, asked in lost.items() if asked), None)
    return None if found is None else f"an answer with {found} cannot go on from saved tokens"


def _with_model_stops(params: SamplingParams, llm: AsyncLLM) -> SamplingParams:
    """The parameters as the engine completes them on arrival: the model's own end tokens stop too."""
    params = params.clone()
    params.update_from_generation_config(
        llm.input_processor.generation_config_fields, llm.renderer.get_eos_token_id()
    )
    return params
