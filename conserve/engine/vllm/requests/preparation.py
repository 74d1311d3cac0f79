"""Turns an OpenAI request body into vLLM's request, prompt and sampling parameters, or rejects it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conserve.endpoints.protocol import Call, Url
from conserve.engine.vllm.requests.faults import row_error
from conserve.engine.vllm.requests.refused import rejection_of
from conserve.errors import EndpointError, RequestRejected

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.inputs import EngineInput
    from vllm.sampling_params import SamplingParams

    from conserve.engine.vllm.requests.answers import Serving

IGNORED = frozenset({"model", "stream", "stream_options"})  # one model, and answers in one piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One rendered prompt and its sampling parameters; a completion body may hold several."""

    engine_input: EngineInput
    params: SamplingParams

    @property
    def token_ids(self) -> list[int]:
        return list(self.engine_input.get("prompt_token_ids") or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that vLLM accepts."""

    request: ChatCompletionRequest | CompletionRequest
    conversation: Sequence[Any]  # chat only
    prompts: Sequence[Prompt]


async def prepare(call: Call, serving: Serving) -> Prepared:
    """Validate, render and tokenise on the renderer's threads; raises what `row_error` makes of a failure."""
    try:
        request = _parse(call)
        conversation, inputs = await serving.render(request)
        prompts = [_prompt(request, engine_input, serving) for engine_input in inputs]
    except EndpointError:
        raise
    except Exception as error:
        raise row_error(error) from error
    return Prepared(request=request, conversation=conversation, prompts=prompts)


def _parse(call: Call) -> ChatCompletionRequest | CompletionRequest:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    if (rejected := rejection_of(call.url, call.body)) is not None:
        raise rejected
    kind = ChatCompletionRequest if call.url is Url.CHAT else CompletionRequest
    return kind.model_validate({name: value for name, value in call.body.items() if name not in IGNORED})


def _prompt(
    request: ChatCompletionRequest | CompletionRequest, engine_input: EngineInput, serving: Serving
) -> Prompt:
    from vllm.renderers.inputs.preprocess import extract_prompt_len

    config = serving.llm.model_config
    num_tokens = extract_prompt_len(config, engine_input)
    if num_tokens >= config.max_model_len:
        raise RequestRejected(
            f"the prompt has {num_tokens} tokens, which leaves none of {config.max_model_len} for an answer",
            kind="too_long",
        )
    params = request.to_sampling_params(serving.max_tokens(request, num_tokens), serving.default_sampling)
    return Prompt(engine_input=engine_input, params=params)
