"""The HTTP endpoint: what a server's answers mean for a row."""

import asyncio
import errno
import gzip
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from conserve.endpoints.discovery import Mode, ServerFacts, discover
from conserve.endpoints.exchange import SILENT_S, AnswerLimits, open_client
from conserve.endpoints.handing import TURN_S
from conserve.endpoints.http import PIECE_TOKENS, HttpEndpoint
from conserve.endpoints.protocol import Call, Completion, KvCache, Url
from conserve.endpoints.requests import add_argument, request_body
from conserve.endpoints.window import SendingOrder
from conserve.errors import (
    AnswerTooLong,
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnavailable,
    EndpointUnusable,
    EngineDied,
    ModelUnnamed,
    RequestRejected,
    SettingsError,
)
from conserve.hosts import about_login, split_login, without_login
from tests import virtual_time
from tests.server_reports import FRONT_END

CHAT = Call(key="1", url=Url.CHAT, body={"messages": [{"role": "user", "content": "hi"}], "model": "ignored"})
BARE = Call(key="1", url=Url.COMPLETIONS, body={"prompt": "hi"})
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}

Handler = Callable[[httpx.Request], httpx.Response]


def small(request: httpx.Request) -> httpx.Response | None:
    """The answer to a small request that tells whether the server works; None for all others."""
    if request.method == "GET" or json.loads(request.content).get("max_tokens") != 1:
        return None
    return httpx.Response(200, json={"choices": [{"message": {"content": "a"}, "text": "a"}]})


def ask(handler: Handler, call: Call = CHAT, *, works: bool = True) -> Completion:
    """Answer of a server that answers rows so; one that `works` answers small requests."""

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.method == "GET":
            return httpx.Response(404)
        return (small(request) if works else None) or handler(request)

    async def go() -> Completion:
        endpoint = HttpEndpoint("http://server/v1", transport=httpx.MockTransport(serve), api_key="secret")
        await endpoint.start()
        try:
            return await endpoint.complete(call)
        finally:
            await endpoint.close()

    return asyncio.run(go())


def test_a_full_table_of_files_is_said_as_such() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        failed = httpx.ConnectError("All connection attempts failed")
        raise failed from OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(EndpointUnavailable, match=r"files and connections open at once.*ulimit -n"):
        ask(refuse)


@pytest.mark.parametrize("pushes", [True, False])
@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("url", Url)
def test_a_push_is_said_to_servers_that_take_it(pushes: bool, resumes: bool, url: Url) -> None:
    server = ServerFacts(mode=Mode.COSERVING, model="m", identity="i", most_rows=1, resumes=resumes)
    body = request_body(Call(key="1", url=url, body={"vllm_xargs": {"other": 2}}, pushes=pushes), server)
    push = {"conserve_push": 1} if pushes and resumes and url is not Url.EMBEDDINGS else {}
    assert body["vllm_xargs"] == {"other": 2, **push}


@pytest.mark.parametrize(("said", "sent"), [(None, {"a": 1}), ({"b": 2}, {"b": 2, "a": 1}), ([3], [3])])
def test_our_fields_go_beside_those_of_a_row(said: object, sent: object) -> None:
    body: dict[str, Any] = {"vllm_xargs": said}
    add_argument(body, "a", 1)
    assert body == {"vllm_xargs": sent}


def test_a_chat_is_sent_and_read_in_the_openai_form() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert (sent["model"], sent["stream"]) == ("served", False)
        assert request.headers["authorization"] == "Bearer secret"
        choice = {"message": {"content": "hello"}, "finish_reason": "length", "logprobs": {"content": []}}
        return httpx.Response(200, json={"choices": [choice, choice], "usage": USAGE, "model": "served"})

    answer = ask(handler, replace(CHAT, body={**CHAT.body, "n": 2}))
    assert [choice.text for choice in answer.choices] == ["hello", "hello"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs == {"content": []}
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 1)


def test_a_password_in_the_address_is_sent_and_shown_nowhere() -> None:
    asked: list[str | None] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("authorization"))
        assert str(request.url).startswith("http://server:8000/")
        known = request.url.path == "/v1/models"
        return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})

    async def go() -> HttpEndpoint:
        transport = httpx.MockTransport(serve)
        endpoint = HttpEndpoint("http://ann:p%40ss@server:8000/v1", transport=transport)
        await endpoint.start()
        with pytest.raises(EndpointUnusable, match="HTTP 404"):
            await endpoint.complete(BARE)
        await endpoint.close()
        return endpoint

    endpoint = asyncio.run(go())
    assert set(asked) == {httpx.BasicAuth("ann", "p@ss")._auth_header}
    assert (endpoint.base_url, endpoint.identity) == ("http://server:8000", "http://server:8000 served")
    assert "ann" not in f"{endpoint.notice}"
    with pytest.raises(SettingsError, match=r"'http://x:65536' is no address"):
        HttpEndpoint("http://ann:pass@x:65536")


@pytest.mark.parametrize(
    ("url", "shown", "login"),
    [
        ("http://ann:p%40s:s@a:1/v1?q=@", "http://a:1/v1?q=@", ("ann", "p@s:s")),
        ("https://ann@[::1]", "https://[::1]", ("ann", "")),
        ("http://a:8000/x@y", "http://a:8000/x@y", None),
        ("/models/x@y", "/models/x@y", None),
        ("http://ann:pass@[::1", "http://[::1", ("ann", "pass")),
    ],
)
def test_an_address_is_split_into_what_may_be_shown_and_the_login(
    url: str, shown: str, login: tuple[str, str] | None
) -> None:
    assert split_login(url) == (shown, login)


@pytest.mark.parametrize(
    ("text", "shown", "explained"),
    [
        ("http://ann:secret@a:1/v1", "http://a:1/v1", False),
        ("ftp://ann:secret@a", "ftp://a", False),
        ("http://a:8000/x@y", "http://a:8000/x@y", False),
        ("http://[::1]:8000/x@y", "http://[::1]:8000/x@y", False),
        ("http://a:8000", "http://a:8000", False),
        ("http://ann:se/cr#et@a:1/v1", "http://a:1/v1", True),
        ("http://ann:se?cr@et@a", "http://a", True),
        ("ann:secret@a:1", "a:1", False),
        ("ann:se://cret@a:1", "a:1", False),
    ],
)
def test_no_password_is_shown_however_the_address_is_written(text: str, shown: str, explained: bool) -> None:
    assert without_login(text) == shown
    assert bool(about_login(text)) == explained


def test_a_password_that_makes_an_address_malformed_is_not_repeated() -> None:
    with pytest.raises(
        SettingsError, match=r"'http://a:1' is no address; in a password / is written"
    ) as refused:
        HttpEndpoint("http://ann:port/cret@a:1")
    assert "port" not in str(refused.value)


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
        (answering(502), EndpointFault),
        (answering(504), EndpointUnavailable),
        (answering(401), EndpointUnusable),
        (answering(400, {"error": {"message": "no"}}), RequestRejected),
        (answering(200, {"choices": []}), EndpointFault),
        (answering(200, {"hello": 1}), EndpointFault),
        (answering(200, {"error": {"message": "slow down", "code": 429}}), EndpointBusy),
        (answering(200, {"error": {"message": "slow down", "code": "503"}}), EndpointBusy),
        (answering(200, {"error": {"message": "no", "code": 401}}), EndpointUnusable),
        (answering(200, {"error": {"message": "no", "code": 400}}), RequestRejected),
        (answering(200, {"error": {"message": "no", "code": "server_error"}}), EndpointFault),
        (answering(200, {"error": {"message": "no", "code": 200}}), EndpointFault),
        (answering(200, {"error": "no", "code": 429}), EndpointFault),
        (answering(200, {"choices": [], "error": {"message": "no", "code": 429}}), EndpointBusy),
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


COSERVING = {**FRONT_END, "identity": "served@weights"}


def streamed(
    events: bytes | list[bytes],
    *,
    resume_from: list[int] | None = None,
    call: Call = CHAT,
    then: Sequence[bytes] = (),
) -> tuple[Completion, list[list[int]], dict[str, Any]]:
    """Answer of a co-serving server in these pieces, the tokens as they came, and the bodies that were sent.

    Further requests are answered with the bodies in `then`.
    """
    bodies = [[events] if isinstance(events, bytes) else events, *([body] for body in then)]
    sent: dict[str, Any] = {}
    seen: list[list[int]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path == "/v1/conserve":
            return httpx.Response(200, json=COSERVING)
        if request.method == "GET":
            return httpx.Response(200)
        if (answer := small(request)) is not None:
            return answer
        sent.update(json.loads(request.content))
        return httpx.Response(200, stream=Bits(bodies.pop(0)))

    async def go() -> Completion:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        assert (endpoint.identity, endpoint.capacity, endpoint.doing) == ("served@weights", 8, None)

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
    assert sent["stream_interval"] == PIECE_TOKENS
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


def test_a_stream_that_would_change_the_answer_is_asked_again_in_one_piece_from_the_beginning() -> None:
    thought = event(choices=[{"index": 0, "delta": {"reasoning": "hm"}, "token_ids": [1]}])
    whole = json.dumps({"choices": [{"message": {"content": "hello"}}]}).encode()
    asked = replace(CHAT, resume_from=[1, 2])
    for bodies, resumed in (([ANSWER], 2), ([thought, whole], 0)):
        answer, _, sent = streamed(bodies[0], resume_from=[1, 2], then=bodies[1:])
        assert answer.resumed_tokens(asked) == resumed
        assert sent["stream"] is (resumed > 0)


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


def test_a_stream_that_is_cut_short_waits_only_if_it_got_further() -> None:
    with pytest.raises(EndpointFault, match="no token"):
        streamed(ROLE)
    with pytest.raises(EndpointFault, match="no token"):
        streamed(ROLE + delta("half", [1, 2]), resume_from=[1, 2])
    with pytest.raises(EndpointUnavailable):
        streamed(ROLE + delta("half", [1, 2]), resume_from=[1])


def test_a_model_that_is_not_served_is_no_rows_fault() -> None:
    with pytest.raises(EndpointUnusable, match="--model"):
        ask(answering(404, {"error": {"message": "The model `x` does not exist."}}), works=False)


CALLS = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "beside"),
    [
        ({"content": None, "tool_calls": CALLS, "refusal": None}, {"tool_calls": CALLS}),
        ({"content": None, "function_call": CALLS[0]["function"]}, {"function_call": CALLS[0]["function"]}),
        ({"content": None, "refusal": "No."}, {"refusal": "No."}),
        ({"content": "yes", "tool_calls": [], "refusal": None}, {}),
    ],
)
def test_what_is_beside_a_text_is_kept(message: dict[str, Any], beside: dict[str, Any]) -> None:
    answer = ask(answering(200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}))
    (choice,) = answer.choices
    assert (choice.text, choice.beside) == (message["content"] or "", beside)


def test_choices_come_in_the_order_of_their_index() -> None:
    choices = [{"index": n, "message": {"content": str(n)}} for n in (1, 0, 2)]
    asked = Call(key="1", url=Url.CHAT, body={"n": 3})
    assert [c.text for c in ask(answering(200, {"choices": choices}), asked).choices] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("status", "said"), [(403, "blocked by content policy"), (404, "The model lacks this")]
)
@pytest.mark.parametrize("others", [200, 401])
def test_a_refusal_is_one_rows_where_others_are_answered(status: int, said: str, others: int) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            found = request.url.path == "/v1/models"
            return httpx.Response(200 if found else 404, json={"data": [{"id": "served"}]})
        refused = json.loads(request.content).get("user") == "refused"
        return httpx.Response(status if refused else others, json={"error": {"message": said}})

    async def go() -> None:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        try:
            await endpoint.complete(Call(key="1", url=Url.CHAT, body={"messages": [], "user": "refused"}))
        finally:
            await endpoint.close()

    with pytest.raises(RequestRejected if others == 200 else EndpointUnusable):
        asyncio.run(go())


class Changeable:
    """A server that answers rows until a test changes what its routes say."""

    def __init__(self) -> None:
        self.models = httpx.Response(200, json={"data": [{"id": "served"}]})
        self.refusals: dict[str, httpx.Response] = {}  # by route
        self.probes = 0
        self.endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(self.serve))

    async def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return self.models if request.url.path == "/v1/models" else httpx.Response(404)
        asked = json.loads(request.content)
        if asked.get("max_tokens") == 1:
            self.probes += 1
            await asyncio.sleep(1.0)
        if asked.get("user") == "refused":
            return httpx.Response(403, json={"error": {"message": "blocked"}})
        if request.url.path in self.refusals:
            return self.refusals[request.url.path]
        if request.url.path == Url.EMBEDDINGS:
            return httpx.Response(200, json={"data": [{"embedding": [0.5]}]})
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}, "text": "yes"}]})

    async def ask(self, number: int = 1, *, url: Url = Url.CHAT, **body: Any) -> list[Any]:
        """Send so many rows at the same time; returns what comes of each."""
        call = Call(key="1", url=url, body=body, identity=self.endpoint.identity)
        rows = [self.endpoint.complete(call) for _ in range(number)]
        return await asyncio.gather(*rows, return_exceptions=True)


def no_such_model() -> httpx.Response:
    return httpx.Response(404, json={"error": {"message": "The model `served` does not exist."}})


def not_found(status: int = 404) -> httpx.Response:
    return httpx.Response(status, json={"detail": "Not Found"})


@pytest.mark.parametrize(
    ("models", "refusal", "error", "said"),
    [
        ("new", no_such_model(), EndpointUnavailable, "serves something else now"),
        ("served", no_such_model(), EndpointUnusable, "correct the name of the model"),
        ("served", not_found(), EndpointUnavailable, "answers no other request either: HTTP 404"),
        ("served", not_found(403), EndpointUnusable, "check CONSERVE_API_KEY"),
        (None, not_found(), EndpointUnavailable, "/v1/models answered 404"),
    ],
)
def test_a_refusal_is_no_rows_where_the_server_answers_no_others_any_more(
    models: str | None, refusal: httpx.Response, error: type[EndpointError], said: str
) -> None:
    async def go() -> None:
        server = Changeable()
        await server.endpoint.start()
        (answer,) = await server.ask()
        assert isinstance(answer, Completion)
        server.refusals[Url.CHAT] = refusal
        server.models = httpx.Response(200 if models else 404, json={"data": [{"id": models}]})
        found = await server.ask(8)
        assert {type(one) for one in found} == {error}
        assert said in str(found[0])
        assert server.probes == 1
        await server.endpoint.close()

    virtual_time.run(go())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_row_that_is_refused_by_a_server_in_trouble_waits(status: int) -> None:
    async def go() -> None:
        server = Changeable()
        await server.endpoint.start()
        server.refusals[Url.CHAT] = httpx.Response(status)
        assert [type(one) for one in await server.ask(user="refused")] == [EndpointUnavailable]
        server.refusals.clear()
        assert [type(one) for one in await server.ask(user="refused")] == [RequestRejected]
        await server.endpoint.close()

    virtual_time.run(go())


def test_a_route_that_a_server_lacks_is_its_rows_fault_where_it_answers_another() -> None:
    async def go() -> None:
        server = Changeable()
        server.refusals[Url.CHAT] = not_found()
        await server.endpoint.start()
        await server.ask(url=Url.EMBEDDINGS, input="a")
        assert [type(one) for one in await server.ask(3)] == [RequestRejected] * 3
        await server.endpoint.close()

    virtual_time.run(go())


def test_an_answer_that_the_server_gave_up_is_none() -> None:
    choice = {"message": {"content": "hal"}, "finish_reason": "abort"}
    with pytest.raises(EndpointUnavailable):
        ask(answering(200, {"choices": [choice]}))


@pytest.mark.parametrize("made_for", [{"identity": "another"}, {"model": "another"}])
def test_a_call_made_for_another_server_goes_back(made_for: dict[str, Any]) -> None:
    with pytest.raises(EndpointUnavailable, match="something else"):
        ask(answering(200), Call(key="1", url=Url.CHAT, body={}, **made_for))


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


# Bounds, in virtual time.


class Endless(httpx.AsyncByteStream):
    """A body of one chunk after the other."""

    def __init__(self, chunk: bytes, every_s: float, first: bytes = b"") -> None:
        self.chunk, self.every_s, self.first = chunk, every_s, first
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.first
        while True:
            await asyncio.sleep(self.every_s)
            self.sent += len(self.chunk)
            yield self.chunk


def bounded(
    body: Endless,
    limits: AnswerLimits,
    *,
    coserving: bool,
    status: int = 200,
    begins_s: float = 0.0,
    resume_from: Sequence[int] = (),
) -> float:
    """Ask for an answer with this body; returns the seconds until the error, which is raised on."""

    async def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path == "/v1/conserve" and coserving:
            return httpx.Response(200, json=COSERVING)
        if request.method == "GET":
            return httpx.Response(404)
        if (answer := small(request)) is not None:
            return answer
        await asyncio.sleep(begins_s)
        return httpx.Response(status, stream=body)

    async def go() -> float:
        transport = httpx.MockTransport(serve)
        endpoint = HttpEndpoint("http://server", transport=transport, limits=limits)
        await endpoint.start()
        begun = asyncio.get_running_loop().time()
        try:
            call = replace(CHAT, resume_from=resume_from)
            await endpoint.complete(call, (lambda _: None) if coserving else None)
        except EndpointError as error:
            error.add_note(str(asyncio.get_running_loop().time() - begun))
            raise
        finally:
            await endpoint.close()
        raise AssertionError("an answer without an end came to its end")

    return virtual_time.run(go())


def seconds(error: pytest.ExceptionInfo[EndpointError]) -> float:
    return float(error.value.__notes__[0])


@pytest.mark.parametrize("coserving", [True, False])
def test_an_answer_that_drips_is_a_fault_once_its_time_is_over(coserving: bool) -> None:
    body = Endless(b" ", 0.2, first=delta("a", [1]))
    with pytest.raises(EndpointFault, match=r"no whole answer within 30 s \(max_answer_s\)") as error:
        bounded(body, AnswerLimits(seconds=30.0), coserving=coserving)
    assert seconds(error) == pytest.approx(30, abs=0.1)


class Places:
    """A server with few places, in which rows wait their turn; some take longer than others."""

    def __init__(self, places: int) -> None:
        self._places, self.said = asyncio.Semaphore(places), set[str]()
        self.endpoint = HttpEndpoint(
            "http://server", transport=httpx.MockTransport(self.serve), limits=AnswerLimits(seconds=1800.0)
        )

    async def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return LISTED if request.url.path == "/v1/models" else httpx.Response(404)
        if (answer := small(request)) is None:
            async with self._places:
                await asyncio.sleep(json.loads(request.content)["seed"])
            answer = httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})
        return answer

    async def ask(self, row_s: int) -> type[object]:
        """Send a row that takes so many seconds once it has a place; returns the type of its end."""
        call = Call(key="1", url=Url.CHAT, body={"messages": [], "seed": row_s})
        try:
            return type(await self.endpoint.complete(call))
        except EndpointError as error:
            self.said.add(str(error))
            return type(error)


def test_a_row_that_waits_behind_others_in_a_servers_queue_is_not_at_fault() -> None:
    """Ollama and llama.cpp run a row at a time by default."""

    async def go() -> Counter[type[object]]:
        server = Places(1)
        await server.endpoint.start()
        found = await asyncio.gather(*(server.ask(70) for _ in range(64)))
        await server.endpoint.close()
        why = "rows that were sent before are answered: fewer at once wait less (--window N)"
        assert sum(said.endswith(why) for said in server.said) == 1
        return Counter(found)

    # The row that runs by then may be one without an end.
    assert virtual_time.run(go()) == {Completion: 25, EndpointBusy: 38, AnswerTooLong: 1}


def test_a_row_without_an_end_is_at_fault_at_a_server_that_runs_a_row_at_a_time() -> None:
    async def go() -> list[type[object]]:
        server = Places(1)
        await server.endpoint.start()
        rows = [server.ask(70), server.ask(70), server.ask(10**6), server.ask(70), server.ask(70)]
        found = await asyncio.gather(*rows)
        await server.endpoint.close()
        return found

    assert virtual_time.run(go()) == [Completion, Completion, AnswerTooLong, EndpointBusy, EndpointBusy]


def test_a_row_that_is_late_at_a_server_that_answered_later_ones_is_at_fault() -> None:
    """Whichever was answered last."""
    order = SendingOrder()
    first, late, *later = [order.send() for _ in range(22)]
    for row in (*later, first):
        order.answered(row)
    assert not order.waits(late)


@pytest.mark.parametrize("others", [0, 3])
def test_a_row_without_an_end_is_at_fault_though_rows_that_came_later_are_answered(others: int) -> None:
    async def go() -> list[type[object]]:
        server = Places(4)
        await server.endpoint.start()

        async def follow() -> list[type[object]]:
            return [await server.ask(70) for _ in range(30)]

        early = [asyncio.create_task(server.ask(60)) for _ in range(others)]
        await asyncio.sleep(1.0)
        endless = asyncio.create_task(server.ask(10**6))
        await asyncio.sleep(1.0)
        late = await asyncio.gather(*(follow() for _ in range(others)), *early)
        assert EndpointBusy not in late
        found = [await endless, await server.ask(10**6)]
        await server.endpoint.close()
        return found

    assert virtual_time.run(go()) == [AnswerTooLong, AnswerTooLong]


def test_an_answer_may_take_an_hour_unless_something_else_was_said() -> None:
    with pytest.raises(EndpointFault) as error:
        bounded(Endless(b" ", 10), AnswerLimits(), coserving=False)
    assert seconds(error) == pytest.approx(3600, abs=1)


@pytest.mark.parametrize("coserving", [True, False])
def test_an_answer_in_one_piece_may_be_silent_for_all_of_its_time(coserving: bool) -> None:
    """Its first byte comes with its last: a time-out between bytes would be a second limit."""
    waits: list[float | None] = []

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return LISTED
        if request.url.path == "/v1/conserve" and coserving:
            return httpx.Response(200, json=COSERVING)
        if request.method == "GET":
            return httpx.Response(404)
        if (answer := small(request)) is None:
            waits.append(request.extensions["timeout"]["read"])
            answer = httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})
        return answer

    async def go() -> None:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        try:
            await endpoint.complete(CHAT, None)
            if coserving:
                with suppress(EndpointError):
                    await endpoint.complete(CHAT, lambda _: None)
        finally:
            await endpoint.close()

    asyncio.run(go())
    assert waits == ([None, SILENT_S] if coserving else [None])


def test_a_row_that_waited_for_live_requests_is_not_to_blame() -> None:
    """On a server that co-serves, before anything of the answer has come."""
    for body, begins_s in ((Endless(b"\n", 1), 0.0), (Endless(b"", 1), 100.0)):
        with pytest.raises(EndpointUnavailable, match="no whole answer within 30 s") as error:
            bounded(body, AnswerLimits(seconds=30.0), coserving=True, begins_s=begins_s)
        assert seconds(error) == pytest.approx(30, abs=0.1)


@pytest.mark.parametrize(("tokens", "error"), [([1, 2], EndpointUnavailable), ([1, 2, 3], EndpointFault)])
def test_saved_tokens_that_come_back_are_no_beginning(tokens: list[int], error: type[EndpointError]) -> None:
    """A resumed row waits for live requests like any other."""
    body = Endless(b"\n", 1, first=delta("a", tokens))
    with pytest.raises(error, match="no whole answer within 30 s"):
        bounded(body, AnswerLimits(seconds=30.0), coserving=True, resume_from=[1, 2])


@pytest.mark.parametrize(
    ("begins_s", "coserving", "up", "error"),
    [
        (60.0, False, True, EndpointFault),
        (60.0, False, False, EndpointUnavailable),
        (60.0, True, True, EndpointUnavailable),
        (15.0, False, True, EndpointFault),
        (10.0, False, True, EndpointUnavailable),
    ],
)
def test_a_row_that_outlives_a_proxys_timeout_is_to_blame(
    begins_s: float, coserving: bool, up: bool, error: type[EndpointError]
) -> None:
    """Unless the server is gone, or let the row wait for live requests."""
    sent: list[str] = []

    async def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sent.append(request.url.path)
            await asyncio.sleep(begins_s)
            return httpx.Response(504, text="<html>")
        if request.url.path == "/v1/models":
            return httpx.Response(200 if up or not sent else 504, json={"data": [{"id": "served"}]})
        return httpx.Response(200, json=COSERVING if coserving else {})

    async def go() -> EndpointError:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        (found,) = await asyncio.gather(endpoint.complete(CHAT), return_exceptions=True)
        await endpoint.close()
        assert isinstance(found, EndpointError)
        return found

    found = virtual_time.run(go())
    assert isinstance(found, error)
    said = f"HTTP 504 after {begins_s:.0f} s, and the server is up: this row takes longer than a proxy in front of http://server"
    assert str(found).startswith(said if error is EndpointFault else "HTTP 504: ")


@pytest.mark.parametrize("coserving", [True, False])
@pytest.mark.parametrize("chunk", [b"x" * 10_000, b"data: {}\n" * 1_000, b"\n" * 10_000])
def test_an_answer_that_floods_is_a_fault_once_it_is_too_long(chunk: bytes, coserving: bool) -> None:
    body = Endless(chunk, 0.001)
    with pytest.raises(EndpointFault) as error:
        bounded(body, AnswerLimits(num_bytes=100_000), coserving=coserving)
    if b"{}" not in chunk or not coserving:
        assert "longer than 0.0953674 MiB (max_answer_mib)" in str(error.value)
    assert body.sent <= 100_000 + len(chunk)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP, gzip", "br", "nonsense"])
def test_a_compressed_answer_is_a_fault_before_it_is_read(encoding: str) -> None:
    body = Endless(gzip.compress(bytes(1 << 20)), 0.001)

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx.Response(200, headers={"content-encoding": encoding}, stream=body)

    with pytest.raises(EndpointFault, match=f"the body has the encoding {encoding}, and none was asked for"):
        ask(handler)
    assert body.sent == 0


def test_an_answer_may_say_that_it_is_not_compressed() -> None:
    document = {"choices": [{"message": {"content": "yes"}}]}

    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "Identity"}, json=document)

    assert ask(handler).choices[0].text == "yes"


def test_of_a_compressed_error_its_status_counts() -> None:
    body = Endless(gzip.compress(bytes(1 << 20)), 0.001)

    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(429, headers={"content-encoding": "gzip"}, stream=body)

    with pytest.raises(EndpointBusy):
        ask(handler)
    assert body.sent == 0


def test_an_answer_of_just_the_size_is_one() -> None:
    content = json.dumps({"choices": [{"message": {"content": "x" * 1000}}]}).encode()

    def size(num_bytes: int) -> str:
        async def go() -> str:
            transport = httpx.MockTransport(
                lambda r: (
                    httpx.Response(200, json={"data": [{"id": "served"}]})
                    if r.url.path == "/v1/models"
                    else httpx.Response(404 if r.method == "GET" else 200, content=content)
                )
            )
            endpoint = HttpEndpoint(
                "http://server", transport=transport, limits=AnswerLimits(num_bytes=num_bytes)
            )
            await endpoint.start()
            try:
                return (await endpoint.complete(CHAT)).choices[0].text
            finally:
                await endpoint.close()

        return asyncio.run(go())

    assert size(len(content)) == "x" * 1000
    with pytest.raises(EndpointFault, match="longer than"):
        size(len(content) - 1)


def test_an_error_without_an_end_is_the_error_that_its_status_says() -> None:
    for body in (Endless(b" ", 0.2, first=b'{"error": '), Endless(b"x" * 10_000, 0.001)):
        with pytest.raises(EndpointBusy) as error:
            bounded(body, AnswerLimits(), coserving=False, status=429)
        assert seconds(error) < 15
        assert body.sent < 100_000


def test_a_line_in_a_thousand_pieces_is_joined_once() -> None:
    """An answer of 16 MiB in one event, which takes minutes if every piece is added to those before."""
    text = "x" * (16 << 20)
    line = delta(text, [1], "stop") + event(usage=USAGE) + b"data: [DONE]\n\n"
    bits = [line[start : start + 1024] for start in range(0, len(line), 1024)]
    begun = time.process_time()
    answer, _, _ = streamed(bits)
    assert answer.choices[0].text == text
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("path", ["/v1/models", "/v1/conserve", "/health", "/metrics"])
@pytest.mark.parametrize("chunk", [b" ", b"x" * (1 << 20)])
def test_a_page_without_an_end_does_not_hold_up_the_start(path: str, chunk: bytes) -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == path:
            return httpx.Response(200, stream=Endless(chunk, 0.1))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        return httpx.Response(200, json=COSERVING if request.url.path == "/v1/conserve" else {})

    async def go() -> float:
        begun = asyncio.get_running_loop().time()
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        try:
            await endpoint.start()
        except EndpointUnusable:
            assert path != "/metrics"
        await endpoint.close()
        return asyncio.get_running_loop().time() - begun

    assert virtual_time.run(go()) <= 61


@pytest.mark.parametrize(("aged_status", "iteration_s"), [(200, 600), (503, 40)])
def test_an_endpoint_starts_at_a_server_that_is_in_a_long_iteration(
    aged_status: int, iteration_s: float
) -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path != "/v1/conserve":
            return httpx.Response(200)
        aged = "within_s" in request.url.params
        await asyncio.sleep(1 if aged else iteration_s)
        return httpx.Response(aged_status if aged else 200, json=COSERVING)

    async def go() -> str:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        await endpoint.close()
        return endpoint.identity

    assert virtual_time.run(go()) == "served@weights"


@pytest.mark.parametrize(
    ("model", "resumes", "identity"),
    [
        (None, True, "served@weights"),
        ("served", True, "served@weights"),
        ("adapter", True, "served@weights as adapter"),
        ("adapter", False, "served@weights as adapter from the beginning"),
        ("serv", True, "served@weights as serv"),
    ],
)
def test_models_of_one_server_go_on_from_no_tokens_of_each_other(
    model: str | None, resumes: bool, identity: str
) -> None:
    """An adapter has other tokens than its base, whose files alone are in the server's identity."""

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}, {"id": "adapter"}]})
        return httpx.Response(200, json={**COSERVING, "resumes": resumes})

    async def go() -> str:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve), model=model)
        await endpoint.start()
        await endpoint.close()
        return endpoint.identity

    assert virtual_time.run(go()) == identity


def test_a_server_that_stays_silent_is_named_with_the_next_step() -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/models":
            await asyncio.sleep(3600)
        return httpx.Response(200, json={"data": [{"id": "served"}]})

    async def go() -> None:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        try:
            await endpoint.start()
        finally:
            await endpoint.close()

    said = (
        r"^http://server does not answer \(no whole answer within 60 s\); .*look at its log, and try again$"
    )
    with pytest.raises(EndpointUnusable, match=said):
        virtual_time.run(go())


@pytest.mark.parametrize(
    "said",
    [
        {"identity": "x\0"},
        {"identity": ""},
        {"identity": 7},
        {"max_num_seqs": 0},
        {"max_num_seqs": -4},
        {"max_num_seqs": 10**20},
        {"offline_priority": 10**20},
    ],
)
def test_a_server_with_odd_figures_is_not_taken_for_one_that_coserves(said: dict[str, Any]) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        ours = request.url.path == "/v1/conserve"
        return httpx.Response(200 if ours else 404, json={**COSERVING, **said})

    async def go() -> int:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        await endpoint.close()
        return endpoint.capacity

    assert asyncio.run(go()) == 64


@pytest.mark.parametrize(("steady", "rows"), [(False, 1), (True, 160)])
def test_a_steady_harvester_keeps_its_rows_in_flight_on_a_stock_server(steady: bool, rows: int) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text="vllm:num_requests_waiting 9")
        return httpx.Response(404 if request.url.path == "/v1/conserve" else 200, json={})

    async def go() -> tuple[int, str]:
        endpoint = HttpEndpoint(
            "http://server",
            most_rows=160,
            considerate=True,
            steady=steady,
            transport=httpx.MockTransport(serve),
        )
        await endpoint.start()
        await endpoint.close()
        return endpoint.capacity, endpoint.notice or ""

    capacity, notice = asyncio.run(go())
    assert capacity == rows
    assert ("160 rows at once whatever its load" in notice) == steady
    assert ("at most 160 rows at once, adjusted by the time that small requests take" in notice) != steady


@pytest.mark.parametrize(
    "models",
    [{"data": [{"id": 7}]}, {"data": {}}, {"data": [7]}, {"data": [{"id": "half \ud83d"}]}, [7], 7, None],
)
def test_an_odd_list_of_models_is_none(models: object) -> None:
    reply = httpx.Response(200, content=json.dumps(models).encode())
    endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(lambda _: reply))
    with pytest.raises(EndpointUnusable, match="no OpenAI-compatible server answers"):
        asyncio.run(endpoint.start())


def first_contact(
    replies: dict[str, httpx.Response], *, breaks: bool = False, **settings: Any
) -> HttpEndpoint:
    """An endpoint that has started, of a server with these replies to GET and 404 for others.

    One that `breaks` gets a row whose connection breaks.
    """

    def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return replies.get(request.url.path, httpx.Response(404))
        if not breaks:
            return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})
        return small(request) or cut(request)

    def cut(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("cut")

    async def go() -> HttpEndpoint:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve), **settings)
        try:
            await endpoint.start()
            await endpoint.complete(CHAT)
        finally:
            await endpoint.close()
        return endpoint

    return asyncio.run(go())


LISTED = httpx.Response(200, json={"data": [{"id": "served"}]})


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_a_list_of_models_serves_the_one_that_is_named(status: int) -> None:
    lacking = {"/v1/models": httpx.Response(status)}
    endpoint = first_contact(lacking, model="named")
    assert (endpoint.model, endpoint.server.lists_models) == ("named", False)
    assert first_contact(lacking, model="named", of_jobs=True).model == "named"
    with pytest.raises(EndpointUnusable, match=f"answered {status}; check the URL"):  # it may have another
        first_contact(lacking, model="named", of_fleet=True)
    with pytest.raises(EndpointUnusable, match=f"answered {status}; check the URL .* --model names it"):
        first_contact(lacking)
    with pytest.raises(EndpointFault, match="the connection broke: cut"):  # and not: the server is gone
        first_contact(lacking, model="named", breaks=True)
    with pytest.raises(EndpointUnusable, match=r"answered 401; check the URL and CONSERVE_API_KEY$"):
        first_contact({"/v1/models": httpx.Response(401)}, model="named")


def test_a_bare_list_of_models_is_read_too() -> None:
    assert first_contact({"/v1/models": httpx.Response(200, json=[{"id": "served"}])}).model == "served"


A, B, ADAPTER = {"id": "a"}, {"id": "b"}, {"id": "lora", "parent": "a", "root": "/loras/one"}


def found_model(listed: list[dict[str, Any]], *, coserves: bool = False, **asked: Any) -> str:
    """Model of a server that lists these."""

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": listed})
        report = coserves and request.url.path in ("/v1/conserve", "/health")
        return httpx.Response(200, json=COSERVING) if report else httpx.Response(404)

    async def go() -> str:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(serve), base_url="http://server"
        ) as client:
            return (
                await discover(client, most_rows=None, considerate=False, **{"model": None, **asked})
            ).model

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("listed", "asked", "model"),
    [
        ([A], {}, "a"),
        ([A, ADAPTER], {}, "a"),
        ([ADAPTER, A], {}, "a"),
        ([ADAPTER], {}, "lora"),
        ([A | {"root": "/m"}, B | {"root": "/m"}], {}, "a"),
        ([A, B], {"model": "b"}, "b"),
        ([A, B], {"known": "b"}, "b"),
        ([A, B], {"of_fleet": True}, "a"),
        ([A, B], {"of_fleet": True, "model": "c"}, "a"),
        ([A, B], {"of_jobs": True, "model": "b"}, "b"),
        ([A, B], {"of_jobs": True, "model": "c"}, "a"),
        ([A, B], {"coserves": True}, "a"),
    ],
)
def test_the_model_of_a_server_is_the_one_that_is_named_or_its_only_one(
    listed: list[dict[str, Any]], asked: dict[str, Any], model: str
) -> None:
    """Adapters, and several names of the same files, are no other models."""
    assert found_model(listed, **asked) == model


def test_of_several_models_one_must_be_named() -> None:
    named = r"http://server serves 2 models \(a, b\); name the one that answers by --model or CONSERVE_MODEL"
    for asked in ({}, {"known": "c"}):
        with pytest.raises(ModelUnnamed, match=named):
            found_model([A, B, ADAPTER], **asked)
    with pytest.raises(ModelUnnamed, match=r"serves 83 models \(m0, m1, m2, m3, m4, \.\.\.\)"):
        found_model([{"id": f"m{n}", "root": None} for n in range(83)])


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_server_in_trouble_is_waited_for_and_its_key_is_not_suspected(status: int) -> None:
    with pytest.raises(EndpointUnusable, match=rf"/v1/models answered {status}; wait and try again$"):
        first_contact({"/v1/models": httpx.Response(status)}, model="named")


def test_a_server_that_does_not_implement_the_report_is_no_server_in_trouble() -> None:
    endpoint = first_contact({"/v1/models": LISTED, "/v1/conserve": httpx.Response(501)})
    assert endpoint.model == "served"
    for status in (429, 500, 529):  # a co-serving server may answer so, and is no plain one
        with pytest.raises(EndpointUnusable, match=f"/v1/conserve answered {status}; wait and try again"):
            first_contact({"/v1/models": LISTED, "/v1/conserve": httpx.Response(status)})


@pytest.mark.parametrize("rest", ["?api-version=secret", "/v1?key=secret", "/v1/#secret"])
def test_an_address_with_a_query_is_refused_and_the_query_is_not_shown(rest: str) -> None:
    with pytest.raises(SettingsError, match="query or fragment, which no request carries") as refused:
        HttpEndpoint(f"http://ann:p%40ss@server{rest}")
    assert "secret" not in str(refused.value)
    assert "ss@" not in str(refused.value)


def test_a_redirect_is_said_at_the_start() -> None:
    where = {"location": "https://other/v1/models"}
    endpoint = HttpEndpoint(
        "http://server", transport=httpx.MockTransport(lambda _: httpx.Response(308, headers=where))
    )
    with pytest.raises(
        EndpointUnusable, match=r"redirect to https://other/v1/models.*--endpoint https://other"
    ):
        asyncio.run(endpoint.start())


def test_a_redirect_of_a_request_is_no_rows_fault() -> None:
    with pytest.raises(EndpointUnusable, match="http://server/v1/chat/completions answers with HTTP 307"):
        ask(answering(307, location="https://other/v1/chat/completions"))


def refuse_certificate(_: httpx.Request) -> httpx.Response:
    refused = ssl.SSLCertVerificationError(1, "refused")
    refused.verify_message = "certificate has expired"
    raise httpx.ConnectError("refused") from refused


def test_a_certificate_that_is_refused_is_no_rows_fault() -> None:
    with pytest.raises(EndpointUnusable, match="certificate has expired"):
        ask(refuse_certificate)
    endpoint = HttpEndpoint("https://server", transport=httpx.MockTransport(refuse_certificate))
    with pytest.raises(EndpointUnusable, match=r"https://server is refused \(certificate has expired\)"):
        asyncio.run(endpoint.start())


@pytest.mark.parametrize("url", ["http://[::1", "http://x:port", "http://\ud83d", "http://x:65536"])
def test_what_is_no_address_is_said_in_a_sentence(url: str) -> None:
    with pytest.raises(SettingsError, match="is no address"):
        HttpEndpoint(url)


def test_a_key_that_no_header_carries_is_said_in_a_sentence() -> None:
    with pytest.raises(SettingsError, match="CONSERVE_API_KEY"):
        HttpEndpoint("http://server", api_key="schlüssel ✓")


class Slices(httpx.AsyncByteStream):
    """A body in slices, between which the others' come."""

    def __init__(self, content: bytes, size: int) -> None:
        self._slices = [content[at : at + size] for at in range(0, len(content), size)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for one in self._slices:
            await asyncio.sleep(1.0)
            yield one


def test_answers_under_way_share_the_memory() -> None:
    """Answers that find no room give way to others, and come when they are sent again."""
    text = "x" * 900
    content = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
    content = content.ljust(1000)

    async def go() -> tuple[list[Any], list[Any]]:
        def serve(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "served"}]})
            if request.method == "GET":
                return httpx.Response(404)
            return httpx.Response(200, stream=Slices(content, 100))

        limits = AnswerLimits(num_bytes=1000, all_bytes=2500)
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve), limits=limits)
        await endpoint.start()
        first = await asyncio.gather(*(endpoint.complete(CHAT) for _ in range(5)), return_exceptions=True)
        then = await asyncio.gather(*(endpoint.complete(CHAT) for _ in range(2)), return_exceptions=True)
        await endpoint.close()
        return first, then

    first, then = virtual_time.run(go())
    busy = [one for one in first if isinstance(one, EndpointBusy)]
    assert len(busy) == 3
    assert "longer than 0.00238419 MiB (max_answers_mib) together" in str(busy[0])
    answers = [one.choices[0].text for one in (*first, *then) if not isinstance(one, EndpointBusy)]
    assert answers == [text] * 4


@pytest.mark.parametrize(
    ("coserving", "streamed", "most"), [(True, True, 1), (True, False, 8), (False, True, 8)]
)
def test_streamed_rows_are_handed_one_at_a_time_to_servers_with_live_requests_of_ours(
    coserving: bool, streamed: bool, most: int
) -> None:
    at_once, largest = 0, 0

    async def serve(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, largest
        if request.method == "GET":
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "served"}]})
            known = request.url.path == "/v1/conserve" and coserving
            return httpx.Response(200, json=COSERVING if known else {})
        if (answer := small(request)) is not None:
            return answer
        at_once += 1
        largest = max(largest, at_once)
        await asyncio.sleep(TURN_S / 5)
        at_once -= 1
        return httpx.Response(400, json={"error": {"message": "enough", "code": 400}})

    async def go() -> None:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve), most_rows=64)
        await endpoint.start()
        on_tokens = (lambda _: None) if streamed else None
        try:
            await asyncio.gather(
                *(endpoint.complete(CHAT, on_tokens) for _ in range(8)), return_exceptions=True
            )
        finally:
            await endpoint.close()

    virtual_time.run(go())
    assert largest == most


@pytest.mark.parametrize(
    ("said", "others", "error"),
    [
        ("API key expired. Please renew the API key.", "too", EndpointUnusable),
        ("Invalid model: served", "too", EndpointUnusable),
        ("The model `served` does not exist", "too", EndpointUnusable),
        ("API key expired", "answered", RequestRejected),  # a row that quotes it
        ("API key expired", "otherwise", RequestRejected),
        ("API key expired", "not at all", EndpointUnavailable),
        ("This model's maximum context length is 8 tokens", "too", RequestRejected),
        ("the model does not support images", "too", RequestRejected),
    ],
)
def test_a_key_or_a_model_that_a_400_names_is_the_rows_fault_unless_small_requests_have_it_too(
    said: str, others: str, error: type[EndpointError]
) -> None:
    refused = httpx.Response(400, json={"error": {"message": said}})
    small = {"too": refused, "answered": None, "otherwise": httpx.Response(400, text="too small")}

    async def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            known = request.url.path == "/v1/models"
            return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})
        if json.loads(request.content).get("max_tokens") != 1:
            return refused
        if others == "not at all":
            raise httpx.ConnectError("gone")
        return small[others] or httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    async def go() -> None:
        endpoint = HttpEndpoint("http://server", transport=httpx.MockTransport(serve))
        await endpoint.start()
        try:
            await endpoint.complete(Call(key="1", url=Url.CHAT, body={"messages": []}))
        finally:
            await endpoint.close()

    with pytest.raises(error):
        asyncio.run(go())


def test_a_key_is_sent_without_the_blanks_around_it_and_shown_in_no_message() -> None:
    endpoint = HttpEndpoint("http://server", api_key=" sk-secret\n")
    assert endpoint._client.headers["Authorization"] == "Bearer sk-secret"
    with pytest.raises(SettingsError) as raised:
        HttpEndpoint("http://server", api_key="sk-se\ncret")
    assert "sk-se" not in str(raised.value)


def test_connections_to_a_machine_that_is_gone_are_found_out() -> None:
    """By the system, which asks for a sign of life."""
    found: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def go() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = open_client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
        async with client.stream("GET", "/") as answer:
            socket_ = answer.extensions["network_stream"].get_extra_info("socket")
            found.append(socket_.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
            await answer.aread()
        await client.aclose()
        server.close()
        await server.wait_closed()

    asyncio.run(go())
    assert found == [1]


def test_a_connection_is_used_no_more_when_vllm_is_about_to_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM ends connections after 5 s at rest; a request that is sent just then has no answer."""
    handled: list[asyncio.Task[Any] | None] = []
    now, begun = [0.0], list[int]()
    monkeypatch.setattr("httpcore._async.http11.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handled.append(asyncio.current_task())
        begun.append(0)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                begun[-1] += 1
        writer.close()
        await writer.wait_closed()

    async def go() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = open_client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
        for rest_s in (0.0, 1.0, 4.5):
            now[0] += rest_s
            await client.get("/")
        await client.aclose()
        await asyncio.gather(*filter(None, handled))
        server.close()
        await server.wait_closed()

    asyncio.run(go())
    assert begun == [2, 1]


def test_a_burst_of_refusals_is_one_sign_of_pressure() -> None:
    async def serve(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            known = request.url.path == "/v1/models"
            return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})
        return httpx.Response(429)

    async def go() -> None:
        endpoint = HttpEndpoint("http://server", considerate=True, transport=httpx.MockTransport(serve))
        await endpoint.start()
        while endpoint.capacity < 64:
            endpoint._rows.window.fill(rows=0, queued=0)
        for size in (32, 16):
            rows = [
                endpoint.complete(Call(key=str(n), url=Url.CHAT, body={"messages": []})) for n in range(9)
            ]
            await asyncio.gather(*rows, return_exceptions=True)
            assert endpoint.capacity == size
            await asyncio.sleep(1.0)
        await endpoint.close()

    virtual_time.run(go())
