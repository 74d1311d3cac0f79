"""vLLM's OpenAI layer over one engine, without its server: rendering, defaults and answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from conserve.endpoints.answers import beside
from conserve.endpoints.protocol import Choice, Completion
from conserve.engine.vllm.requests.token_watch import TokenWatch
from conserve.errors import RequestRejected

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.inputs import EngineInput
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from conserve.engine.vllm.requests.preparation import Prepared


class RenderedPrompts(NamedTuple):
    """A request's prompts in the form that the engine takes."""

    conversation: Sequence[Any]
    inputs: Sequence[EngineInput]


class Serving:
    """An engine with the request handling of vLLM's server."""

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.renderers.online_renderer import OnlineRenderer

        self.llm = llm
        self.tokens = TokenWatch(llm)
        self.name = name
        models = OpenAIServingModels(llm, [BaseModelPath(name=name, model_path=llm.model_config.model)])
        # The owner of the engine writes the job, so the templates in its requests are trusted.
        chat = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "trust_request_chat_template": True,
        }
        self._renderer = OnlineRenderer(llm.model_config, llm.renderer, **chat)
        self._chat = OpenAIServingChat(llm, models, "assistant", online_renderer=self._renderer, **chat)
        self._completion = OpenAIServingCompletion(
            llm, models, online_renderer=self._renderer, request_logger=None
        )
        self.default_sampling: dict[str, Any] = self._chat.default_sampling_params

    async def render(self, request: ChatCompletionRequest | CompletionRequest) -> RenderedPrompts:
        """Apply the chat template and tokenise; raises what vLLM raises."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        if isinstance(request, ChatCompletionRequest):
            result = await self._renderer.render_chat(request)
        else:
            result = await self._renderer.render_completion(request)
        if isinstance(result, ErrorResponse):
            raise RequestRejected(result.error.message)
        if isinstance(request, ChatCompletionRequest):
            return RenderedPrompts(*result)
        return RenderedPrompts((), result)

    def max_tokens(self, request: ChatCompletionRequest | CompletionRequest, num_prompt_tokens: int) -> int:
        """Most tokens to generate, by the server's rules: the request's limit and the context length."""
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

        asked = getattr(request, "max_completion_tokens", None)
        return int(
            get_max_tokens(
                self.llm.model_config.max_model_len,
                asked if asked is not None else request.max_tokens,
                num_prompt_tokens,
                self.default_sampling,
                self._chat.override_max_tokens,
                truncate_prompt_tokens=request.truncate_prompt_tokens,
            )
        )

    async def answer(self, prepared: Prepared, outputs: Sequence[RequestOutput]) -> Completion:
        """The server's answer as a `Completion`."""
        return Completion(
            choices=await self._choices(prepared, outputs),
            prompt_tokens=sum(len(output.prompt_token_ids or ()) for output in outputs),
            completion_tokens=sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
            cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            model=self.name,
        )

    async def _choices(self, prepared: Prepared, outputs: Sequence[RequestOutput]) -> list[Choice]:
        from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = prepared.request
        tokenizer = self.llm.renderer.tokenizer
        metadata = RequestResponseMetadata(request_id="")
        if isinstance(request, ChatCompletionRequest):
            (output,) = outputs
            response = await self._chat.chat_completion_full_generator(
                request, _once(output), "", self.name, prepared.conversation, tokenizer, metadata
            )
            texts = [choice.message.content for choice in response.choices]
        else:
            if request.max_tokens is None:  # null in the body; vLLM's builder asserts that max_tokens is set
                request.max_tokens = prepared.prompts[0].params.max_tokens
            for output, prompt in zip(outputs, prepared.prompts, strict=True):
                if output.prompt is None and request.echo:
                    output.prompt = tokenizer.decode(prompt.token_ids)
            response = self._completion.request_output_to_completion_response(
                list(outputs), request, "", int(time.time()), self.name, tokenizer, metadata
            )
            texts = [choice.text for choice in response.choices]
        return [
            Choice(
                text=text or "",
                finish_reason=choice.finish_reason or "stop",
                logprobs=choice.logprobs.model_dump() if choice.logprobs is not None else None,
                beside=beside_of(choice),
            )
            for text, choice in zip(texts, response.choices, strict=True)
        ]


def beside_of(choice: Any) -> dict[str, Any]:
    """Tool calls and the refusal of one of vLLM's choices, where it has any."""
    message = getattr(choice, "message", None)
    calls = [call.model_dump() for call in getattr(message, "tool_calls", None) or ()]
    return beside(calls, getattr(message, "refusal", None))


async def _once(output: RequestOutput) -> AsyncIterator[RequestOutput]:
    yield output
