"""The HTTP endpoint: what a server's answers mean for a row."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Completion, KvCache, Url
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    RequestRejected,
)

CHAT = Call(key="1", url=Url.CHAT, body={"messages": [{"role": "user", "content": "hi"}], "model": "ignored"})
BARE = Call(key="1", url=Url.COMPLETIONS, body={"prompt": "hi"})
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}

Handler = Callable[[httpx.Request], httpx.Response]


def ask(handler: Handler, call: Call = CHAT) -> Completion:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.method == "GET":
            return httpx.Response(404)
        return handler(request)

    async def go() -> Completion:
        endpoint = HttpEndpoint("http://server/v1", transport=httpx.MockTransport(serve), api_key="secret")
        await endpoint.start()
        try:
            return await endpoint.complete(call)
        finally:
            await endpoint.close()

    return asyncio.run(go())


def test_a_chat_is_sent_and_read_in_the_openai_form() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert (sent["model"], sent["stream"]) == ("served", False)
        assert request.headers["authorization"] == "Bearer secret"
        choice = {"message": {"content": "hello"}, "finish_reason": "length", "logprobs": {"content": []}}
        return httpx.Response(200, json={"choices": [choice, choice], "usage": USAGE, "model": "served"})

    answer = ask(handler)
    assert [choice.text for choice in answer.choices] == ["hello", "hello"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs == {"content": []}
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 1)


def test_a_bare_prompt_goes_to_its_own_route() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        return httpx.Response(200, json={"choices": [{"text": "hello", "finish_reason": "stop"}]})

    assert ask(handler, BARE).choices[0].text == "hello"


def answering(status: int, body: Any = None, **headers: str) -> Handler:
    return lambda _: httpx.Response(status, json=body, headers=headers)


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (answering(429, {"error": {"message": "slow down"}}), EndpointBusy),
        (answering(503), EndpointBusy),
        (answering(500), EndpointFault),
        (answering(502), EndpointUnavailable),
        (answering(504), EndpointUnavailable),
        (answering(401), EndpointUnusable),
        (answering(400, {"error": {"message": "no"}}), RequestRejected),
        (answering(200, {"choices": []}), EndpointFault),
        (answering(200, {"hello": 1}), EndpointFault),
        (answering(200, [1]), EndpointFault),
        (lambda _: httpx.Response(200, text="<html>"), EndpointFault),
    ],
)
def test_every_other_answer_is_an_error_that_says_whose_fault_it_is(
    handler: Handler, error: type[EndpointError]
) -> None:
    with pytest.raises(error):
        ask(handler)


def test_a_server_says_how_long_to_wait() -> None:
    with pytest.raises(EndpointBusy) as error:
        ask(answering(429, **{"retry-after": "7"}))
    assert error.value.retry_after_s == 7.0


def test_a_prompt_over_the_context_is_too_long() -> None:
    with pytest.raises(RequestRejected) as error:
        ask(answering(400, {"error": {"message": "This model's maximum context length is 10 tokens"}}))
    assert error.value.kind == "too_long"


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (httpx.ConnectError("refused"), EndpointUnavailable),
        (httpx.ReadTimeout("slow"), EndpointFault),
        (httpx.RemoteProtocolError("cut"), EndpointFault),
    ],
)
def test_connection_troubles_are_told_apart(raised: Exception, error: type[EndpointError]) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise raised

    with pytest.raises(error):
        ask(handler)


@pytest.mark.parametrize("models", [httpx.Response(404), httpx.Response(200, text="hello")])
def test_a_server_that_is_none_is_found_out_at_the_start(models: httpx.Response) -> None:
    endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(lambda _: models))
    with pytest.raises(EndpointUnusable):
        asyncio.run(endpoint.start())


COSERVING = {"identity": "model and weights", "max_num_seqs": 4, "offline_priority": 1000, "version": "0"}


def streamed(
    events: bytes | list[bytes], *, resume_from: list[int] | None = None, call: Call = CHAT
) -> tuple[Completion, list[list[int]], dict[str, Any]]:
    """What a co-serving server answers in these pieces, the tokens as they came, and what was sent."""
    sent: dict[str, Any] = {}
    seen: list[list[int]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path == "/v1/conserve":
            return httpx.Response(200, json=COSERVING)
        if request.method == "GET":
            return httpx.Response(200)
        sent.update(json.loads(request.content))
        return httpx.Response(200, stream=Bits([events] if isinstance(events, bytes) else events))

    async def go() -> Completion:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        assert (endpoint.identity, endpoint.capacity, endpoint.doing) == ("model and weights", 8, None)

        def on_tokens(tokens: Sequence[int]) -> None:
            seen.append(list(tokens))
            assert endpoint.in_flight.computed == len(tokens)

        try:
            asked = replace(call, resume_from=resume_from or ())
            return await endpoint.complete(asked, on_tokens)
        finally:
            assert endpoint.in_flight.computed == 0
            await endpoint.close()

    return asyncio.run(go()), seen, sent


class Bits(httpx.AsyncByteStream):
    def __init__(self, bits: list[bytes]) -> None:
        self.bits = bits

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for bit in self.bits:
            yield bit


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"model": "served", "choices": [], **fields}).encode() + b"\n\n"


def delta(text: str, token_ids: list[int], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": token_ids, "finish_reason": finish_reason}
    return event(choices=[choice])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
ANSWER = (
    ROLE + delta("héllo", [1, 2]) + delta(" you", [3], "length") + event(usage=USAGE) + b"data: [DONE]\n\n"
)


def test_a_stream_becomes_the_completion_it_is() -> None:
    answer, seen, sent = streamed(ANSWER)
    assert [choice.text for choice in answer.choices] == ["héllo you"]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 1)
    assert seen == [[1, 2], [1, 2, 3]]
    assert (sent["stream"], sent["priority"], sent["return_token_ids"]) == (True, 1000, True)
    assert "vllm_xargs" not in sent


@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=20))
@settings(max_examples=25, deadline=None)
def test_a_stream_may_be_cut_anywhere_on_its_way(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    answer, seen, _ = streamed([ANSWER[start:stop] for start, stop in pairwise(edges)])
    assert answer.choices[0].text == "héllo you"
    assert seen[-1] == [1, 2, 3]


def test_saved_tokens_go_along() -> None:
    _, _, sent = streamed(ANSWER, resume_from=[1, 2])
    assert sent["vllm_xargs"] == {"conserve_resume": [1, 2]}


def test_a_bare_prompt_is_streamed_too() -> None:
    choice = {"index": 0, "text": "hello", "token_ids": [1], "finish_reason": "stop"}
    answer, seen, _ = streamed(event(choices=[choice]) + event(usage=USAGE) + b"data: [DONE]\n\n", call=BARE)
    assert (answer.choices[0].text, seen) == ("hello", [[1]])


def failed(code: int, message: str = "no") -> bytes:
    return ROLE + event(error={"message": message, "type": "x", "code": code}) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (failed(400), RequestRejected),
        (failed(500), EndpointFault),
        (failed(503), EndpointBusy),
        (failed(500, "EngineCore encountered an issue. See stack trace (above)"), EngineDied),
        (ROLE + delta("half", [1]), EndpointUnavailable),
        (ROLE + delta("half", [1], "abort") + event(usage=USAGE) + b"data: [DONE]\n\n", EndpointUnavailable),
        (b"data: {nonsense\n\n", EndpointFault),
        (b"data: []\n\n", EndpointFault),
        (event(choices=[{"index": 1, "delta": {}}]), EndpointFault),
    ],
)
def test_a_stream_that_goes_wrong_says_whose_fault_it_is(events: bytes, error: type[EndpointError]) -> None:
    with pytest.raises(error):
        streamed(events)


def test_a_model_that_is_not_served_is_no_rows_fault() -> None:
    with pytest.raises(EndpointUnusable, match="--model"):
        ask(answering(404, {"error": {"message": "The model `x` does not exist."}}))


def test_an_answer_that_the_server_gave_up_is_none() -> None:
    choice = {"message": {"content": "hal"}, "finish_reason": "abort"}
    with pytest.raises(EndpointUnavailable):
        ask(answering(200, {"choices": [choice]}))


def test_a_call_made_for_another_server_goes_back() -> None:
    with pytest.raises(EndpointUnavailable, match="something else"):
        ask(answering(200), Call(key="1", url=Url.CHAT, body={}, identity="another"))


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_in_trouble_is_not_taken_for_one_that_does_not_coserve(status: int) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        ok = request.url.path == "/v1/models"
        return httpx.Response(200 if ok else status, json={"data": [{"id": "served"}]})

    endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
    with pytest.raises(EndpointUnusable, match=str(status)):
        asyncio.run(endpoint.start())


@pytest.mark.parametrize(
    ("page", "kv_cache"),
    [
        (
            '{block_size="128",cache_dtype="auto",num_gpu_blocks="3072"} 1.0',
            KvCache(block_tokens=128, num_blocks=3072),
        ),
        ('{block_size="32",num_gpu_blocks="None"} 1.0', KvCache(block_tokens=32)),
        ("", KvCache()),
    ],
)
def test_vllms_metrics_tell_how_it_caches(page: str, kv_cache: KvCache) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            told = f"vllm:cache_config_info{page}\n" if page else ""
            return httpx.Response(200, text=f"vllm:num_requests_waiting 0\n{told}")
        if request.url.path == "/v1/conserve":
            return httpx.Response(404)
        return httpx.Response(200, json={"data": [{"id": "served"}]})

    async def go() -> KvCache:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        await endpoint.close()
        return endpoint.kv_cache

    assert asyncio.run(go()) == kv_cache
