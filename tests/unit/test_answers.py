"""Response bodies: what is a completion, and what is a fault of the endpoint that nothing is kept of."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from conserve.endpoints.answers import LEVELS, completion, num_choices
from conserve.endpoints.protocol import Call, Url
from conserve.endpoints.stream import AnswerPieces
from conserve.errors import EndpointFault

SURROGATE = "half \ud83d"
NO_STRING = (7, 1.5, True, ["x"], {"a": 1}, SURROGATE)
NO_COUNT = (-1, 1.5, True, "1.5", [1], 2**31, 3_000_000_000, 10**20, 10**400)


def document(url: Url = Url.CHAT, **choice: Any) -> dict[str, Any]:
    said = {"message": {"content": "yes"}} if url is Url.CHAT else {"text": "yes"}
    return {
        "choices": [{"finish_reason": "stop", "logprobs": None, **said, **choice}],
        "model": "m",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def spoilt(url: Url, place: Sequence[Any], value: Any) -> bytes:
    """A good answer with another value in one place."""
    whole = inner = document(url)
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return json.dumps(whole).encode()


def read(content: bytes, url: Url = Url.CHAT, **body: Any) -> Any:
    return completion(Call(key="1", url=url, body=body), content)


@pytest.mark.parametrize("url", [Url.CHAT, Url.COMPLETIONS])
def test_a_good_answer_is_a_completion(url: Url) -> None:
    found = read(json.dumps(document(url, logprobs={"content": [{"token": "yes"}]})).encode(), url)
    assert [choice.text for choice in found.choices] == ["yes"]
    assert found.choices[0].logprobs == {"content": [{"token": "yes"}]}
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens, found.model) == (3, 2, 1, "m")


def test_what_servers_leave_out_is_not_missed() -> None:
    found = read(b'{"choices": [{"message": {"content": null}, "finish_reason": null}], "usage": null}')
    assert (found.choices[0].text, found.choices[0].finish_reason, found.model) == ("", "stop", "")
    assert found.prompt_tokens == found.completion_tokens == found.cached_tokens == 0


TEXT = {Url.CHAT: ("choices", 0, "message", "content"), Url.COMPLETIONS: ("choices", 0, "text")}


@pytest.mark.parametrize("url", [Url.CHAT, Url.COMPLETIONS])
@pytest.mark.parametrize("value", NO_STRING)
@pytest.mark.parametrize("place", ["text", ("choices", 0, "finish_reason"), ("model",)])
def test_a_string_of_another_type_or_with_half_a_character_is_a_fault(
    url: Url, value: object, place: Any
) -> None:
    with pytest.raises(EndpointFault, match="no completion"):
        read(spoilt(url, TEXT[url] if place == "text" else place, value), url)


@pytest.mark.parametrize("value", NO_COUNT)
@pytest.mark.parametrize(
    "place", [("prompt_tokens",), ("completion_tokens",), ("prompt_tokens_details", "cached_tokens")]
)
def test_a_count_that_no_result_holds_is_none_and_the_others_stay(
    place: tuple[str, ...], value: object
) -> None:
    found = read(spoilt(Url.CHAT, ("usage", *place), value))
    good = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    assert found.choices[0].text == "yes"
    assert {name: getattr(found, name) for name in good} == {**good, place[-1]: 0}


@pytest.mark.parametrize(
    ("value", "count"), [(2**31 - 1, 2**31 - 1), (12.0, 12), ("12", 12), (None, 0), ("1e400", 0)]
)
def test_a_count_may_be_any_whole_number_as_gateways_write_it(value: object, count: int) -> None:
    assert read(spoilt(Url.CHAT, ("usage", "prompt_tokens"), value)).prompt_tokens == count


@pytest.mark.parametrize("usage", [7, "x", [], {"prompt_tokens_details": [{"modality": "TEXT"}]}])
def test_a_usage_that_is_none_spoils_no_answer(usage: object) -> None:
    found = read(spoilt(Url.CHAT, ("usage",), usage))
    assert (found.choices[0].text, found.prompt_tokens) == ("yes", 0)


@pytest.mark.parametrize(
    ("message", "finish_reason", "text"),
    [
        ({"tool_calls": [{"id": "1"}]}, "tool_calls", ""),
        ({"tool_calls": [{"id": "1"}]}, None, ""),
        ({}, "content_filter", ""),
        ({}, "length", ""),
        ({"content": []}, "stop", ""),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "y"},
                    {"type": "text", "text": "es"},
                ]
            },
            "stop",
            "yes",
        ),
    ],
)
def test_a_message_may_lack_its_content_or_have_it_in_parts(
    message: dict[str, Any], finish_reason: str | None, text: str
) -> None:
    whole = document(message=message, finish_reason=finish_reason)
    (choice,) = read(json.dumps(whole).encode()).choices
    assert (choice.text, choice.beside) == (text, {k: v for k, v in message.items() if k == "tool_calls"})


@pytest.mark.parametrize(
    "logprobs",
    [7, "x", ["x"], {"content": [{"token": SURROGATE}]}, {SURROGATE: 1}, {"a": 10**20}, {"a": 10**400}],
)
def test_logprobs_that_no_result_holds_are_a_fault(logprobs: object) -> None:
    with pytest.raises(EndpointFault):
        read(spoilt(Url.CHAT, ("choices", 0, "logprobs"), logprobs))


def nested(levels: int, value: str = "1") -> str:
    return '{"a":' * levels + value + "}" * levels


@pytest.mark.parametrize("levels", [LEVELS + 1, 900, 5_000, 100_000])
@pytest.mark.parametrize("field", ["logprobs", "unknown"])
def test_an_answer_nested_without_end_is_a_fault(field: str, levels: int) -> None:
    content = json.dumps(document(**{field: "HERE"})).replace('"HERE"', nested(levels)).encode()
    if field == "unknown" and levels < 1000:
        assert read(content).choices[0].text == "yes", "it is not kept"
        return
    with pytest.raises(EndpointFault):
        read(content)


def test_logprobs_are_nested_as_deep_as_openais_and_deeper() -> None:
    content = json.dumps(document(logprobs="HERE")).replace('"HERE"', nested(LEVELS)).encode()
    assert json.dumps(read(content).choices[0].logprobs, separators=(",", ":")) == nested(LEVELS)


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"null", b"[1]", b"7", b'{"hello": 1}', b"\xff\xfe{}", b"[" * 100_000, b'{"choices": {}}',
     b'{"choices": [7]}', b'{"choices": [{}]}', b'{"choices": [{"message": {}}]}', b'{"choices": []}',
     b'{"choices": [{"message": {"content": "\xff"}}]}', b'{"choices": [{"message": {"content": "x"}}]'],
)  # fmt: skip
def test_what_is_no_completion_is_a_fault_that_shows_its_beginning(content: bytes) -> None:
    with pytest.raises(EndpointFault) as error:
        read(content)
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, 1),
        ({"n": None}, 1),
        ({"n": 3}, 3),
        ({"n": "3"}, None),
        ({"prompt": "abc", "n": 2}, 2),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
    ],
)
def test_a_request_says_how_many_choices_it_wants(body: dict[str, Any], wanted: int | None) -> None:
    assert num_choices(body) == wanted


@pytest.mark.parametrize(("n", "there"), [(None, 0), (None, 2), (2, 1), (2, 3)])
def test_another_number_of_choices_is_a_fault(n: int | None, there: int) -> None:
    whole = document()
    whole["choices"] *= there
    with pytest.raises(EndpointFault, match=f"{there} choices, not {n or 1}"):
        read(json.dumps(whole).encode(), n=n)


def test_where_it_is_not_clear_any_number_of_choices_will_do() -> None:
    whole = document()
    whole["choices"] *= 2
    assert len(read(json.dumps(whole).encode(), n="2").choices) == 2


# Pieces of a stream.

GOOD = {"id": "one", "choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [1]}]}


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": None},
        {"choices": [7]},
        {"choices": [{"index": 1, "delta": {}}]},
        {"choices": [{"delta": None}]},
        *({"choices": [{"delta": {"content": value}}]} for value in NO_STRING),
        *(
            {"choices": [{"delta": {}, "token_ids": value}]}
            for value in (7, "12", ["x"], [-1], [2**31], [1.5])
        ),
        *({"choices": [], "usage": {"prompt_tokens": value}} for value in NO_COUNT),
        {"choices": [], "usage": 7},
        {"choices": [], "model": SURROGATE},
        {"choices": [], "id": ["x"]},
        {"choices": [], "id": "another"},
        {"choices": [], "prompt_token_ids": "12"},
    ],
)
def test_a_malformed_piece_is_refused_and_nothing_of_it_is_taken(event: dict[str, Any]) -> None:
    seen: list[list[int]] = []
    pieces = AnswerPieces(Url.CHAT, lambda tokens: seen.append(list(tokens)))
    pieces.add(json.dumps(GOOD).encode())
    with pytest.raises(Exception) as error:
        pieces.add(json.dumps(event).encode())
    from conserve.endpoints.answers import UNREADABLE

    assert isinstance(error.value, UNREADABLE)
    assert seen == [[1]]
