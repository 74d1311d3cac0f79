"""The fake endpoint takes and rejects requests as a server does."""

import asyncio
from typing import Any

import pytest

from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import Call, Completion, Url
from conserve.errors import RequestRejected


def ask(**body: Any) -> Completion:
    return asyncio.run(FakeEndpoint(Script(tokens=5)).complete(Call(key="1", url=Url.COMPLETIONS, body=body)))


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 5),
        ({"max_tokens": None}, 5),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 3, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
    ],
)
def test_an_answer_is_as_long_as_was_asked_for(body: dict[str, Any], tokens: int) -> None:
    answer = ask(prompt="hi", **body)
    assert answer.completion_tokens == tokens
    assert len(answer.choices[0].text.split()) == tokens


@pytest.mark.parametrize("wanted", [-1, 1.5, "3", [3], 10**9, 10**20])
def test_a_length_that_no_server_takes_is_rejected(wanted: object) -> None:
    with pytest.raises(RequestRejected, match="max_tokens"):
        ask(prompt="hi", max_tokens=wanted)


def test_a_body_that_asks_nothing_is_rejected() -> None:
    with pytest.raises(RequestRejected, match="neither messages nor a prompt"):
        ask(max_tokens=3)
