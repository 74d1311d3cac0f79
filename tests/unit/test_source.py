"""Input files: what is read of them, whether they changed, and the request files made of them."""

import dataclasses
import fcntl
import gzip
import io
import json
import os
import signal
import termios
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.cli.signals import ended_in_order
from conserve.config import Settings
from conserve.endpoints.protocol import Url
from conserve.errors import InputError, StoreError, TemplateError
from conserve.jobs.inputs import files, parquet_rows, source, text_rows
from conserve.jobs.inputs.cells import Unreadable, for_python, holds_times
from conserve.jobs.inputs.files import form_of_name, partitions, spelled_out
from conserve.jobs.inputs.fingerprint import changed, fingerprint
from conserve.jobs.inputs.parquet_rows import ParquetParts, ParquetRows
from conserve.jobs.inputs.source import Input, open_input, spool
from conserve.jobs.inputs.text_rows import JsonLines, column_kinds
from conserve.jobs.requests import file as request_file
from conserve.jobs.requests import submit as submit_module
from conserve.jobs.requests.file import RequestFile, RequestWriter, first_waiting, to_table
from conserve.jobs.requests.rendering import (
    RenderedRow,
    messages_fault,
    render_openai_line,
    renderer,
    template_names,
)
from conserve.jobs.requests.submit import rendered_tables
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.books.catalog import Source
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from conserve.store.files import layout
from tests.commands import until
from tests.conftest import WriteInput
from tests.store_rows import add_job, leased, put_back

HALF = "half \ud83d"
CUT = Unreadable("text with half of a surrogate pair", "half \\ud83d")
CUT_WITHIN = Unreadable("text with half of a surrogate pair")
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def requests(path: Path, payloads: list[str | None], row_indexes: list[int] | None = None) -> RequestFile:
    """A request file of these payloads, in one piece."""
    rendered = [
        RenderedRow(text) if text is not None else RenderedRow(error_type="template", error=f"row {n}")
        for n, text in enumerate(payloads)
    ]
    with RequestWriter(path) as writer:
        writer.write(to_table(row_indexes or range(len(payloads)), [None] * len(payloads), rendered))
    return RequestFile(path)


def job_of(path: Path) -> catalog.JobRecord:
    """A job whose input is referred to."""
    mark = fingerprint(path)
    found = Source(path=mark.path, format="jsonl", size=mark.size, mtime_ns=mark.mtime_ns, digest=mark.digest)
    return dataclasses.replace(JOB, source=found)


JOB = catalog.JobRecord(
    seq=1,
    id="job-1",
    state=JobState.QUEUED,
    error=None,
    priority=0,
    submitted_at=0.0,
    started_at=None,
    finished_at=None,
    task="{}",
    source=Source(path=None, format="jsonl"),
    num_rows=1,
    next_position=0,
    succeeded=0,
    failed=0,
    retries=0,
    prompt_tokens=0,
    completion_tokens=0,
    cached_tokens=0,
    resumed_tokens=0,
)


def test_a_file_is_changed_when_its_contents_are(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"one")
    before = fingerprint(path)
    job = job_of(path)
    assert (before.path, before.size, len(before.digest)) == (str(path), 3, 40)
    assert changed(tmp_path, job) is None
    os.utime(path, (0, 0))
    assert changed(tmp_path, job) is None, "only its time has"
    path.write_bytes(b"two")
    os.utime(path, ns=(0, before.mtime_ns + 1))
    assert changed(tmp_path, job) == str(path)
    path.write_bytes(b"longer")
    assert changed(tmp_path, job) == str(path)
    path.write_bytes(b"one")
    assert changed(tmp_path, job) is None, "it is what it was again"
    path.unlink()
    assert changed(tmp_path, job) is None, "a file that is gone cannot be told from one that is elsewhere"
    assert changed(tmp_path, JOB) is None


def test_a_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(bytes((5 << 20) + 1))
    one = fingerprint(path).digest
    path.write_bytes(bytes(5 << 20) + b"x")
    assert fingerprint(path).digest != one


def test_standard_input_is_kept_whole(tmp_path: Path) -> None:
    assert spool(io.BytesIO(b"a\nb"), tmp_path).read_bytes() == b"a\nb"


@pytest.mark.parametrize("from_stdin", [True, False])
def test_what_is_kept_of_an_input_says_where_its_rows_are(
    write_input: WriteInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_stdin: bool
) -> None:
    parquet, text = write_input(q=["a"]), lines(tmp_path / "a.jsonl", {"q": "a"})
    for path, kind in ((parquet, "parquet"), (text, "jsonl")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
        folder = tmp_path / kind
        folder.mkdir()
        given = Input(names=["-" if from_stdin else str(path)])
        found = open_input(given, folder, openai=False).source
        assert (found.format, found.copied, found.linked) == (kind, True, False)
        assert found.path == (None if from_stdin else str(path))
        assert found.size == (0 if from_stdin and kind == "jsonl" else path.stat().st_size)


def test_an_input_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "a.jsonl", {})

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(source, "fingerprint", denied)
    with pytest.raises(InputError, match=r"cannot read .*a\.jsonl: Permission denied; check its permissions"):
        open_input(Input(names=[str(path)]), tmp_path, openai=False)


@pytest.mark.parametrize("wanted", [["q"], ["n", "q"], []])
def test_batches_hold_every_row_once_with_the_wanted_columns(
    write_input: WriteInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[str]
) -> None:
    monkeypatch.setattr(parquet_rows, "READ_ROWS", 2)
    monkeypatch.setattr(text_rows, "ROWS_PER_GROUP", 2)
    rows = [{"q": str(n), "n": n} for n in range(5)]
    path = write_input(q=[row["q"] for row in rows], n=[row["n"] for row in rows])
    for found in (ParquetRows(path, "x"), JsonLines([lines(tmp_path / "a.jsonl", *rows)], "x")):
        batches = list(found.batches(wanted))
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert [row for batch in batches for row in batch] == [{k: row[k] for k in wanted} for row in rows]
        assert list(found.batches(wanted)) == batches, "as often as they are read"


def test_long_rows_come_fewer_at_a_time(
    write_input: WriteInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "GROUP_BYTES", 1000)
    monkeypatch.setattr(text_rows, "GROUP_BYTES", 1000)
    rows = [{"q": f"{n}" * 400} for n in range(9)]
    text = JsonLines([lines(tmp_path / "a.jsonl", *rows)], "x")
    assert [len(batch) for batch in text.batches(["q"])] == [3, 3, 3]
    values = [os.urandom(200).hex() for _ in range(9)]
    parquet = ParquetRows(write_input(q=values), "x")
    assert 1 <= parquet.batch_rows() <= 3
    assert [row["q"] for batch in parquet.batches(["q"]) for row in batch] == values
    monkeypatch.setattr(parquet_rows, "GROUP_BYTES", 1)
    assert parquet.batch_rows() == 1


def test_a_text_that_many_rows_share_fills_no_memory(
    write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = "x" * 1000
    rows = ParquetRows(write_input(context=[context] * 2000, q=[str(n) for n in range(2000)]), "x")
    assert max(batch.nbytes for batch in rows.arrow(["context"])) <= parquet_rows.READ_ROWS * 1010
    monkeypatch.setattr(submit_module, "GROUP_BYTES", 10_000)
    for template in ("{{ context }} {{ q }}", f"{context} {{{{ q }}}}"):
        task = Task(kind=Kind.PROMPT, template=template, id_column="q")
        tables = list(rendered_tables(rows, task, None))
        assert {table.num_rows for table in tables} == {10}
        found = pa.concat_tables(tables)
        assert found["row_index"].to_pylist() == list(range(2000))
        assert found["custom_id"].to_pylist() == [str(n) for n in range(2000)]
        assert found["payload"].to_pylist() == [f"{context} {n}" for n in range(2000)]


def test_copies_of_several_files_have_whole_row_groups(
    tmp_path: Path, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "READ_ROWS", 256)
    paths = [write_input(q=[str(n)] * 3000).rename(tmp_path / f"{n}.parquet") for n in range(4)]
    paths.append(write_input(q=["x" * 100_000] * 300).rename(tmp_path / "long.parquet"))
    ParquetParts(paths, "x", [{} for _ in paths]).copy_to(tmp_path / "copy")
    with pq.ParquetFile(tmp_path / "copy") as copy:
        groups = [copy.metadata.row_group(n).num_rows for n in range(copy.num_row_groups)]
        assert copy.read() == pa.concat_tables(map(pq.read_table, paths))
    assert len(groups) == 3
    assert 8192 <= groups[0] < 8192 + parquet_rows.READ_ROWS
    assert groups[1] > 12_000 - groups[0], "the long rows that fill it"


def test_a_parquet_file_without_rows_has_no_batches(write_input: WriteInput) -> None:
    assert list(ParquetRows(write_input(q=pa.array([], pa.string())), "x").batches(["q"])) == []


def test_a_parquet_file_damaged_inside_is_named(write_input: WriteInput) -> None:
    path = write_input(q=[os.urandom(50).hex() for _ in range(2000)])
    data = bytearray(path.read_bytes())
    data[100:40_000] = b"\xff" * 39_900  # zeros are pages that can be read, in 3 of 1,000 such files
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"my file is damaged .*; write it again"):
        list(ParquetRows(path, "my file").batches(["q"]))


def test_an_input_without_memory_to_read_it_is_not_called_damaged(
    write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(q=["a"])
    rows, parts = ParquetRows(path, "my file"), ParquetParts([path], "x", [{}])
    short = Mock(side_effect=pa.ArrowMemoryError("malloc of size 7 failed\nmore"))
    said = r"^there is no memory to read my file \(malloc of size 7 failed\); free some and submit it again$"
    with monkeypatch.context() as machine:
        machine.setattr(pq, "ParquetFile", short)
        with pytest.raises(InputError, match=said):
            ParquetRows(path, "my file")
        with pytest.raises(InputError, match=said):
            list(rows.batches(["q"]))
    monkeypatch.setattr(parquet_rows, "conformed", short)
    with pytest.raises(InputError, match=r"no memory to read .*\.parquet"):
        list(parts.batches(["q"]))
    monkeypatch.setattr(pa, "input_stream", short)
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(InputError, match=said), files.opened(packed, "my file"):
        pass


def test_kinds_of_columns_are_those_of_all_rows() -> None:
    rows = [{"a": 1, "b": None}, {"a": 1.5, "c": True}, {"a": "x", "b": [1], "c": {}}, {"a": 2**63}]
    kinds = column_kinds(iter(rows))
    assert kinds == {"a": {"int", "float", "string"}, "b": {"null", "list"}, "c": {"bool", "object"}}


@pytest.mark.parametrize(
    ("values", "kind", "stored"),
    [
        ([True, None], "bool", [True, None]),
        ([1, -(2**63)], "int64", [1, -(2**63)]),
        ([2**63 - 1], "int64", [2**63 - 1]),
        ([2**63], "string", [str(2**63)]),
        ([-(2**63) - 1], "string", [str(-(2**63) - 1)]),
        ([1, 1.5], "double", [1.0, 1.5]),
        ([1.5], "double", [1.5]),
        (["a", 1], "string", ["a", "1"]),
        ([True, 1], "string", ["true", "1"]),
        ([None, None], "string", [None, None]),
        ([[1], None], "string", ["[1]", None]),
        ([{"a": "ü"}], "string", ['{"a":"ü"}']),
    ],
)
def test_columns_of_lines_keep_their_type_or_become_text(
    tmp_path: Path, values: list[Any], kind: str, stored: list[Any]
) -> None:
    rows = JsonLines([lines(tmp_path / "a.jsonl", *({"x": value} for value in values))], "x")
    rows.copy_to(tmp_path / "copy.parquet")
    table = pq.read_table(tmp_path / "copy.parquet")
    assert str(table.schema.field("x").type) == kind
    assert table["x"].to_pylist() == stored


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([{"role": "user", "content": "x"}], None),
        ([{"role": "user", "content": [{"type": "text"}]}], None),
        ("text", "not a list"),
        ([], "at least one"),
        (7, "not a list"),
        (["x"], "message 0 is no object"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}], None),
        ([{"role": "assistant", "function_call": TOOL_CALL["function"]}], None),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "message 0 has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": None}], "message 0 has no content"),
    ],
)
def test_messages_have_a_role_and_a_content_or_calls_each(messages: object, fault: str | None) -> None:
    found = messages_fault(messages)
    assert (found is None) if fault is None else (found is not None and fault in found)


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), True),
        (pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.int8())])), True),
        (pa.list_(pa.struct([("role", pa.binary()), ("content", pa.binary())])), True),
        (pa.list_(pa.struct([("role", pa.string())])), False),
        (pa.list_(pa.struct([("role", pa.int8()), ("content", pa.string())])), False),
        (pa.list_(pa.string()), False),
        (pa.string(), False),
    ],
)
def test_columns_of_chats_are_known_by_their_type(kind: pa.DataType, fits: bool) -> None:
    assert parquet_rows.is_messages(kind) is fits


def test_chats_may_be_null_in_lines(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    rows = JsonLines([lines(tmp_path / "a.jsonl", {"m": chat}, {"m": None})], "x")
    rows.check(Task(kind=Kind.MESSAGES, column="m"))
    with pytest.raises(InputError, match="is list, string, not a list of messages"):
        JsonLines([lines(tmp_path / "b.jsonl", {"m": chat}, {"m": "x"})], "x").check(
            Task(kind=Kind.MESSAGES, column="m")
        )


def test_a_template_is_rendered_as_it_stands() -> None:
    render = renderer(Task(kind=Kind.PROMPT, template="<{{ q }}>&{{ range(2) | list }}\n"))
    assert render({"q": "<b>", "n": 1}) == RenderedRow("<<b>>&[0, 1]\n")
    assert template_names("{{ q }}{% set x = 1 %}{{ x }}{{ range(3) }}{{ other.name }}", []) == {"q", "other"}


@pytest.mark.parametrize(
    ("template", "row", "error"),
    [
        ("{{ q }}", {"q": None}, "prints a null"),
        ("{{ q.nope }}", {"q": {}}, "UndefinedError"),
        ("{{ q + 1 }}", {"q": "x"}, "TypeError"),
    ],
)
def test_a_row_that_cannot_be_rendered_says_why(template: str, row: dict[str, Any], error: str) -> None:
    found = renderer(Task(kind=Kind.PROMPT, template=template))(row)
    assert (found.payload, found.error_type) == (None, "template")
    assert error in (found.error or "")


def test_a_mistake_in_a_template_names_its_line() -> None:
    with pytest.raises(TemplateError, match="mistake in line 2"):
        template_names("ok\n{% if %}", [])


@pytest.mark.parametrize("url", [str(url) for url in Url])
def test_an_openai_line_keeps_its_route_and_all_but_streaming(url: str) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {}, "n": 2}
    assert render_openai_line({"url": url, "body": body}) == RenderedRow('{"prompt":"x","n":2}', url=url)


def test_requests_are_read_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_file, "ROWS_PER_GROUP", 3)
    path = tmp_path / "requests.parquet"
    reader = requests(path, [str(n) for n in range(8)])
    assert pq.ParquetFile(path).metadata.num_row_groups == 3
    for wanted in ([0, 1], [7, 0, 3, 2], [2, 3], [6], []):
        assert [row.payload for row in reader.read(wanted)] == [str(n) for n in wanted]
    reader.close()


def test_long_requests_make_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_file, "GROUP_BYTES", 100)
    path = tmp_path / "requests.parquet"
    payloads = ["x" * size for size in (60, 40, 10, 100, 200, 1)] + [None]
    with RequestWriter(path) as writer:
        for n in range(0, 7, 2):
            part = payloads[n : n + 2]
            writer.write(
                to_table(range(n, n + len(part)), [None] * len(part), [RenderedRow(p) for p in part])
            )
    found = pq.ParquetFile(path).metadata
    assert [found.row_group(n).num_rows for n in range(found.num_row_groups)] == [2, 2, 1, 2]
    assert [row.payload for row in RequestFile(path).read(range(7))] == payloads


def test_a_writer_counts_rows_and_keeps_the_first_error(tmp_path: Path) -> None:
    with RequestWriter(tmp_path / "r.parquet") as writer:
        for rendered in (
            [RenderedRow("a")],
            [RenderedRow(error="one"), RenderedRow("b")],
            [RenderedRow(error="two")],
        ):
            writer.write(to_table(range(len(rendered)), [None] * len(rendered), rendered))
    assert (writer.rows, writer.unrendered, writer.first_error) == (4, 2, "one")


def test_requests_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"gone\.parquet cannot be read .*; run: conserve check"):
        RequestFile(tmp_path / "gone.parquet")
    (tmp_path / "no.parquet").write_bytes(b"no")
    with pytest.raises(StoreError, match="cannot be read"):
        RequestFile(tmp_path / "no.parquet")


def test_the_earliest_row_that_waits_is_the_smallest_of_all_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_file, "ROWS_PER_GROUP", 3)
    indexes = [5, 3, 8, 0, 7, 2, 6, 1, 4]
    reader = requests(tmp_path / "r.parquet", ["x"] * 9, indexes)
    for start in range(10):
        for returned in ([], [0], [2], [1, 3], [0, 3, 4], [5, 8]):
            waiting = {*(p for p in returned if p < start), *range(start, 9)}
            expected = min((indexes[position] for position in waiting), default=None)
            assert reader.earliest([p for p in returned if p < start], start) == expected
    reader.close()


def test_requests_that_could_not_be_rendered_are_counted_up_to_the_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_file, "ROWS_PER_GROUP", 3)
    payloads = ["x", None, "x", "x", "x", "x", None, None, "x"]
    reader = requests(tmp_path / "r.parquet", payloads)
    for start in range(10):
        for returned in ([], [0], [1], [1, 6], [7], [2, 6, 7]):
            taken = {*range(start)} - {*returned}
            expected = sum(payloads[position] is None for position in taken)
            assert reader.unrendered([p for p in returned if p < start], start) == expected
    reader.close()


def test_the_first_row_that_waits_is_found_from_the_store(store: Store, settings: Settings) -> None:
    add_job(store, rows=3)
    assert first_waiting(settings, "job-1") is None, "its requests are gone"
    requests(layout.requests_file(store.home, "job-1"), ["x"] * 3, [2, 0, 1])
    assert first_waiting(settings, "job-1") == 0
    lease = leased(store, limit=2)
    assert first_waiting(settings, "job-1") == 1
    put_back(store, lease, 1)
    assert first_waiting(settings, "job-1") == 0
    leased(store)
    assert first_waiting(settings, "job-1") is None


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"q": "a", "n": 1}, {"q": "b"}], [("a", 1), ("b", None)]),
        ([{"q": np.str_("a"), "n": np.int64(7)}], [("a", 7)]),
        ([MappingProxyType({"q": np.arange(3), "n": {"k": [1.5]}})], [([0, 1, 2], {"k": [1.5]})]),
        (iter([{"q": "a", "n": None}]), [("a", None)]),
        (
            [{"q": b"caf\xc3\xa9", "n": [{"k": (bytearray(b"b"), memoryview(b"m"))}]}],
            [("café", [{"k": ["b", "m"]}])],
        ),
        ([{"q": {b"b"}, "n": np.array([b"n"])}], [(["b"], ["n"])]),
        ([{"q": HALF, "n": np.int64(7)}, {"q": {"k": [HALF]}, "n": 8}], [(CUT, 7), (CUT_WITHIN, 8)]),
    ],
)
def test_rows_that_a_program_holds_are_kept_as_json(
    tmp_path: Path, rows: Any, found: list[tuple[Any, ...]]
) -> None:
    opened = open_input(Input(rows=rows), tmp_path, openai=False)
    assert [tuple(row.values()) for batch in opened.rows.batches(["q", "n"]) for row in batch] == found
    assert opened.source.copied


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["a"], "row 1 of the rows is of type list; give a dict of its columns"),
        ({"q": object()}, r"row 1 of the rows has no JSON \(a value of type object\); give text"),
        ({"q": {1, 2}.__contains__}, "row 1 of the rows has no JSON"),
        ({"q": [b"caf\xe9"]}, r"row 1 of the rows has no JSON \('utf-8' codec can't decode byte 0xe9 "),
        ({("a", "b"): 1}, "row 1 of the rows has no JSON"),
        ({HALF: 1}, r"row 1 of the rows has no JSON \(.* surrogates not allowed\)"),
        ({"q": HALF, "n": {1: object()}}, "row 1 of the rows has no JSON"),
    ],
)
def test_a_row_that_json_has_no_form_for_is_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        open_input(Input(rows=[{"q": "a"}, row]), tmp_path, openai=False)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (pa.int64(), False),
        (pa.timestamp("ns"), True),
        (pa.date32(), True),
        (pa.duration("s"), True),
        (pa.list_(pa.string()), False),
        (pa.list_(pa.time64("ns")), True),
        (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.date64()))]), True),
        (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.binary()))]), False),
        (pa.map_(pa.string(), pa.timestamp("s")), True),
    ],
)
def test_types_that_hold_times_are_known_at_any_depth(kind: pa.DataType, times: bool) -> None:
    assert holds_times(kind) is times


@pytest.mark.parametrize(
    ("kind", "finer"),
    [
        (pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC")),
        (pa.time64("us"), pa.time64("ns")),
        (pa.duration("us"), pa.duration("ns")),
        (pa.string(), pa.binary()),
        (pa.string(), pa.binary_view()),
        (pa.large_string(), pa.large_binary()),
        (pa.binary(16), pa.binary(16)),
        (pa.date64(), pa.date64()),
        (pa.duration("s"), pa.duration("s")),
    ],
)
@pytest.mark.parametrize(
    "nested",
    [
        lambda kind: kind,
        pa.list_,
        pa.large_list,
        lambda kind: pa.list_(kind, 3),
        lambda kind: pa.struct([pa.field("a", kind, nullable=False), ("b", pa.string())]),
        lambda kind: pa.map_(pa.string(), kind),
        lambda kind: pa.map_(kind, pa.string()),
        lambda kind: pa.list_(pa.list_(kind)),
    ],
)
def test_nanoseconds_become_microseconds_and_bytes_text_at_any_depth_and_nothing_else_changes(
    kind: pa.DataType, finer: pa.DataType, nested: Any
) -> None:
    assert for_python(nested(finer)) == nested(kind)


def test_values_of_a_dictionary_become_microseconds_too() -> None:
    assert for_python(pa.dictionary(pa.int8(), pa.timestamp("ns"))) == pa.timestamp("us")
    kept = pa.dictionary(pa.int8(), pa.string())
    assert for_python(kept) == kept


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), "dictionary"], ids=str)
def test_bytes_are_text_and_fail_their_row_alone_where_they_are_not(
    write_input: WriteInput, kind: pa.DataType | str
) -> None:
    texts = pa.array(["é".encode(), b"\xff", None, b"", b"b"])
    column = texts.dictionary_encode() if isinstance(kind, str) else texts.cast(kind)
    chats = pa.array([[{"role": b"user", "content": text.as_py()}] for text in texts])
    rows = next(ParquetRows(write_input(q=column, m=chats), "x").batches(["q", "m"]))
    assert [row["q"] for row in rows] == ["é", Unreadable("text that is not UTF-8"), None, "", "b"]
    render = renderer(Task(kind=Kind.MESSAGES, column="m"))
    assert render(rows[0]).payload == '[{"role":"user","content":"é"}]'
    assert render(rows[1]).error == "m: text that is not UTF-8"


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["day=1/a", "day=2/b"], [{"day": 1}, {"day": 2}]),
        (["day=01/a", "day=2/b"], [{"day": "01"}, {"day": "2"}]),
        (
            ["a=1/b=x%20y/c", "a=2/b=__HIVE_DEFAULT_PARTITION__/c"],
            [{"a": 1, "b": "x y"}, {"a": 2, "b": None}],
        ),
        (["a=__HIVE_DEFAULT_PARTITION__/c", "a=-3/c"], [{"a": None}, {"a": -3}]),
        (["a=1/c", "b=1/c"], [{}, {}]),
        (["=1/c", "=2/c"], [{}, {}]),
        (["a=/c"], [{"a": ""}]),
        (["a=1=2/c=3"], [{"a": "1=2"}]),
    ],
)
def test_partitions_are_read_off_folders_that_all_files_have(
    paths: list[str], found: list[dict[str, Any]]
) -> None:
    assert partitions([Path(path) for path in paths]) == found


def test_a_message_that_json_has_no_form_for_fails_its_row() -> None:
    render = renderer(Task(kind=Kind.MESSAGES, column="m"))
    found = render({"m": [{"role": "user", "content": object()}]})
    assert (found.payload, found.error_type) == (None, "invalid_messages")
    assert (found.error or "").startswith("m: a message that JSON has no form for (")


def test_the_columns_of_a_request_file_keep_their_names(tmp_path: Path) -> None:
    """Files of earlier versions are read by them, and SQL shows them."""
    requests(tmp_path / "requests.parquet", ["a"]).close()
    names = ["row_index", "custom_id", "url", "payload", "error_type", "error"]
    assert pq.read_schema(tmp_path / "requests.parquet").names == names


def test_half_a_surrogate_pair_fails_its_row_or_is_written_out_in_its_error(tmp_path: Path) -> None:
    rows = [
        RenderedRow("half \ud83d"),
        RenderedRow(error_type="template", error="no \ud83d"),
        RenderedRow("x"),
    ]
    with RequestWriter(tmp_path / "requests.parquet") as writer:
        writer.write(to_table(range(3), [None] * 3, rows))
    found = RequestFile(tmp_path / "requests.parquet").read([0, 1, 2])
    assert [(one.payload, one.error) for one in found] == [
        (None, "the prompt holds half of a surrogate pair"),
        (None, "no \\ud83d"),
        ("x", None),
    ]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.parquet", "parquet"), ("a.PQ", "parquet"), ("a.jsonl", "jsonl"), ("a.ndjson.gz", "jsonl"),
        ("a.csv.zst", "csv"), ("a.b.tsv", "tsv"), ("a.tab", "tsv"), ("a.zst", None), ("a", None), ("a.txt", None),
    ],
)  # fmt: skip
def test_a_name_tells_the_format_packed_or_not(name: str, form: str | None) -> None:
    assert form_of_name(Path(name)) == form


def test_a_pattern_finds_files_at_any_depth_where_it_says_so(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.jsonl", "b/d/e.jsonl", "b/d/f.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines(tmp_path / name, {"q": 1})
    found = {
        pattern: [str(path.relative_to(tmp_path)) for path in spelled_out([f"{tmp_path}/{pattern}"]).paths]
        for pattern in ("**/*.jsonl", "*/*.jsonl", "b/*/*")
    }
    assert found == {
        "**/*.jsonl": ["a.jsonl", "b/c.jsonl", "b/d/e.jsonl"],
        "*/*.jsonl": ["b/c.jsonl"],
        "b/*/*": ["b/d/e.jsonl", "b/d/f.csv"],
    }


def test_a_pattern_takes_files_and_folders_that_match_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.jsonl", "b/d/e.jsonl", "b/README.md", "f.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines(tmp_path / name, {"q": 1})
    by_the_shell = spelled_out([f"{tmp_path}/{name}" for name in ("a.jsonl", "b", "f.jsonl")])
    assert spelled_out([f"{tmp_path}/*"]) == by_the_shell
    assert [path.name for path in by_the_shell.paths] == ["a.jsonl", "c.jsonl", "e.jsonl", "f.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["part.jsonl"]),
        ("**/*.jsonl", ["part.jsonl"]),
        ("_*.jsonl", ["_b.jsonl", "_meta.jsonl"]),
        ("_ol*", ["_old/a.jsonl"]),
        ("_o*/[ab].jsonl", ["_old/a.jsonl"]),
        ("**/_b.jsonl", ["_b.jsonl"]),
        ("_SUCCESS", ["_SUCCESS"]),
        (".hidden/*", [".hidden/c.jsonl"]),
    ],
)
def test_a_pattern_skips_hidden_names_that_it_does_not_ask_for(
    tmp_path: Path, pattern: str, found: list[str]
) -> None:
    names = (
        "part.jsonl",
        "_meta.jsonl",
        "_SUCCESS",
        "_b.jsonl",
        "_old/a.jsonl",
        "_old/_b.jsonl",
        ".hidden/c.jsonl",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines(tmp_path / name, {"q": 1})
    paths = spelled_out([f"{tmp_path}/{pattern}"]).paths
    assert [str(path.relative_to(tmp_path)) for path in paths] == found


def test_a_pattern_that_only_hidden_names_match_says_so(tmp_path: Path) -> None:
    lines(tmp_path / "_meta.jsonl", {"q": 1})
    with pytest.raises(InputError, match=r"no file matches .* begin with _ or \. are skipped"):
        spelled_out([f"{tmp_path}/*.jsonl"])


def test_a_pipe_is_no_file_of_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is neither a file nor a folder"):
        spelled_out([str(tmp_path / "pipe")])


def test_a_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InputError, match="is not UTF-8; rename it"):
        spelled_out(["half \udcff.jsonl"])


@pytest.mark.parametrize("name", ["{folder}", "{folder}/*", "a.jsonl"])
def test_a_path_that_is_not_utf8_is_refused_however_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a folder, by a pattern, and in a working folder of such a name."""
    folder = tmp_path / ("work \udcff" if name == "a.jsonl" else "data")
    folder.mkdir()
    (folder / "a.jsonl").touch()
    (folder / "half \udcff.jsonl").touch()
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match="is not UTF-8; rename the file, or its folder"):
        spelled_out([name.format(folder=folder)])


def test_an_input_has_a_name_in_messages_and_one_for_its_jobs() -> None:
    table = pa.table({"q": ["a"]}).to_reader()
    names = [(given.label, given.title) for given in (
        Input(table=table), Input(rows=[]), Input(sql="select 1"), Input(names=["-"]), Input(names=["d/a.b.csv"]),
        Input(names=["d/*.csv"]), Input(names=["*.csv"]), Input(names=["a.csv", "b.csv"]), Input(names=[".csv"]),
    )]  # fmt: skip
    assert names == [
        ("table", "the table"), ("rows", "the rows"), ("sql", "the answer to --sql"), ("stdin", "standard input"),
        ("a", "d/a.b.csv"), ("d", "d/*.csv"), ("files", "*.csv"), ("a", "a.csv b.csv"), (".csv", ".csv"),
    ]  # fmt: skip


def test_ends_of_lines_within_a_csv_value_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'q,n\r\n"x\r\ny",1\r\n"x\ny",2\r\n')
    rows = text_rows.CsvRows([tmp_path / "a.csv"], "a.csv")
    assert [row["q"] for row in rows.rows()] == ["x\r\ny", "x\ny"]


def test_a_signal_just_before_standard_input_is_read_is_heeded(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    heeded = threading.Event()
    os.write(writing, b"a")

    def tell() -> None:
        until(lambda: not fcntl.ioctl(reading, termios.FIONREAD, bytes(4)).strip(b"\0"))
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # here: it interrupts no read over there
        in_time.append(heeded.wait(30))
        os.close(writing)  # else the read waits for ever

    in_time: list[bool] = []
    teller = threading.Thread(target=tell)
    with os.fdopen(reading, "rb") as stream, pytest.raises(KeyboardInterrupt), ended_in_order():  # noqa: PT012
        teller.start()
        spool(stream, tmp_path)
    heeded.set()
    teller.join()
    assert in_time == [True]
