"""Rows that ask for embeddings and for OpenAI's Responses: over HTTP, in results and in OpenAI Batch output."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from conserve.endpoints.discovery import Mode
from conserve.endpoints.http import HttpEndpoint
from conserve.endpoints.protocol import Call, Url, resumable
from conserve.errors import EndpointError, EndpointFault, EndpointUnusable, RequestRejected
from conserve.jobs.requests.fault import request_fault
from conserve.store.sql.openai_lines import openai_line
from tests.acceptance.scripted_server import ScriptedServer
from tests.commands import conserve
from tests.unit.test_export import as_row
from tests.unit.test_http import ask
from tests.unit.test_probes import ANSWERS

EMBED = Call(key="1", url=Url.EMBEDDINGS, body={"input": ["a", "b"]})
RESPOND = Call(key="1", url=Url.RESPONSES, body={"input": "hi", "max_output_tokens": 4})
USAGE = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
MESSAGE = {
    "type": "message", "role": "assistant",
    "content": [{"type": "output_text", "text": "hel"}, {"type": "output_text", "text": "lo"}],
}  # fmt: skip


def answering(document: Any) -> Any:
    return lambda request: httpx.Response(200, json=document)


def test_embeddings_are_sent_without_stream_and_read_in_the_order_of_their_inputs() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert (request.url.path, sent) == ("/v1/embeddings", {"input": ["a", "b"], "model": "served"})
        data = [{"index": 1, "embedding": [0.25, -1]}, {"index": 0, "embedding": [0.1, 1e-7]}]
        return httpx.Response(200, json={"data": data, "usage": {"prompt_tokens": 2}, "model": "served"})

    answer = ask(handler, EMBED)
    assert [json.loads(choice.text) for choice in answer.choices] == [[0.1, 1e-7], [0.25, -1]]
    assert (answer.prompt_tokens, answer.completion_tokens, answer.choices[0].finish_reason) == (2, 0, "stop")


def test_embeddings_in_base64_stay_what_they_are() -> None:
    call = Call(key="1", url=Url.EMBEDDINGS, body={"input": [1, 2, 3], "encoding_format": "base64"})
    answer = ask(answering({"data": [{"index": 0, "embedding": "AACAPw=="}]}), call)
    assert answer.choices[0].text == '"AACAPw=="'


@pytest.mark.parametrize(
    ("status", "model", "fault"),
    [
        (404, None, None),
        (405, "embedder", None),
        (501, None, None),
        (404, "wrong", EndpointUnusable),
        (500, None, EndpointUnusable),
    ],
)
def test_a_server_that_only_embeds_takes_rows_without_a_priority(
    status: int, model: str | None, fault: type[EndpointError] | None
) -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "embedder"}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text="vllm:num_requests_waiting 0")
        if request.url.path == Url.COMPLETIONS:
            return httpx.Response(status, json={"detail": "Not Found"})
        return httpx.Response(404 if request.url.path == "/v1/conserve" else 200)

    async def start() -> Mode:
        transport = httpx.MockTransport(serve)
        endpoint = HttpEndpoint("http://server", model=model, considerate=True, transport=transport)
        await endpoint.start()
        await endpoint.close()
        return endpoint.server.mode

    with pytest.raises(fault) if fault else nullcontext():
        assert asyncio.run(start()) is Mode.PLAIN


@pytest.mark.parametrize(
    ("status", "details", "more", "reason"),
    [
        ("completed", None, [], "stop"),
        ("incomplete", {"reason": "max_output_tokens"}, [], "length"),
        ("incomplete", {"reason": "content_filter"}, [], "content_filter"),
        ("incomplete", None, [], "length"),
        ("completed", None, [{"type": "function_call", "name": "f", "arguments": "{}"}], "tool_calls"),
    ],
)
def test_a_response_is_the_text_of_its_messages(
    status: str, details: Any, more: list[Any], reason: str
) -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {
        "output": [reasoning, MESSAGE, *more], "status": status, "incomplete_details": details,
        "usage": USAGE, "model": "m",
    }  # fmt: skip
    answer = ask(answering(said), RESPOND)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("hello", reason)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 1)


@pytest.mark.parametrize(
    ("call", "document"),
    [
        (EMBED, {"data": [{"index": 0, "embedding": [1]}]}),
        (EMBED, {"data": []}),
        (EMBED, {"data": [{"index": 0, "embedding": ["x"]}, {"index": 1, "embedding": [1]}]}),
        (EMBED, {"choices": []}),
        (RESPOND, {"output": [], "status": "in_progress"}),
        (RESPOND, {"output": [{"content": []}], "status": "completed"}),
        (RESPOND, {"choices": []}),
        (RESPOND, []),
    ],
)
def test_what_is_no_answer_of_the_route_is_a_fault(call: Call, document: Any) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        is_row = json.loads(request.content).items() >= call.body.items()
        return httpx.Response(200, json=document if is_row else ANSWERS[call.url])

    with pytest.raises(EndpointFault):
        ask(handler, call)


def test_a_server_that_lacks_the_route_fails_the_row_alone() -> None:
    message = "this server does not answer POST /v1/embeddings; GET /openapi.json lists its routes"
    missing = httpx.Response(404, json={"error": {"message": message, "type": "NotFoundError", "code": 404}})
    with pytest.raises(RequestRejected, match="does not answer POST /v1/embeddings"):
        ask(lambda request: missing, EMBED)


@pytest.mark.parametrize(
    ("url", "body", "fault"),
    [
        (Url.EMBEDDINGS, {"input": "a"}, None),
        (Url.EMBEDDINGS, {"input": [[1, 2], [3]]}, None),
        (Url.EMBEDDINGS, {"input": []}, "it has no input"),
        (Url.EMBEDDINGS, {"prompt": "a"}, "it has no input"),
        (Url.RESPONSES, {"input": [{"role": "user", "content": "a"}], "top_logprobs": 2}, None),
        (Url.RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens is a whole number from 1"),
        (Url.RESPONSES, {"input": "a", "background": True}, "leave background out"),
    ],
)
def test_lines_that_every_engine_would_reject_fail_at_submit(url: Url, body: Any, fault: str | None) -> None:
    found = request_fault(url, body)
    assert found is None if fault is None else fault in (found or "")


def test_they_start_over_when_they_are_cut_short() -> None:
    assert not resumable(EMBED.body)
    assert not resumable(RESPOND.body)


@pytest.mark.parametrize(
    ("changed", "resumes"),
    [
        ({}, True),
        ({"logprobs": False}, True),
        ({"logprobs": None}, True),
        ({"logprobs": 0}, False),  # those of the samples
        ({"logprobs": 1}, False),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
    ],
)
def test_what_saved_tokens_do_not_tell_starts_over(changed: dict[str, Any], *, resumes: bool) -> None:
    assert resumable({"prompt": "a", "max_tokens": 5, **changed}) == resumes


def body_of_line(**values: Any) -> Any:
    """Body of the answer in a line of batch output, as a client decodes it."""
    line = openai_line(as_row(model="m", prompt_tokens=2, **values), "/v1/chat/completions")
    return json.loads(msgspec.json.encode(line))["response"]["body"]


def test_embeddings_in_batch_output_are_vectors_and_have_no_answers_tokens() -> None:
    several = json.dumps([{"text": "[1]", "finish_reason": "stop"}, {"text": "[2]", "finish_reason": "stop"}])
    for row, vectors in (({"text": "[0.1,1e-7]"}, [[0.1, 1e-7]]), ({"choices": several}, [[1], [2]])):
        assert body_of_line(url="/v1/embeddings", completion_tokens=5, **row) == {
            "object": "list",
            "model": "m",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": 2, "total_tokens": 2},
        }


def message(*content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "status": "completed", "content": list(content)}


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
TEXT = {"type": "output_text", "text": "hel", "annotations": []}
NO_TEXT = {**TEXT, "text": ""}


@pytest.mark.parametrize(
    ("text", "choice", "output"),
    [
        ("hel", None, [message(TEXT)]),
        ("", None, [message(NO_TEXT)]),
        ("hel", {"tool_calls": [CALL]}, [message(TEXT), {**CALL, "status": "completed"}]),
        ("", {"tool_calls": [CALL, CALL]}, [{**CALL, "status": "completed"}] * 2),
        ("", {"refusal": "No."}, [message({"type": "refusal", "refusal": "No."})]),
    ],
)
def test_a_response_in_batch_output_has_what_the_model_said(
    text: str, choice: dict[str, Any] | None, output: list[dict[str, Any]]
) -> None:
    choices = None if choice is None else json.dumps([choice])
    row = {"text": text, "choices": choices, "finish_reason": "stop", "finished_at": 1_000.7}
    assert body_of_line(url="/v1/responses", completion_tokens=5, cached_tokens=1, **row) == {
        "id": "job-1-3",
        "object": "response",
        "created_at": 1000,
        "model": "m",
        "status": "completed",
        "incomplete_details": None,
        "output": output,
        "usage": {
            "input_tokens": 2,
            "output_tokens": 5,
            "total_tokens": 7,
            "input_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_a_response_that_was_cut_off_is_incomplete(reason: str, status: str, details: Any) -> None:
    body = body_of_line(url="/v1/responses", text="hel", finish_reason=reason)
    assert (body["status"], body["incomplete_details"]) == (status, details)


def test_a_file_of_such_lines_goes_through_a_run_and_out_again(tmp_path: Path) -> None:
    bodies = [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "b"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "c"}]}),
    ]
    lines = [
        json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": body})
        for n, (url, body) in enumerate(bodies)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(lines))
    assert conserve("submit", str(path)).returncode == 0
    with ScriptedServer() as server:
        done = conserve("run", "--endpoint", server.url)
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in conserve("results", "last", "--format", "openai").stdout.splitlines()]
    kinds = [line["response"]["body"]["object"] for line in out]
    assert kinds == ["list", "response", "chat.completion"]
    assert isinstance(out[0]["response"]["body"]["data"][0]["embedding"], list)
