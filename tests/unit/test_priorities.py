"""All parts of a request reach the engine with its priority: beams, and turns after a server-side tool."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from conserve.engine.policy.view import OFFLINE_PRIORITY
from conserve.engine.vllm.server import plugin
from conserve.engine.vllm.server.privileges import CALLER, Caller, Role
from tests.installed import needs

pytestmark = [
    needs("vllm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROMPT: Any = {"type": "token", "prompt_token_ids": [1, 2]}
TIERS = [({}, 0), ({"priority": 3}, 3), ({"service_tier": "flex"}, OFFLINE_PRIORITY)]


class Engine:
    """vLLM's front end, which notes the priority of all that is sent to the engine and aborts it."""

    model_config = SimpleNamespace(max_model_len=100)
    input_processor = SimpleNamespace(
        resolve_watermarking=lambda params: None, vllm_config=None, generation_config_fields={}
    )

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def generate(self, *args: Any, **rest: Any) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.generate(self, *args, **rest)  # type: ignore[arg-type]


def noting(engine: Engine, prompt: Any, params: Any, request_id: str, *, priority: int = 0, **_: Any) -> Any:
    """Stands for `AsyncLLM.generate` below the hooks."""

    async def outputs() -> AsyncIterator[Any]:
        engine.priorities.append(priority)
        yield SimpleNamespace(metrics=None, outputs=[SimpleNamespace(finish_reason="abort")])

    return outputs()


async def search_beams(engine: Engine, **fields: Any) -> None:
    """Search beams as vLLM's serving class does for a client's chat."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.sampling_params import BeamSearchParams

    CALLER.set(Caller(role=Role.CLIENT))
    tokenizer = SimpleNamespace(eos_token_id=0, decode=lambda tokens, **_: "")
    serving: Any = SimpleNamespace(
        renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer), engine_client=engine
    )
    messages: Any = [{"role": "user", "content": "hi"}]
    request = ChatCompletionRequest(model="m", messages=messages, use_beam_search=True, n=2, **fields)
    GenerateBaseServing._get_session_id(request, None)
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    rest: dict[str, Any] = {}
    if "priority" in inspect.signature(BeamSearchOnlineMixin.beam_search).parameters:  # from vLLM 0.33 on
        rest["priority"] = GenerateBaseServing._get_priority(request, None)
    async for _ in BeamSearchOnlineMixin.beam_search(serving, PROMPT, "1", params, **rest):
        pass


class Turns:
    """A conversation in which the model asks for a server-side tool `calls` times."""

    def __init__(self, calls: int) -> None:
        self._calls = calls

    def append_output(self, output: Any) -> None: ...

    append_tool_output = append_output

    def need_builtin_tool_call(self) -> bool:
        self._calls -= 1
        return self._calls >= 0

    async def call_tool(self) -> list[Any]:
        return []


async def answer_with_tools(engine: Engine, turns: Any, **fields: Any) -> None:
    """Answer a client's request on `/v1/responses` as vLLM's serving class does."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.sampling_params import SamplingParams

    CALLER.set(Caller(role=Role.CLIENT))
    serving: Any = SimpleNamespace(
        model_config=engine.model_config, engine_client=engine, _log_inputs=lambda *_, **__: None
    )
    request = ResponsesRequest(model="m", input="hi", **fields)
    GenerateBaseServing._get_session_id(request, None)
    priority = GenerateBaseServing._get_priority(request, None)
    async for _ in OpenAIServingResponses._generate_with_builtin_tools(
        serving, "1", PROMPT, SamplingParams(), turns, priority=priority
    ):
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine behind the plug-in's hooks, asked by a client without privileges."""
    yield from hooked(noting)


@pytest.fixture
def traced_engine() -> Iterator[Engine]:
    """An engine whose method an agent had wrapped before the hooks were set, asked by such a client."""
    yield from hooked(traced(noting))


def traced(generate: Any) -> Any:
    """Wrap `AsyncLLM.generate` as a tracing agent does."""

    @functools.wraps(generate)
    def wrapped(*args: Any, **rest: Any) -> Any:
        return generate(*args, **rest)

    return wrapped


def hooked(generate: Any) -> Iterator[Engine]:
    """Set the hooks around this method, and take them back."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.v1.engine.async_llm import AsyncLLM

    kept = {
        name: staticmethod(getattr(GenerateBaseServing, name))
        for name in ("_get_priority", "_get_session_id")
    }
    with (
        mock.patch.object(AsyncLLM, "generate", generate),
        mock.patch.object(AsyncLLM, "encode", AsyncLLM.encode),
        mock.patch.multiple(GenerateBaseServing, **kept),
    ):
        plugin.hook_server()
        yield Engine()


@pytest.mark.parametrize(("fields", "priority"), TIERS)
def test_beams_have_the_priority_of_their_request(
    engine: Engine, fields: dict[str, Any], priority: int
) -> None:
    asyncio.run(search_beams(engine, **fields))
    assert engine.priorities == [priority]


@pytest.mark.parametrize(("fields", "priority"), TIERS)
def test_turns_after_a_tool_keep_the_priority_of_their_request(
    engine: Engine, fields: dict[str, Any], priority: int
) -> None:
    asyncio.run(answer_with_tools(engine, Turns(2), **fields))
    assert engine.priorities == [priority] * 3


def test_beams_of_a_request_that_asks_for_more_than_it_may_are_refused(engine: Engine) -> None:
    with pytest.raises(Exception, match="wants the harvester's key"):
        asyncio.run(search_beams(engine, priority=-1))
    assert engine.priorities == []


async def generate(engine: Engine, **rest: Any) -> None:
    """Generate by keywords, as vLLM's `/v1/realtime` does."""
    from vllm.sampling_params import SamplingParams

    CALLER.set(Caller(role=Role.CLIENT))
    async for _ in engine.generate(prompt=PROMPT, sampling_params=SamplingParams(), request_id="1", **rest):
        pass


def test_the_hooks_take_vllms_keywords(engine: Engine) -> None:
    asyncio.run(generate(engine))
    assert engine.priorities == [0]


def test_an_agent_that_wraps_vllms_method_takes_no_check_away(traced_engine: Engine) -> None:
    with pytest.raises(Exception, match="wants the harvester's key"):
        asyncio.run(generate(traced_engine, priority=-1))
    assert traced_engine.priorities == []


def test_the_hooks_are_set_once_also_beneath_an_agents_wrapper(engine: Engine) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    with mock.patch.object(AsyncLLM, "generate", traced(AsyncLLM.generate)):
        before = AsyncLLM.generate
        plugin.hook_server()
        assert AsyncLLM.generate is before
