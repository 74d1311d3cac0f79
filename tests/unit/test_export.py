"""Results as files: what an OpenAI Batch client, a spreadsheet or a script would read."""

import csv
import io
import json
import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.api.file_sink import file_sink
from conserve.errors import UsageError
from conserve.store.books import shards
from conserve.store.books.results import COLUMNS, Result, arrow_schema, decode, encode, to_arrow
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql import export, openai_lines
from conserve.store.sql.batches import RowBatches, rows_of
from conserve.store.sql.export import Format, format_of
from conserve.store.sql.openai_lines import fingerprint
from conserve.store.sql.query import views
from tests.store_rows import add_job, finish, leased, result

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def as_row(position: int = 3, url: str | None = None, **values: Any) -> dict[str, Any]:
    """A row of `results` as DuckDB gives it out, with the route that its request named."""
    (row,) = to_arrow(["job-1"], [position], [result(position, **values)]).to_pylist()
    return row | {"url": url}


def test_an_answer_is_a_line_of_a_batch_output_file() -> None:
    row = as_row(
        custom_id="mine",
        model="m",
        engine="m@1",
        finish_reason="stop",
        prompt_tokens=7,
        completion_tokens=5,
        cached_tokens=4,
    )
    assert openai_lines.openai_line(row, CHAT) == {
        "id": "job-1-3",
        "custom_id": "mine",
        "error": None,
        "response": {
            "status_code": 200,
            "request_id": "job-1-3",
            "body": {
                "id": "job-1-3",
                "object": "chat.completion",
                "created": 2,
                "model": "m",
                "system_fingerprint": "m@1",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "yes"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 5,
                    "total_tokens": 12,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
    }


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("too_long", 400, "invalid_request_error"),
        ("engine_died", 500, "server_error"),
        ("endpoint_fault", 500, "server_error"),
        ("invalid_answer", 500, "server_error"),
    ],
)
def test_a_failed_row_is_an_error_under_its_row_index(code: str, status: int, kind: str) -> None:
    body = {"error": {"message": "no", "type": kind, "param": None, "code": code}}
    assert openai_lines.openai_line(as_row(failed=True, error_type=code), CHAT) == {
        "id": "job-1-3",
        "custom_id": "3",
        "response": {"status_code": status, "request_id": "job-1-3", "body": body},
        "error": {"code": code, "message": "no"},
    }


@pytest.mark.parametrize(("custom_id", "shown"), [("mine", "mine"), (None, "3")])
def test_a_row_without_a_result_in_time_is_a_line_in_openais_words(custom_id: str | None, shown: str) -> None:
    assert openai_lines.expired_line("job-1", {"row_index": 3, "custom_id": custom_id}) == {
        "id": "job-1-3",
        "custom_id": shown,
        "response": None,
        "error": {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        },
    }


@pytest.mark.parametrize(
    ("url", "default", "kind"),
    [
        (None, CHAT, "chat.completion"),
        (None, COMPLETIONS, "text_completion"),
        (CHAT, COMPLETIONS, "chat.completion"),
        (COMPLETIONS, CHAT, "text_completion"),
    ],
)
def test_the_rows_own_route_decides_the_shape_of_its_body(url: str | None, default: str, kind: str) -> None:
    body = openai_lines.openai_line(as_row(url=url), default)["response"]["body"]
    assert body["object"] == kind
    assert ("message" in body["choices"][0]) == (kind == "chat.completion")
    assert body["choices"][0].get("text") == (None if kind == "chat.completion" else "yes")


def test_several_choices_keep_their_order_and_logprobs() -> None:
    choices = [
        {"text": "a", "finish_reason": "stop", "logprobs": {"tokens": ["a"]}},
        {"text": "b", "finish_reason": "length"},
    ]
    body = openai_lines.openai_line(as_row(choices=json.dumps(choices)), COMPLETIONS)["response"]["body"]
    assert body["choices"] == [
        {"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}, "finish_reason": "stop"},
        {"index": 1, "text": "b", "logprobs": None, "finish_reason": "length"},
    ]


@pytest.mark.parametrize(
    ("choice", "content"),
    [
        ({"text": ""}, ""),
        ({"text": "so", "tool_calls": [{"id": "1"}]}, "so"),
        ({"text": "", "tool_calls": [{"id": "1"}]}, None),
        ({"text": "", "function_call": {"name": "f"}}, None),
        ({"text": "", "refusal": "No."}, None),
    ],
)
def test_a_message_is_without_content_only_if_something_else_is_in_it(
    choice: dict[str, Any], content: str | None
) -> None:
    row = as_row(choices=json.dumps([{**choice, "finish_reason": "stop"}]))
    (found,) = openai_lines.body_of(row, CHAT)["choices"]
    beside = {name: value for name, value in choice.items() if name != "text"}
    assert found["message"] == {"role": "assistant", "content": content, **beside}


def test_an_answer_alone_keeps_its_logprobs() -> None:
    (found,) = openai_lines.body_of(as_row(logprobs='{"tokens":["yes"]}'), COMPLETIONS)["choices"]
    assert found["logprobs"] == '{"tokens":["yes"]}'


def test_a_job_is_exported_in_the_order_of_its_input(store: Store) -> None:
    """The rows are of shards and journal; rows of other jobs are left out."""
    for job_id in ("job-1", "other"):
        add_job(store, job_id, rows=4)
        lease = leased(store)
        finish(store, lease, of=[2, 0], failed=[2])
        shards.compact(store, job_id, now=0.0)
        finish(store, lease, of=[3, 1])
    urls = pa.table(
        {"row_index": [0, 1, 2, 3], "url": pa.array([None, COMPLETIONS, None, None], pa.string())}
    )
    pq.write_table(urls, layout.requests_file(store.home, "job-1"))
    with views(store, now=0.0, sealed=False) as opened:
        plain = (
            export.ordered(opened.duck, "job-1", with_inputs=False).select("job_id", "row_index").fetchall()
        )
        routed = export.with_urls(opened.duck, store.home, "job-1").to_arrow_table().to_pylist()
    assert plain == [("job-1", n) for n in range(4)]
    assert [(row["row_index"], row["url"], row["error"]) for row in routed] == [
        (0, None, None),
        (1, COMPLETIONS, None),
        (2, None, "no"),
        (3, None, None),
    ]


def test_rows_without_a_result_come_in_the_order_of_the_input(store: Store) -> None:
    """Results of another job's rows are none of theirs."""
    for job_id, done in (("job-1", [1]), ("other", [0, 1, 2, 3])):
        add_job(store, job_id, rows=4)
        finish(store, leased(store), of=done)
    asked = pa.table({"row_index": [3, 1, 0, 2], "custom_id": ["d", "b", None, "c"]})
    pq.write_table(asked, layout.requests_file(store.home, "job-1"))
    with views(store, now=0.0, sealed=False) as opened:
        left = export.unanswered(opened.duck, store.home, "job-1").fetchall()
    assert left == [(0, None), (2, "c"), (3, "d")]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_every_row_is_written_and_counted(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Over several batches, with quotes, line breaks and nulls in it."""
    for name in ("READ_ROWS", "BATCH_ROWS"):
        monkeypatch.setattr(f"conserve.store.sql.batches.{name}", 2)
    values = ["plain", 'a "quoted", one', "über\n Zeilen", None, "last"]
    answer = duckdb.from_arrow(pa.table({"text": values, "n": range(5)}))
    sink = io.BytesIO()
    assert export.write(rows_of(answer), sink, Format(kind)) == 5
    assert not sink.closed, "which is the caller's"
    if kind == "jsonl":
        assert [json.loads(line) for line in sink.getvalue().decode().splitlines()] == [
            {"text": text, "n": n} for n, text in enumerate(values)
        ]
    elif kind == "csv":
        rows = list(csv.reader(io.StringIO(sink.getvalue().decode(), newline="")))
        assert rows == [["text", "n"], *([text or "", str(n)] for n, text in enumerate(values))]
    else:
        sink.seek(0)
        assert pq.read_table(sink).to_pylist() == [{"text": text, "n": n} for n, text in enumerate(values)]
        assert pq.read_metadata(sink).row_group(0).column(0).compression == "ZSTD"


ODD = {
    "interval '1 month 2 days'": ("1 month 2 days, 0:00:00",) * 3,
    "timestamp '2026-01-02 03:04:05'": (
        "2026-01-02 03:04:05",
        "2026-01-02T03:04:05",
        datetime(2026, 1, 2, 3, 4, 5),
    ),
    "'ab'::blob": ("YWI=", "YWI=", b"ab"),
    "[1, null]": ("[1,null]", [1, None], [1, None]),
    "{'a': 'x'}": ('{"a":"x"}', {"a": "x"}, {"a": "x"}),
    "null::interval": ("", None, None),
}


@pytest.mark.parametrize("sql", ODD)
def test_a_value_that_a_format_has_no_type_for_is_text(sql: str) -> None:
    """Intervals with months, whose lengths differ, are text, and bytes are base64 where they are text."""
    in_csv, in_lines, in_parquet = ODD[sql]
    written = {kind: io.BytesIO() for kind in (Format.CSV, Format.JSONL, Format.PARQUET)}
    for kind, sink in written.items():
        assert export.write(rows_of(duckdb.sql(f"select {sql} as a")), sink, kind) == 1
    (_, row) = csv.reader(io.StringIO(written[Format.CSV].getvalue().decode()))
    assert row == [in_csv]
    assert json.loads(written[Format.JSONL].getvalue()) == {"a": in_lines}
    assert pq.read_table(written[Format.PARQUET]).to_pylist() == [{"a": in_parquet}]


DOCUMENTS = ["""{"a":\r\n[1,"x\\n"]}""", "{no json", "[" * 20_000, None]


def test_documents_are_values_and_what_is_no_json_stays_text() -> None:
    """One that is in lines is one line; texts beside them stay as they are."""
    column = pa.table({"d": DOCUMENTS, "t": ["[1]"] * 4})
    rows = RowBatches(column.schema, frozenset({"d"}), column.to_batches())
    assert [row["d"] for row in export.decoded(rows)] == [{"a": [1, "x\n"]}, *DOCUMENTS[1:]]
    assert [row["t"] for row in export.decoded(rows)] == ["[1]"] * 4
    sink = io.BytesIO()
    assert export.write_lines(rows, sink) == 4
    assert sink.getvalue().splitlines()[0] == b"""{"d":{"a":  [1,"x\\n"]},"t":"[1]"}"""


def test_decimals_are_numbers_in_lines() -> None:
    sink = io.BytesIO()
    export.write_lines(rows_of(duckdb.sql("select 1.50::decimal(5, 2) as d, 7::hugeint as n")), sink)
    assert sink.getvalue() == b'{"d":1.50,"n":7}\n'


def test_openai_lines_are_lines_that_are_converted() -> None:
    sink = io.BytesIO()
    rows = rows_of(duckdb.sql("select unnest([1, 2]) as n"))
    assert export.write(rows, sink, Format.OPENAI, lambda row: [row["n"]]) == 2
    assert sink.getvalue() == b"[1]\n[2]\n"


def test_lines_can_be_converted_on_their_way() -> None:
    sink = io.BytesIO()
    assert export.write_lines(rows_of(duckdb.sql("select 1 as n")), sink, lambda row: [row["n"] + 1]) == 1
    assert sink.getvalue() == b"[2]\n"


@pytest.mark.parametrize("column", ["json", "choices", "logprobs"])
def test_json_columns_come_out_as_values(column: str) -> None:
    sink = io.BytesIO()
    answer = duckdb.sql(f"""select unnest(['{{"a": [1]}}', null])::json as {column}, 'x' as text""")
    assert export.write_lines(rows_of(answer), sink) == 2
    assert [json.loads(line) for line in sink.getvalue().splitlines()] == [
        {column: {"a": [1]}, "text": "x"},
        {column: None, "text": "x"},
    ]


@pytest.mark.parametrize(
    ("path", "wanted", "found"),
    [
        (None, None, Format.JSONL),
        (None, Format.CSV, Format.CSV),
        ("a.parquet", None, Format.PARQUET),
        ("a.PQ", None, Format.PARQUET),
        ("a.jsonl", None, Format.JSONL),
        ("a.ndjson", None, Format.JSONL),
        ("a.csv", None, Format.CSV),
        ("a.txt", Format.JSONL, Format.JSONL),
        ("/dev/null", None, Format.JSONL),
        ("/dev/fd/63", None, Format.JSONL),
        ("a.jsonl", Format.OPENAI, Format.OPENAI),
        ("a.CSV", Format.CSV, Format.CSV),
    ],
)
def test_the_format_is_the_one_asked_for_or_the_names(
    path: str | None, wanted: Format | None, found: Format
) -> None:
    assert format_of(Path(path) if path else None, wanted) is found


@pytest.mark.parametrize("wanted", [Format.OPENAI, Format.JSONL, Format.CSV])
def test_a_file_is_not_written_in_another_format_than_its_name_says(wanted: Format) -> None:
    with pytest.raises(
        UsageError, match=f"a.parquet ends as parquet does, and the format is {wanted}; rename"
    ):
        format_of(Path("a.parquet"), wanted)


@pytest.mark.parametrize("name", ["x.txt", "answers", "x.json"])
def test_a_file_whose_name_tells_no_format_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UsageError, match=r"end it in \.parquet.*or give --format: parquet, jsonl, csv, openai"
    ):
        format_of(tmp_path / name, None)
    (tmp_path / name).touch()
    with pytest.raises(
        UsageError, match=f"^{tmp_path / name} names no format"
    ):  # without a flag: Python has none
        format_of(tmp_path / name, None)
    with pytest.raises(UsageError, match="names no format"):
        format_of(Path("/dev/shm") / name, None)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "data" / "answers.jsonl", tmp_path / "latest.jsonl"
    target.parent.mkdir()
    if there:
        target.write_text("yesterday")
    link.symlink_to("data/answers.jsonl")
    with file_sink(link) as stream:
        stream.write(b"today")
    assert link.is_symlink()
    assert target.read_text() == "today"
    assert [path.name for path in target.parent.iterdir()] == ["answers.jsonl"]


def test_links_in_a_circle_are_replaced(tmp_path: Path) -> None:
    link = tmp_path / "a"
    link.symlink_to("a")
    with file_sink(link) as stream:
        stream.write(b"rows")
    assert link.read_text() == "rows"


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "answers.jsonl"
    path.touch()
    path.chmod(mode)
    with file_sink(path) as stream:
        assert stat.S_IMODE(os.fstat(stream.fileno()).st_mode) == mode, "from the first byte on"
        stream.write(b"rows")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "rows"


def test_a_pipe_gets_lines_unless_its_name_tells_a_format(tmp_path: Path) -> None:
    for name, found in (("pipe", Format.JSONL), ("pipe.csv", Format.CSV)):
        os.mkfifo(tmp_path / name)
        assert format_of(tmp_path / name, None) is found


def test_a_result_survives_journal_and_shard_as_it_was() -> None:
    whole = result(
        5,
        custom_id="c",
        json="{}",
        choices="[]",
        finish_reason="stop",
        model="m",
        prompt_tokens=1,
        completion_tokens=2,
        cached_tokens=3,
        resumed_tokens=4,
        logprobs="{}",
        attempts=6,
        submitted_at=1763821537.123456,
    )
    assert decode(encode(whole)) == whole
    (row,) = to_arrow(["job-1"], [9], [whole]).to_pylist()
    assert (row.pop("job_id"), row.pop("position")) == ("job-1", 9)
    times = {name: row.pop(name).timestamp() for name in ("submitted_at", "started_at", "finished_at")}
    assert Result(**row, **times) == whole


def test_columns_of_a_shard_have_their_types() -> None:
    kinds = dict(zip(arrow_schema().names, map(str, arrow_schema().types), strict=True))
    assert list(kinds) == ["job_id", "position", *COLUMNS]
    assert kinds["position"] == kinds["row_index"] == "int64"
    counters = ("prompt_tokens", "completion_tokens", "cached_tokens", "resumed_tokens", "attempts")
    assert {kinds[name] for name in counters} == {"int32"}
    assert {kinds[name] for name in COLUMNS if name.endswith("_at")} == {"timestamp[us, tz=UTC]"}
    others = {name for name in kinds if kinds[name] == "string"}
    assert others == set(kinds) - {"position", "row_index", *counters} - {
        n for n in kinds if n.endswith("_at")
    }


def test_times_are_utc_to_the_microsecond() -> None:
    (row,) = to_arrow(["j"], [0], [result(0, finished_at=1.0000006)]).to_pylist()
    assert row["finished_at"] == datetime.fromtimestamp(1.000001, UTC)


def test_a_result_failed_if_it_has_an_error() -> None:
    assert result(0, failed=True).failed
    assert not result(0).failed


def test_clients_of_a_batch_do_not_read_where_its_server_is() -> None:
    shown = fingerprint("http://10.0.0.7:8000 tiny")
    assert shown == fingerprint("http://10.0.0.7:8000 tiny") != fingerprint("http://10.0.0.8:8000 tiny")
    assert re.fullmatch(r"fp_[0-9a-f]{10}", str(shown))
    assert (fingerprint("tiny@1"), fingerprint(None)) == ("tiny@1", None)
