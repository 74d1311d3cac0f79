"""The HTTP endpoint: what a server's answers mean for a row."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Completion, Url
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
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
