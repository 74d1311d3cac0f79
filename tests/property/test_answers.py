"""Whatever a server answers is an error or a completion, and every completion can be written and read."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.endpoints.answers import UNREADABLE, completion
from conserve.endpoints.protocol import Call, Completion, Url
from conserve.endpoints.stream import AnswerPieces, NotFaithful
from conserve.errors import EndpointError
from conserve.jobs.harvest.outcome import success, valid_json
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.requests.file import StoredRequest
from conserve.store.books.leases import LeasedRow
from conserve.store.books.results import checked, decode, to_arrow
from tests.conftest import examples
from tests.reach import reached

CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "yes"},
    "text": "yes",
    "finish_reason": "stop",
    "logprobs": {"content": [{"token": "yes", "logprob": -0.5, "bytes": [121], "top_logprobs": []}]},
}
ANSWER = {
    "id": "one",
    "choices": [CHOICE],
    "model": "m",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}
PIECE = {
    "id": "one",
    "choices": [
        {"index": 0, "delta": {"content": "a"}, "text": "a", "token_ids": [1], "finish_reason": "stop"}
    ],
    "model": "m",
    "usage": ANSWER["usage"],
}

texts = st.text(st.characters(categories=None), max_size=6)  # lone surrogates among them
numbers = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([2**31, 2**63, 10**400])
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document that holds a value."""
    steps = document.items() if isinstance(document, dict) else enumerate(document)
    for step, inner in steps:
        yield (*path, step)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, step))


def in_place_of(value: Any) -> st.SearchStrategy[Any]:
    """Any value, or one of the same kind: most that are of another kind are refused."""
    alike = {str: texts, int: numbers, float: numbers}.get(type(value))
    return values if alike is None else st.one_of(alike, values)


@st.composite
def spoilt(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    """A document with other values in one or two places, or nothing of it at all."""
    if draw(st.integers(0, 9)) == 0:
        return json.dumps(draw(values)).encode()
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        inner: Any = found
        *steps, last = draw(st.sampled_from(list(places(document))))
        try:
            for step in steps:
                inner = inner[step]
            inner[last] = draw(in_place_of(inner[last]))
        except (TypeError, KeyError, IndexError):  # an earlier value stands in the way
            continue
    return json.dumps(found).encode()


def work(url: Url) -> ReadyRow:
    return ReadyRow(
        job_id="job-1",
        epoch=1,
        row=LeasedRow(4, 1, 0, 11.0),
        request=StoredRequest(6, "mine", None, "hi", None, None),
        call=Call(key="1", url=url, body={}),
        can_resume=True,
        wants_json=True,
        submitted_at=10.0,
    )


def check(found: Completion, url: Url) -> None:
    """The completion's result is written as it is, and comes back from the journal and from a shard."""
    result = success(work(url), found, now=12.0)
    written, payload = checked(result)
    assert written is result
    assert decode(payload) == result
    table = to_arrow(["job-1"], [4], [written])
    assert table["text"].to_pylist() == [result.text]


@given(url=st.sampled_from([Url.CHAT, Url.COMPLETIONS]), content=spoilt(ANSWER))
@settings(max_examples=examples(1000))
def test_an_answer_is_an_error_or_can_be_kept(url: Url, content: bytes) -> None:
    found = None
    try:
        found = completion(Call(key="1", url=url, body={}), content)
    except EndpointError as error:
        str(error).encode()
    if reached("an odd answer is a completion", found) and found is not None:
        check(found, url)


@given(url=st.sampled_from([Url.CHAT, Url.COMPLETIONS]), payload=spoilt(PIECE))
@settings(max_examples=examples(1000))
def test_a_stream_is_an_error_or_can_be_kept(url: Url, payload: bytes) -> None:
    found = None
    pieces = AnswerPieces(url, lambda _: None)
    try:
        pieces.add(payload)
        found = pieces.completion()
    except (*UNREADABLE, EndpointError, NotFaithful):
        pass
    if reached("an odd stream is a completion", found) and found is not None:
        check(found, url)


documents = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def nearly_json(draw: st.DrawFn) -> str:
    """JSON text with a character more or less."""
    said = json.dumps(
        draw(documents), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    )
    said = said.encode("utf-8", "replace").decode()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(said)))
        said = (
            said[:at]
            + draw(st.sampled_from(["", *'\0\t\n\r\x1f\x7f"\\/,:[]{}019eE+-.NaI \u2028']))
            + said[at + 1 :]
        )
    return said


def test_what_is_kept_as_json_is_json_to_sql_too() -> None:
    """One value that is none would break the view of all results."""
    with duckdb.connect(":memory:") as duck:

        @given(said=nearly_json())
        @settings(max_examples=examples(1000))
        def check(said: str) -> None:
            kept = valid_json(said)
            if reached("nearly JSON is JSON", kept is not None):
                assert duck.execute("select ?::json is not null", [kept]).fetchone() == (True,)

        check()
