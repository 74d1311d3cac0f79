"""inspect_ai's model over the durable queue: requests of concurrent samples become rows of jobs.

Chats, tools, several answers and log probabilities go to and fro in the form of OpenAI's API, by inspect_ai's own
code for servers of that API.
"""

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import msgspec
from inspect_ai.log._samples import sample_active
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from openai.types.chat import ChatCompletion

from conserve.endpoints.protocol import Url
from conserve.errors import RequestRejected
from conserve.hosts import without_login
from conserve.nightly.harness.gathering import MOST_JOBS, Gatherer
from conserve.nightly.harness.model_access import alone, engine_flags
from conserve.nightly.harness.request_jobs import HarnessAnswer, Line, Queue

NOT_BODY = ("model", "stream", "stream_options", "extra_headers", "extra_query", "extra_body", "timeout")
"""Arguments of a call of the openai package that are no fields of its body, or that ConServe decides."""
CONNECTIONS = 1000  # samples that ask at a time, unless --max-connections says otherwise

HANDED: dict[str, Queue] = {}
"""Queues that a program hands to its models, by a token: inspect_ai logs a model's arguments."""


@contextmanager
def hand_over(queue: Queue) -> Iterator[str]:
    """Yield a token by which models ask this queue (`handed=token`)."""
    token = secrets.token_hex(4)
    HANDED[token] = queue
    try:
        yield token
    finally:
        del HANDED[token]


class ConserveAPI(OpenAICompatibleAPI):  # type: ignore[misc]
    """Provider `conserve/MODEL`.

    Arguments (`-M`): `endpoint` (or `--model-base-url`), `store`, `run`, `engine_args`, `wait`, `emulate_tools`,
    and flags of vLLM by their names.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  as inspect_ai declares it
        *,
        endpoint: str | None = None,
        store: str | None = None,
        run: str | None = None,
        wait: bool = False,
        engine_args: str = "",
        emulate_tools: bool | None = None,
        handed: str | None = None,
        jobs: int = MOST_JOBS,
        **vllm_flags: Any,
    ) -> None:
        address = endpoint or base_url
        super().__init__(
            model_name,
            # Its client of HTTP is never used.
            base_url=without_login(address or "") or "http://queue.invalid/v1",
            api_key=api_key or "unused",
            config=config,
            service="conserve",
            # An engine within the run parses no tool calls.
            emulate_tools=address is None if emulate_tools is None else emulate_tools,
            stream=False,
        )
        place: dict[str, Any] = {
            "endpoint": address,
            "store": store,
            "run": run,
            "wait": wait,
            "api_key": api_key,
        }
        flags = engine_flags(engine_args, vllm_flags)
        self._queue: Callable[[], Queue] = lambda: (
            HANDED[handed]
            if handed
            else alone("inspect", model=model_name, flags=flags, progress=False, **place)
        )
        self._jobs = jobs
        self._asked: Counter[tuple[str, str]] = Counter()

    @cached_property
    def _gatherer(self) -> Gatherer:
        """Gatherer of the requests; inspect_ai also makes models that it asks nothing."""
        return Gatherer(self._queue(), name="inspect", jobs=self._jobs)

    def max_connections(self) -> int:
        return CONNECTIONS

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Answer of one request; one that can never succeed is an output that says why."""
        try:
            return await super().generate(input, tools, tool_choice, config)
        except RequestRejected as error:
            if error.kind != "too_long":
                raise
            return ModelOutput.from_content(self.model_name, content=str(error), stop_reason="model_length")

    async def _generate_completion(self, request: dict[str, Any], config: GenerateConfig) -> ChatCompletion:
        sample = sample_active()
        body = with_seed(body_of(request), None if sample is None else sample.epoch)
        name = self._name(body)
        answer = await asyncio.wrap_future(self._gatherer.ask(Line(Url.CHAT, body, name)))
        return completion_of(answer, name, self.model_name)

    def _name(self, body: Mapping[str, Any]) -> str:
        """Name of a request: its sample and epoch, its body, and its number among equals of this execution."""
        # A later try gives it the same name, whatever the order in which samples ask.
        sample = sample_active()
        place = (sample.task, str(sample.sample.id), sample.epoch) if sample is not None else ()
        document = msgspec.json.encode([place, body], order="deterministic")
        digest = hashlib.blake2b(document, digest_size=16).hexdigest()
        execution = (sample.id if sample is not None else "", digest)
        self._asked[execution] += 1
        return f"{digest}-{self._asked[execution]}"

    async def aclose(self) -> None:
        """Wait for the requests that were taken."""
        await super().aclose()
        if "_gatherer" in vars(self):
            await asyncio.to_thread(self._gatherer.close)
            del self._gatherer

    def should_retry(self, ex: BaseException) -> bool:
        """False: the queue has tried a request again where that helps."""
        return False


def body_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Body of a request, from the arguments of a call of the openai package."""
    given = {name: value for name, value in request.items() if name not in NOT_BODY}
    body = {**given, **(request.get("extra_body") or {})}
    return {name: value for name, value in body.items() if type(value).__name__ not in ("NotGiven", "Omit")}


def with_seed(body: Mapping[str, Any], epoch: int | None) -> dict[str, Any]:
    """Body with a seed of its own in each epoch, counted from 1; without a seed epochs differ by themselves."""
    if epoch is None or not isinstance(body.get("seed"), int):
        return dict(body)
    return {**body, "seed": body["seed"] + epoch - 1}


def completion_of(answer: HarnessAnswer, name: str, model: str) -> ChatCompletion:
    """Answer as the object that the openai package makes of a server's answer."""
    choices = [choice_of(number, one) for number, one in enumerate(choices_of(answer))]
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    document = {
        "id": name,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    return ChatCompletion.model_validate(document)


def choices_of(answer: HarnessAnswer) -> Sequence[Mapping[str, Any]]:
    """All choices of an answer, as they stand in the column `choices`."""
    if answer.choices is not None:
        found: list[dict[str, Any]] = msgspec.json.decode(answer.choices)
        return found
    logprobs = None if answer.logprobs is None else msgspec.json.decode(answer.logprobs)
    return [{"text": answer.text, "finish_reason": answer.finish_reason, "logprobs": logprobs}]


def choice_of(number: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    """One choice in the form of OpenAI's API."""
    tool_calls = choice.get("tool_calls")
    message = {
        "role": "assistant",
        "content": choice.get("text"),
        "refusal": choice.get("refusal"),
        "tool_calls": tool_calls,
    }
    reason = choice.get("finish_reason") or "stop"
    return {
        "index": number,
        "finish_reason": reason if reason in ("stop", "length", "tool_calls", "content_filter") else "stop",
        "logprobs": choice.get("logprobs"),
        "message": message,
    }
