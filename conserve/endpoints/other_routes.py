"""Answers of routes without choices: embeddings and OpenAI's Responses, as the texts of results."""

from collections.abc import Mapping
from typing import Any

import msgspec

from conserve.endpoints import answers
from conserve.endpoints.answers import Count, beside, excerpt, token_usage, with_usage
from conserve.endpoints.protocol import Call, Choice, Completion, Url
from conserve.errors import EndpointFault, one_line


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one input: numbers, or base64 if the request asked for that."""

    embedding: list[float] | str
    index: Count = 0


class EmbeddingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response body of the route for embeddings."""

    data: list[Embedding]
    usage: Any = None  # read by `token_usage`
    model: str | None = None


class MessagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message: text, or a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponseItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a response: a message, a tool call, or reasoning."""

    type: str
    content: list[MessagePart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Incomplete(msgspec.Struct, frozen=True, kw_only=True):
    """Reason that a response is incomplete."""

    reason: str | None = None


class ResponsesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response body of the route for responses."""

    output: list[ResponseItem]
    status: str
    incomplete_details: Incomplete | None = None
    usage: Any = None  # read by `token_usage`
    model: str | None = None


EMBEDDINGS = msgspec.json.Decoder(EmbeddingsAnswer)
RESPONSES = msgspec.json.Decoder(ResponsesAnswer)


def read(call: Call, content: bytes) -> Completion:
    """Read a response body of any route; raises `EndpointFault` if it is not a whole answer to the call."""
    if call.url not in (Url.EMBEDDINGS, Url.RESPONSES):
        return answers.completion(call, content)
    try:
        return embeddings(call, content) if call.url is Url.EMBEDDINGS else response(content)
    except answers.UNREADABLE as error:
        raise EndpointFault(
            f"the answer is not that of {call.url} ({one_line(error)}): {excerpt(content)}"
        ) from error


def embeddings(call: Call, content: bytes) -> Completion:
    """One choice for each input; its text is the embedding as JSON."""
    answer = EMBEDDINGS.decode(content)
    found = sorted(answer.data, key=lambda one: one.index)
    wanted = num_inputs(call.body)
    if len(found) != (wanted or len(found) or 1):
        raise EndpointFault(f"the answer has {len(found)} embeddings, not {wanted or 1}")
    choices = (
        Choice(text=msgspec.json.encode(one.embedding).decode(), finish_reason="stop") for one in found
    )
    return with_usage(tuple(choices), token_usage(answer.usage), answer.model)


def num_inputs(body: Mapping[str, Any]) -> int | None:
    """Number of texts, or of lists of token ids, to embed; None if that is not clear."""
    given = body.get("input")
    if isinstance(given, str):
        return 1
    if not isinstance(given, list) or not given:
        return None
    return 1 if isinstance(given[0], int) else len(given)


def response(content: bytes) -> Completion:
    """One choice with the text of all messages."""
    answer = RESPONSES.decode(content)
    if answer.status not in ("completed", "incomplete"):
        raise EndpointFault(f"the response is {one_line(answer.status)}, not completed")
    parts = [part for item in answer.output if item.type == "message" for part in item.content or ()]
    text = "".join(part.text or "" for part in parts if part.type == "output_text")
    refusal = "".join(part.refusal or "" for part in parts if part.type == "refusal")
    calls = [
        {"type": item.type, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        for item in answer.output
        if item.type == "function_call"
    ]
    counts = token_usage(answer.usage, prompt="input_tokens", answer="output_tokens")
    choice = Choice(text=text, finish_reason=finish_reason(answer), beside=beside(calls, refusal))
    return with_usage((choice,), counts, answer.model)


def finish_reason(answer: ResponsesAnswer) -> str:
    """The finish reason, in the words of chats."""
    if answer.status == "incomplete":
        reason = answer.incomplete_details.reason if answer.incomplete_details else None
        return "length" if reason in (None, "max_output_tokens", "max_tokens") else reason
    return "tool_calls" if any(item.type == "function_call" for item in answer.output) else "stop"
