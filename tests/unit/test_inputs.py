"""Inputs that become jobs, and inputs that do not and leave the store as it was."""

import io
import json
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.errors import InputError, StoreError, TemplateError, UsageError
from conserve.jobs.inputs.source import Input
from conserve.jobs.requests.file import RequestFile, StoredRequest
from conserve.jobs.requests.preview import previews
from conserve.jobs.requests.submit import new_ids, slug
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.books.states import OnLate
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql.batches import RowBatches
from conserve.store.sql.export import write_lines
from conserve.store.sql.query import views
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.submitting import submit

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}")
OPENAI = Task(kind=Kind.OPENAI)
CHAT = Task(kind=Kind.MESSAGES, column="m")


def line(custom_id: str, **changes: object) -> str:
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    }
    return json.dumps({**request, **changes})


def requests(store: Store, job_id: str, rows: int) -> list[StoredRequest]:
    return RequestFile(layout.requests_file(store.home, job_id)).read(range(rows))


def everything_in(folder: Path) -> dict[Path, bytes]:
    """Files and their contents, the database's own log aside."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


BAD: list[tuple[str, str | bytes | None, Task, str]] = [
    ("missing.parquet", None, PROMPT, "there is no file"),
    ("truncated.parquet", b"PAR1 and no more", PROMPT, "damaged or truncated"),
    ("named.parquet", "text", PROMPT, "is not a Parquet file"),
    ("bad.jsonl", '{"q": "a"}\n{"q": "b"\n', PROMPT, "line 2 of .*bad.jsonl is not JSON"),
    ("none.parquet", "", PROMPT, "none.parquet is empty, which no Parquet file is; write it again"),
    (
        "program",
        b"\x7fELF\x02\x00\x01",
        PROMPT,
        "program is no text in UTF-8: it has bytes 0, as binary files",
    ),
    ("sheet.xlsx", b"PK\x03\x04\x14", PROMPT, "is a workbook, .*; save its sheet as CSV and submit that"),
    (
        "tabs.txt",
        "q\tn\na\t1\n",
        PROMPT,
        "line 1 of .*tabs.txt is not JSON .*; if it is CSV or TSV, say so: --format",
    ),
    ("list.jsonl", '{"q": "a"}\n\n["b"]\n', PROMPT, "line 3 .* is not a JSON object"),
    ("array.json", '[\n {"q": "a"},\n {"q": "b"}\n]\n', PROMPT, "array.json is one JSON array; .* --sql"),
    ("flat.json", '[{"q": "a"}, {"q": "b"}]', PROMPT, "flat.json is one JSON array; .* --sql"),
    ("numbers.jsonl", "[1, 2]\n[3, 4]\n", PROMPT, "line 1 .* is not a JSON object"),
    ("empty.jsonl", "", PROMPT, "has no rows"),
    ("empty2.jsonl", "\n\n", OPENAI, "has no rows"),
    ("empty3.jsonl", "{}\n\n{}\n", PROMPT, "has no columns: each of its rows is empty"),
    ("plain.jsonl", '{"q": "a"}\n', OPENAI, "line 1 .* has no valid 'custom_id'"),
    ("get.jsonl", line("a", method="GET"), OPENAI, "only POST"),
    ("twice.jsonl", "\n".join([line("a"), line("b"), line("a")]), OPENAI, "'a' is on 2 rows"),
    ("column.jsonl", '{"question": "a", "n": 1}\n', PROMPT, "names 'q', but the columns are: question, n"),
    ("text.jsonl", '{"m": "hello"}\n', CHAT, "is string, not a list of messages"),
    (
        "spaced.csv",
        "Question Text\nhello\n",
        replace(CHAT, column="Question Text"),
        r"use --prompt \"\{\{ row\['Question Text'\] \}\}\" to send it as text",
    ),
    ("nocolumn.jsonl", '{"q": "hello"}\n', CHAT, "--messages names 'm'"),
    ("syntax.jsonl", '{"q": "a"}\n', Task(kind=Kind.PROMPT, template="{{ q"), "mistake in line 1"),
    (
        "escape.jsonl",
        '{"q": "a"}\n',
        Task(kind=Kind.PROMPT, template="{{ q.__class__.__mro__ }}"),
        "leave Jinja's sandbox",
    ),
    ("fails.jsonl", '{"q": 0}\n', Task(kind=Kind.PROMPT, template="{{ 1 / q }}"), "fails on every row"),
]


@pytest.mark.parametrize(("name", "content", "task", "message"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_input_is_one_sentence_and_leaves_the_store_as_it_was(
    store: Store, tmp_path: Path, name: str, content: str | bytes | None, task: Task, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = everything_in(store.home)
    with pytest.raises(UsageError, match=message) as error:
        submit(store, str(path), task)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
    assert everything_in(store.home) == before
    with store.read() as tx:
        assert catalog.ids(tx) == []


def hinted_sql(error: UsageError) -> str:
    """The query that a message names, as a shell hands it over."""
    words = str(error).rpartition("--sql ")[2]
    return subprocess.run(
        ["sh", "-c", f"printf %s {words}"], capture_output=True, text=True, check=True
    ).stdout


NAMES = ("it's", "do$lar", "back`tick", 'quo"te', "back\\\\slash")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ['[\n {"q": "a"},\n {"q": "b"}\n]\n', '[{"q": "a"}, {"q": "b"}]'])
def test_the_query_that_the_error_of_a_json_array_names_reads_it(
    store: Store, tmp_path: Path, text: str, name: str
) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        submit(store, str(path), PROMPT)
    done = submit(store, Input(sql=hinted_sql(refused.value)), PROMPT)
    assert [row.payload for row in requests(store, done.job_id, 2)] == ["a", "b"]


def test_lines_that_are_chats_are_no_array_of_rows(store: Store, tmp_path: Path) -> None:
    chat = '[{"role": "user", "content": "hi"}]\n'
    (tmp_path / "chats.jsonl").write_text(chat * 2)
    with pytest.raises(InputError, match=r"line 1 .* is not a JSON object; write one"):
        submit(store, str(tmp_path / "chats.jsonl"), CHAT)


def test_an_array_on_standard_input_names_no_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b'[\n{"q": "a"}]')))
    with pytest.raises(InputError, match=r"standard input is one JSON array; .*read_json\('FILE'\)"):
        submit(store, Input(names=["-"]), PROMPT)


@pytest.mark.parametrize("sign", [";", "\t", "|"])
@pytest.mark.parametrize("value", ["a", "a,b"])  # with a comma the reader finds two values
@pytest.mark.parametrize("name", NAMES[:2])
def test_the_query_that_the_error_of_other_separators_names_reads_them(
    store: Store, tmp_path: Path, sign: str, value: str, name: str
) -> None:
    path = tmp_path / f"{name}.csv"
    path.write_text(f"id{sign}q\n007{sign}{value}\n")
    task = replace(PROMPT, template="{{ id }} {{ q }}")
    with pytest.raises(UsageError, match="they seem to be separated by") as refused:
        submit(store, str(path), task)
    assert "row[" not in str(refused.value)
    done = submit(store, Input(sql=hinted_sql(refused.value)), task)
    (row,) = requests(store, done.job_id, 1)
    assert row.payload == f"007 {value}"


def test_a_parquet_file_needs_a_prompt_or_messages(store: Store, write_input: WriteInput) -> None:
    with pytest.raises(InputError) as refused:
        submit(store, str(write_input(q=["a"], chats=[[{"role": "user", "content": "hi"}]])), OPENAI)
    asked = 'say what to ask: --prompt "... {{ COLUMN }}" or --messages chats'
    assert str(refused.value).endswith(f"is a Parquet file with the columns q, chats; {asked}")


def test_a_file_without_lists_needs_a_prompt(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,q\n1,a\n")
    with pytest.raises(InputError) as refused:
        submit(store, str(path), OPENAI)
    assert str(refused.value).endswith(
        'is CSV with the columns id, q; say what to ask: --prompt "... {{ COLUMN }}"'
    )


def test_a_parquet_file_without_rows_is_refused(store: Store, write_input: WriteInput) -> None:
    with pytest.raises(InputError, match="no rows"):
        submit(store, str(write_input(q=pa.array([], pa.string()))), PROMPT)


def test_a_truncated_parquet_file_is_refused(store: Store, write_input: WriteInput) -> None:
    path = write_input(q=[str(n) for n in range(1000)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged or truncated"):
        submit(store, str(path), PROMPT)


def test_a_messages_column_of_the_wrong_type_names_the_type(store: Store, write_input: WriteInput) -> None:
    with pytest.raises(InputError, match=r"'m' .* is string, not list<struct<role, content>>"):
        submit(store, str(write_input(m=["hello"])), CHAT)


def test_a_missing_template_name_is_a_template_error_that_lists_the_columns(
    store: Store, write_input: WriteInput
) -> None:
    with pytest.raises(TemplateError, match="names 'nope', but the columns are: q, a"):
        submit(store, str(write_input(q=["x"], a=[1])), Task(kind=Kind.PROMPT, template="{{ nope }}"))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_chats_are_sent_as_they_are_and_poison_chats_fail_alone(
    store: Store, write_input: WriteInput, kind: pa.DataType
) -> None:
    chats = [
        [{"role": "user", "content": "hi", "name": None}],
        [],
        None,
        [{"role": None, "content": "x", "name": None}],
        [{"role": "user", "content": None, "name": None}],
    ]
    message = pa.struct([("role", kind), ("content", kind), ("name", kind)])
    path = write_input(m=pa.array(chats, pa.list_(message)))
    done = submit(store, str(path), CHAT)
    assert (done.rows, done.unrendered) == (5, 4)
    stored = requests(store, done.job_id, 5)
    assert stored[0].payload == '[{"role":"user","content":"hi"}]'
    assert [row.error_type for row in stored] == [None, *["invalid_messages"] * 4]


def test_parts_of_a_chat_are_sent_without_the_nulls_of_parquet(store: Store, write_input: WriteInput) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "hi"}, picture, {"type": "image_url", "image_url": {"detail": "low"}}]
    done = submit(store, str(write_input(m=[[{"role": "user", "content": parts}]])), CHAT)
    (row,) = requests(store, done.job_id, 1)
    assert json.loads(row.payload or "") == [{"role": "user", "content": parts}]


@pytest.mark.parametrize("template", ["Tell a joke.", "", "{{ range(3) | list }}", "{% set x = 1 %}{{ x }}"])
def test_a_template_that_names_no_column_is_refused_unless_that_is_meant(
    store: Store, write_input: WriteInput, template: str
) -> None:
    path, task = str(write_input(q=["a", "b"])), Task(kind=Kind.PROMPT, template=template)
    with pytest.raises(
        TemplateError, match=r"names no column, so every row would ask the same.*--constant-prompt"
    ):
        submit(store, path, task)
    assert submit(store, path, task, constant_prompt=True).rows == 2
    done = conserve("submit", path, "--prompt", template)
    assert (done.returncode, done.stdout) == (2, "")
    assert conserve("submit", path, "--prompt", template, "--constant-prompt").returncode == 0


def test_a_null_that_a_template_prints_fails_that_row(store: Store, write_input: WriteInput) -> None:
    done = submit(store, str(write_input(q=["a", None])), PROMPT)
    first, second = requests(store, done.job_id, 2)
    assert (first.payload, second.payload, second.error_type) == ("a", None, "template")


def test_openai_lines_keep_their_body_but_for_streaming(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join([line("a"), line("b", url="/v1/images/generations")]))
    done = submit(store, str(path), OPENAI)
    first, second = requests(store, done.job_id, 2)
    assert json.loads(first.payload or "") == {"messages": [{"role": "user", "content": "hi"}]}
    assert (first.custom_id, first.url) == ("a", "/v1/chat/completions")
    assert second.error_type == "unsupported_url"


def test_fields_that_an_openai_line_has_besides_are_columns_of_the_input(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join([line("a", metadata={"set": 1}), line("b", note="x")]))
    done = submit(store, str(path), OPENAI)
    assert done.unrendered == 0
    kept = pq.read_table(layout.inputs_file(store.home, done.job_id))
    assert kept.column_names == ["custom_id", "method", "url", "body", "metadata", "note"]
    assert kept["metadata"].to_pylist() == ['{"set":1}', None]
    assert kept["note"].to_pylist() == [None, "x"]


HALF = "text with half of a surrogate pair"


def test_text_that_was_cut_within_an_emoji_fails_its_row_alone(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    rows = [{"q": "a", "n": 1}, {"q": "bad \ud83d", "n": 2}, {"q": "\U0001f600", "n": 3}]
    path.write_text("\n".join(map(json.dumps, rows)))
    done = submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}", id_column="n"))
    assert (done.rows, done.unrendered) == (3, 1)
    first, second, third = sorted(requests(store, done.job_id, 3))
    assert (second.error_type, second.error) == ("template", f"column 'q' holds {HALF}")
    assert (first.payload, third.payload) == ("a", "\U0001f600")
    kept = pq.read_table(layout.inputs_file(store.home, done.job_id)).to_pylist()
    assert kept == [rows[0], {"q": None, "n": 2}, rows[2]]
    with pytest.raises(InputError, match=f"the id of row 1 is {HALF}"):
        submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ n }}", id_column="q"))


def test_chats_and_bodies_with_half_an_emoji_fail_alone(store: Store, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("cut \ud83d", "hi")]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"m": chat}) for chat in chats))
    done = submit(store, str(tmp_path / "chats.jsonl"), CHAT)
    assert done.first_error == f"m: {HALF}"
    bodies = [line(str(n), body={"messages": chat}) for n, chat in enumerate(chats)]
    (tmp_path / "batch.jsonl").write_text("\n".join(bodies))
    done = submit(store, str(tmp_path / "batch.jsonl"), OPENAI)
    assert (done.unrendered, done.first_error) == (1, f"the body holds {HALF}")


def test_a_line_with_half_an_emoji_in_its_id_fails_alone_under_the_id_in_escapes(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join([line("a"), line("cut \ud83d"), line("b")]))
    done = submit(store, str(path), OPENAI)
    first, second, third = sorted(requests(store, done.job_id, 3))
    assert (first.custom_id, first.error, third.custom_id, third.error) == ("a", None, "b", None)
    assert (second.custom_id, second.payload) == (r"cut \ud83d", None)
    assert (second.error_type, second.error) == ("invalid_request", f"the custom_id holds {HALF}")
    shown = previews(Input(names=[str(path)]), OPENAI, 3)
    assert [(one.custom_id, one.error) for one in shown][1] == (r"cut \ud83d", f"the custom_id holds {HALF}")
    path.write_text("\n".join([line(r"cut \ud83d"), line("cut \ud83d")]))
    with pytest.raises(InputError, match="is on 2 rows; make the ids unique"):
        submit(store, str(path), OPENAI)


@pytest.mark.parametrize(
    "content",
    [
        r'{"q": "a", "\ud83d": 1}',
        r'{"q": "\ud83d", "n": NaN}',
        r'["\ud83d"]',
        r'{"q": "\ud83d"',
        '{"q": NaN}',
        r'{"q": "\ud83d", "n": ' + "[" * 200_000,
    ],
    ids=["name", "constant", "list", "cut", "NaN", "deep"],
)
def test_half_an_emoji_excuses_no_other_mistake(store: Store, tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a"}\n' + content)
    with pytest.raises(InputError, match=r"line 2 of .* is not JSON"):
        submit(store, str(tmp_path / "a.jsonl"), PROMPT)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_lacks_is_named_with_its_fix(store: Store, tmp_path: Path, number: float) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a"}\n' + json.dumps({"q": "NaN", "n": [number]}))
    with pytest.raises(InputError) as refused:
        submit(store, str(tmp_path / "a.jsonl"), PROMPT)
    constant = json.dumps(number)
    said = f"is not JSON: it has {constant}, which is no number of JSON; write null in its place"
    assert str(refused.value).startswith(f"line 2 of {tmp_path / 'a.jsonl'} {said}")


def test_mixed_and_nested_jsonl_columns_become_text(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [{"q": "a", "n": 1, "x": {"y": [1]}}, {"q": 2, "n": 2.5}, {"q": None, "n": None, "big": 2**70}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q or 'none' }}"))
    with views(store, now=0.0) as opened:
        seen = opened.duck.execute("select q, n, x, big from inputs order by row_index").fetchall()
    assert seen == [
        ("a", 1.0, '{"y":[1]}', None),
        ("2", 2.5, None, None),
        (None, None, None, str(2**70)),
    ]


@pytest.mark.parametrize("parquet", [True, False])
def test_standard_input_is_kept_with_the_job(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parquet: bool
) -> None:
    sink = io.BytesIO(b'{"q": "a"}\n{"q": "b"}\n')
    if parquet:
        sink = io.BytesIO()
        pq.write_table(pa.table({"q": ["a", "b"]}), sink)
        sink.seek(0)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(sink))
    done = submit(store, "-", PROMPT)
    assert done.job_id.startswith("stdin-")
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select q from inputs order by row_index").fetchall() == [("a",), ("b",)]


def test_custom_ids_come_from_a_column(store: Store, write_input: WriteInput) -> None:
    task = Task(kind=Kind.PROMPT, template="{{ q }}", id_column="n")
    done = submit(store, str(write_input(q=["a", "b"], n=[7, 8])), task)
    assert [row.custom_id for row in requests(store, done.job_id, 2)] == ["7", "8"]
    with pytest.raises(InputError, match="'7' is on 2 rows"):
        submit(store, str(write_input(q=["a", "b"], n=[7, 7])), task)


def test_requests_are_read_by_position_across_row_groups(store: Store, write_input: WriteInput) -> None:
    done = submit(store, str(write_input(q=[str(n) for n in range(20_000)])), PROMPT)
    reader = RequestFile(layout.requests_file(store.home, done.job_id))
    wanted = [0, 8191, 8192, 19_999, 5]
    assert [row.payload for row in reader.read(wanted)] == [str(n) for n in wanted]


@pytest.mark.parametrize(
    "name", ["Ünïcode näme.parquet", "../../etc/passwd", "-", "...", "a" * 200, "A B/C.D"]
)
def test_job_ids_are_safe_folder_names(name: str) -> None:
    job_id = next(new_ids(slug(name)))
    assert set(job_id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not job_id.startswith("-")
    assert len(job_id) < 40


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("Night Shift.v2", "night-shift-v2"), ("--a__b--", "a-b"), ("日本", "job"), ("", "job"),
        ("a" * 30, "a" * 24), ("a" * 23 + "-bc", "a" * 23),
    ],
)  # fmt: skip
def test_a_job_is_called_by_letters_digits_and_dashes(label: str, name: str) -> None:
    assert slug(label) == name


def test_a_job_is_queued_as_it_was_asked_for(store: Store, write_input: WriteInput) -> None:
    steps: list[Any] = []
    path = str(write_input(q=["a"] * 10_000))
    done = submit(
        store, path, PROMPT, name="mine", priority=3, model="org/model", tags={"team": "x"}, deadline=4e9,
        on_late=OnLate.PUSH,
        check_rows=lambda rows: steps.append(("all", rows)), before_queueing=lambda: steps.append("queueing"),
    )  # fmt: skip
    assert steps == [("all", 10_000), "queueing"]
    with store.read() as tx:
        job = catalog.get(tx, done.job_id)
    assert (job.priority, job.num_rows, job.tags, job.deadline) == (3, 10_000, {"team": "x"}, 4e9)
    assert (job.on_late, job.model, job.id.rpartition("-")[0]) == (OnLate.PUSH, "org/model", "mine")
    assert done.namesakes == []
    assert (done.rows, done.unrendered, done.first_row, done.first_error) == (10_000, 0, None, None)
    again = submit(store, path, PROMPT, name="mine")
    assert list(again.namesakes) == [done.job_id]


@pytest.mark.parametrize("step", ["check_rows", "before_queueing"])
def test_a_job_that_is_refused_in_the_last_moment_leaves_nothing(
    store: Store, write_input: WriteInput, step: str
) -> None:
    def refuse(*_: int) -> None:
        raise UsageError("too many")

    before = everything_in(store.home)
    with pytest.raises(UsageError, match="too many"):
        submit(store, str(write_input(q=["a"])), PROMPT, **{step: refuse})  # type: ignore[arg-type]
    assert everything_in(store.home) == before


@pytest.mark.parametrize(("seconds", "queued"), [(3600.0, True), (3600.1, False)])
def test_a_job_is_not_queued_once_the_sweep_may_have_taken_its_files(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch, seconds: float, queued: bool
) -> None:
    moments = iter([0.0, seconds])
    monkeypatch.setattr("conserve.jobs.requests.submit.time", SimpleNamespace(time=lambda: next(moments)))
    refused = nullcontext() if queued else pytest.raises(StoreError, match="took too long")
    with refused:
        submit(store, str(write_input(q=["a"])), PROMPT)
    with store.read() as tx:
        assert len(catalog.ids(tx)) == queued
    assert len(list(layout.jobs_folder(store.home).iterdir())) == queued


def test_an_id_that_a_job_or_a_folder_has_is_given_to_no_other(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ["a-taken", "a-folder", "a-free"]
    monkeypatch.setattr("conserve.jobs.requests.submit.new_ids", lambda name, **_: iter(ids))
    path = str(write_input(q=["a"]))
    assert submit(store, path, PROMPT).job_id == "a-taken"
    layout.job_folder(store.home, "a-folder").mkdir()
    assert submit(store, path, PROMPT).job_id == "a-free"


@pytest.mark.parametrize(
    ("task", "said", "kind"),
    [
        (replace(PROMPT, id_column="n"), "--id names 'n', but the columns are: q", InputError),
        (replace(CHAT, column="n"), "--messages names 'n', but the columns are: q", InputError),
        (
            replace(PROMPT, template="{{ n }}"),
            "the template names 'n', but the columns are: q",
            TemplateError,
        ),
    ],
)
def test_a_column_that_is_not_there_is_named_with_those_that_are(
    store: Store, write_input: WriteInput, task: Task, said: str, kind: type[UsageError]
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        submit(store, str(write_input(q=["a"])), task)
    assert type(refused.value) is kind


ODD_COLUMNS = "id,a b,it's\n1,x,y\n"


@pytest.mark.parametrize(
    ("text", "template", "prompt"),
    [
        (ODD_COLUMNS, "{{ row['a b'] }} {{ id }}", "x 1"),
        (ODD_COLUMNS, "{{ row['id'] }} {{ row[\"it's\"] | upper }}", "1 Y"),
        (ODD_COLUMNS, "{% for n in range(2) %}{{ row['a b'] }}{% endfor %}", "xx"),
        ("row,a b\nmine,x\n", "{{ row }} {{ row[0] }}", "mine m"),
        ("row,a b\nmine,x\n", "{{ row | tojson }}", '"mine"'),
        (
            "range,a b\n7,x\n",
            "{{ row | tojson }}{% for n in range(2) %}!{% endfor %}",
            '{"a b": "x", "range": "7"}!!',
        ),
        ("id,a b\n7,x\n", "{{ row | tojson }} {{ row['a b'] }} {{ id }}", '{"a b": "x", "id": "7"} x 7'),
    ],
)
def test_a_template_names_a_column_that_is_no_word_by_the_row(
    store: Store, tmp_path: Path, text: str, template: str, prompt: str
) -> None:
    (tmp_path / "odd.csv").write_text(text)
    done = submit(store, str(tmp_path / "odd.csv"), replace(PROMPT, template=template))
    (row,) = requests(store, done.job_id, 1)
    assert (row.payload, row.error) == (prompt, None)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ a b }}", "the prompt template has a mistake in line 1"),
        ("{{ a-b }}", "the template names 'a' and 'b', but the columns are: id, a b, it's"),
        ("{{ A_B }}", "the template names 'A_B', but the columns are: id, a b, it's"),
        ("{a b}", "the template names no column"),
        ("{{ row[id] }} {{ row['a b'] }}", "the template names 'row', but the columns are"),
        ("{{ row }}", "the template names 'row', but the columns are"),
        ("{{ row }} {{ row | tojson }}", "the template names 'row', but the columns are"),
    ],
)
def test_the_error_of_a_template_says_how_a_column_that_is_no_word_is_named(
    store: Store, tmp_path: Path, template: str, said: str
) -> None:
    (tmp_path / "odd.csv").write_text(ODD_COLUMNS)
    with pytest.raises(TemplateError) as refused:
        submit(store, str(tmp_path / "odd.csv"), replace(PROMPT, template=template))
    assert str(refused.value).startswith(said)
    assert str(refused.value).endswith("; a template names 'a b' as {{ row['a b'] }}")


def test_tojson_writes_dates_times_and_decimals_as_results_do(store: Store, tmp_path: Path) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 600)
    values = {
        "moment": moment,
        "zoned": moment.replace(tzinfo=UTC),
        "day": moment.date(),
        "time": moment.time(),
        "span": timedelta(days=1, seconds=2),
        "price": Decimal("12345678901234567890.50"),
        "deep": [{"day": moment.date(), "price": Decimal("-1.5"), "text": "<1.50>"}],
        "raw": b"ab",
    }
    kinds = {"raw": pa.binary(2)}
    columns = {name: pa.array([value], kinds.get(name)) for name, value in values.items()}
    pq.write_table(pa.table(columns), tmp_path / "values.parquet")
    names = [name for name in values if name != "raw"]
    template = "\n".join(f"{{{{ {name} | tojson }}}}" for name in names)
    done = submit(store, str(tmp_path / "values.parquet"), replace(PROMPT, template=template))
    (row,) = requests(store, done.job_id, 1)
    table, sink = pa.table({name: columns[name] for name in names}), io.BytesIO()
    write_lines(RowBatches(table.schema, frozenset(), table.to_batches()), sink)
    lines = zip(names, (row.payload or "").splitlines(), strict=True)
    written = ", ".join(f'"{name}": {text}' for name, text in lines)
    assert "12345678901234567890.50" in written
    parse = partial(json.loads, parse_float=Decimal)
    assert parse(f"{{{written}}}") == parse(sink.getvalue())
    with pytest.raises(
        TemplateError, match="row 0: tojson has no form for bytes; make text of them with --sql"
    ):
        submit(store, str(tmp_path / "values.parquet"), replace(PROMPT, template="{{ raw | tojson }}"))


@pytest.mark.parametrize(
    "template",
    [
        "constant",
        "a b: {{ ids }}",
        "{{ row['missing'] }}",
        "{% if id %}{{ row['a b'] }}",
        "{{ row['a b'] | no_such_filter }}",
        "{{ id",
    ],
)
def test_the_error_of_a_template_says_nothing_of_columns_that_it_does_not_mean(
    store: Store, tmp_path: Path, template: str
) -> None:
    (tmp_path / "odd.csv").write_text(ODD_COLUMNS)
    with pytest.raises(TemplateError) as refused:
        submit(store, str(tmp_path / "odd.csv"), replace(PROMPT, template=template))
    assert "a template names" not in str(refused.value)
    assert not str(refused.value).endswith(".")
