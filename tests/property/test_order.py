"""Execution orders: out of core as in memory, along the prefix tree, and nothing lost on the way."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.endpoints.protocol import Url
from conserve.jobs.requests import external_sort
from conserve.jobs.requests import file as request_file
from conserve.jobs.requests.external_sort import ExternalSort
from conserve.jobs.requests.file import RequestFile, RequestWriter, to_table
from conserve.jobs.requests.order import prompt_key, sort_key
from conserve.jobs.requests.rendering import RenderedRow
from conserve.jobs.task import Kind, Order, Task
from tests.conftest import examples

words = st.text(st.sampled_from('ab"\\\né\U0001f600'), max_size=6)
keys = st.one_of(st.none(), words)
OPENAI = Task(kind=Kind.OPENAI, order=Order.PREFIX)


def in_batches(values: Sequence[str | None], sizes: Sequence[int]) -> list[pa.Table]:
    """The values with their numbers, in tables of these sizes and one of the rest."""
    tables, start = [], 0
    for size in [*sizes, len(values)]:
        part = values[start : start + size]
        tables.append(pa.table({"n": range(start, start + len(part)), "key": pa.array(part, pa.string())}))
        start += len(part)
    return [table for table in tables if table.num_rows]


@settings(max_examples=examples(150))
@given(
    st.lists(keys, max_size=60),
    st.lists(st.integers(1, 12), max_size=8),
    st.sampled_from([1, 100, 1 << 20]),
    st.sampled_from([1, 130, 1 << 20]),
    st.integers(2, 4),
)
def test_what_is_sorted_on_disk_is_what_a_stable_sort_in_memory_gives(
    values: list[str | None], sizes: list[int], run_bytes: int, batch_bytes: int, fan_in: int
) -> None:
    limits = {"RUN_BYTES": run_bytes, "BATCH_BYTES": batch_bytes, "FAN_IN": fan_in}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(external_sort, **limits):
        with ExternalSort(Path(folder), "key") as sorting:
            for table in in_batches(values, sizes):
                sorting.write(table)
            found = [n for table in sorting.rows() for n in table["n"].to_pylist()]
        assert not list(Path(folder).iterdir()), "it leaves files behind"
    assert found == sorted(range(len(values)), key=lambda n: (values[n] is None, values[n] or ""))


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(0, 40), max_size=50),
    st.lists(st.integers(1, 9), max_size=6),
    st.integers(1, 10),
    st.integers(1, 60),
)
def test_row_groups_are_neither_longer_nor_heavier_than_a_claim_can_read(
    lengths: list[int], sizes: list[int], most_rows: int, most_bytes: int
) -> None:
    limits = {"ROWS_PER_GROUP": most_rows, "GROUP_BYTES": most_bytes}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(request_file, **limits):
        path = Path(folder) / "requests.parquet"
        with RequestWriter(path) as writer:
            start = 0
            for size in [*sizes, len(lengths)]:
                part = [RenderedRow("x" * length) for length in lengths[start : start + size]]
                writer.write(to_table(range(start, start + len(part)), [None] * len(part), part))
                start += len(part)
        with pq.ParquetFile(path) as file:
            groups = [file.read_row_group(n) for n in range(file.num_row_groups)]
    payloads = [group["payload"].to_pylist() for group in groups]
    assert [len(payload) for group in payloads for payload in group] == lengths
    for group in payloads:
        assert len(group) <= most_rows
        assert sum(map(len, group[:-1])) < most_bytes
    for group in payloads[:-1]:
        assert len(group) == most_rows or sum(map(len, group)) >= most_bytes, "a group for nothing"


@settings(max_examples=examples(100))
@given(st.permutations(range(30)), st.integers(0, 30), st.sets(st.integers(0, 29)), st.integers(1, 12))
def test_the_first_of_the_rows_that_wait_is_found_in_any_order(
    row_indexes: list[int], start: int, returned: set[int], group_rows: int
) -> None:
    waiting = sorted(position for position in returned if position < start)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(request_file, "ROWS_PER_GROUP", group_rows),
    ):
        path = Path(folder) / "requests.parquet"
        with RequestWriter(path) as writer:
            writer.write(to_table(row_indexes, [None] * 30, [RenderedRow("x")] * 30))
        file = RequestFile(path)
        found = file.earliest(waiting, start)
        file.close()
    assert found == min([row_indexes[n] for n in (*waiting, *range(start, 30))], default=None)


chats = st.lists(st.tuples(st.sampled_from(["system", "user"]), words), min_size=1, max_size=3)


Steps = list[str]


def steps(chat: list[tuple[str, str]]) -> Steps:
    """Steps of a chat as an engine reads it: the role, the characters and an end of each message."""
    return [step for role, content in chat for step in (role, *content, "end")]


def shared(one: Steps, other: Steps) -> int:
    """Length of their common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


@st.composite
def chat_lines(draw: st.DrawFn) -> tuple[Steps, RenderedRow]:
    """An OpenAI line in one of its spellings, and what an engine sees of it."""
    chat = draw(chats)
    messages = [
        draw(st.sampled_from([{"role": role, "content": content}, {"content": content, "role": role}]))
        for role, content in chat
    ]
    fields = draw(st.permutations([("temperature", draw(st.sampled_from([0, 1]))), ("messages", messages)]))
    return steps(chat), RenderedRow(msgspec.json.encode(dict(fields)).decode(), url=Url.CHAT)


@settings(max_examples=examples(200))
@given(st.lists(chat_lines(), min_size=2, max_size=12))
def test_the_order_walks_the_tree_of_what_the_engine_sees(lines: list[tuple[Steps, RenderedRow]]) -> None:
    """Depth first: whatever two rows share, all rows between them share too."""
    seen = [line for line, _ in sorted(lines, key=lambda line: prompt_key(OPENAI, line[1]) or "")]
    for first in range(len(seen)):
        for last in range(first + 1, len(seen)):
            common = shared(seen[first], seen[last])
            assert all(shared(seen[first], between) >= common for between in seen[first:last])


def test_fields_that_are_not_the_prompt_decide_nothing_but_what_stands_in_front_does() -> None:
    def key(**body: object) -> str:
        return prompt_key(OPENAI, RenderedRow(msgspec.json.encode(body).decode(), url=Url.CHAT)) or ""

    hello = [{"role": "user", "content": "hello"}]
    assert key(messages=hello, temperature=0, user="a") == key(user="b", messages=hello)
    assert key(messages=hello) != key(messages=hello, tools=[{"type": "function"}])
    assert key(messages=hello, tools=None) == key(messages=hello)


def test_token_ids_sort_token_by_token() -> None:
    def key(prompt: object) -> str:
        body = msgspec.json.encode({"prompt": prompt}).decode()
        return prompt_key(OPENAI, RenderedRow(body, url=Url.COMPLETIONS)) or ""

    prompts = [[9], [9, 1], [9, 1, 70_000], [10, 2], [100]]
    assert sorted(prompts, key=key) == prompts
    assert key([[9, 1], [4]]) == key([9, 1])
    assert key(["one", "two"]) == key("one")


@pytest.mark.parametrize("payload", ['{"messages": "none"}', "{}", '{"messages": [1]}', '{"prompt": []}'])
def test_bodies_that_an_engine_will_refuse_have_a_place_too(payload: str) -> None:
    for url in Url:
        assert isinstance(prompt_key(OPENAI, RenderedRow(payload, url=url)), str)


def test_what_was_not_rendered_has_no_key() -> None:
    failed = RenderedRow(error_type="template", error="no")
    for order in (Order.PREFIX, Order.RANDOM):
        for kind in (Kind.MESSAGES, Kind.OPENAI):
            key = sort_key(Task(kind=kind, column="m", order=order))
            assert key is not None
            assert key.of is not None
            assert key.of(failed) is None


@given(st.integers(0, 2**40), st.integers(1, 50))
def test_the_same_seed_shuffles_alike_and_another_does_not(seed: int, count: int) -> None:
    def numbers(seed: int) -> list[object]:
        key = sort_key(Task(kind=Kind.PROMPT, template="", order=Order.RANDOM, order_seed=seed))
        assert key is not None
        assert key.of is not None
        return [key.of(RenderedRow("x")) for _ in range(count)]

    assert numbers(seed) == numbers(seed)
    assert numbers(seed) != numbers(seed + 1)
