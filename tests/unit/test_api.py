"""ConServe from Python: every source becomes the same rows, and a run there is a run of the command line."""

import ast
import asyncio
import inspect
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import conserve
from conserve.api import job as api_job
from conserve.api import runs
from conserve.api.display import in_notebook, job_html, table_html
from conserve.api.running import unfinished_rows
from conserve.api.speech import in_python
from conserve.config import load
from conserve.errors import (
    EndpointUnusable,
    InputError,
    JobNotFound,
    JobRefused,
    PackageMissing,
    QueryError,
    RowsLeftOut,
    RowsUnanswerable,
    SettingsError,
    StoreError,
    UsageError,
)
from conserve.installation import install_line, quoted, uninstall_line
from conserve.store.books import readings
from conserve.store.database.store import Store
from tests import commands

QUESTIONS = [f"question {number}" for number in range(5)]
TABLE = pa.table({"q": QUESTIONS, "n": range(5)})


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fake endpoint, and look for its answers more often than users need."""
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=4")
    for module in (api_job, runs):
        monkeypatch.setattr(module, "SHOW_S", 0.02)


@pytest.fixture
def opened() -> conserve.Store:
    return conserve.open()


def line(number: int, tokens: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": tokens}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


LINES = [line(number, 1 if number < 3 else 20_000) for number in range(5)]
SLOW = "fake:?token_ms=500"  # three rows are answered, and two hardly ever


CATEGORIES = pa.DictionaryArray.from_arrays([0], pa.array(["x"], pa.string_view()))


class OddFrame:
    """A frame whose types Arrow lacks."""

    columns = ("q",)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return pa.chunked_array([["a"]]).__arrow_c_stream__()


def rows() -> Iterator[dict[str, Any]]:
    yield from TABLE.to_pylist()


def pandas_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"q": QUESTIONS, "n": range(5)})


def polars_frame() -> Any:
    return pytest.importorskip("polars").DataFrame({"q": QUESTIONS, "n": list(range(5))})


SOURCES: dict[str, Callable[[], Any]] = {
    "a table": lambda: TABLE,
    "batches": lambda: TABLE.to_reader(max_chunksize=2),
    "a dataset": lambda: pa.dataset.dataset(TABLE),
    "a relation": lambda: duckdb.from_arrow(TABLE, connection=duckdb.connect()),
    "dicts": lambda: TABLE.to_pylist(),
    "a generator": rows,
    "pandas": pandas_frame,
    "polars": polars_frame,
    "polars, lazily": lambda: polars_frame().lazy(),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_every_source_becomes_the_same_rows_kept_in_the_store(
    opened: conserve.Store, make: Callable[[], Any]
) -> None:
    job = opened.submit(make(), prompt="{{ q }} {{ n }}")
    assert job.progress().rows == 5
    (kept,) = opened.path.glob(f"jobs/{job.id}/inputs.parquet")
    assert pq.read_table(kept).to_pydict() == TABLE.to_pydict()
    job.run(progress=False)
    asked = job.results(with_inputs=True, with_prompts=True).arrow()
    assert asked["prompt"].to_pylist() == [f"{q} {n}" for n, q in enumerate(QUESTIONS)]
    assert asked["q"].to_pylist() == QUESTIONS


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"q": ["a", 1]}, "Conversion failed for column q with type object"),
        ({"q": [{"a": 1}, ["b"]]}, "cannot mix list and non-list"),
        ({"q": [object()]}, "did not recognize Python value type"),
    ],
)
def test_a_frame_that_arrow_cannot_hold_is_a_mistake_of_the_input(
    opened: conserve.Store, columns: dict[str, list[Any]], said: str
) -> None:
    frame = pytest.importorskip("pandas").DataFrame(columns)
    with pytest.raises(InputError, match=f"{said}.*; cast or rename the column and submit again"):
        opened.submit(frame, prompt="{{ q }}")
    with pytest.raises(InputError, match="Duplicate column names found"):
        opened.submit(pandas_frame().set_axis(["q", "q"], axis=1), prompt="{{ q }}")
    assert opened.jobs() == []


def test_periods_of_pandas_are_text(opened: conserve.Store) -> None:
    pandas = pytest.importorskip("pandas")
    months = pandas.PeriodIndex(["2020-01", None, "2020-03"], freq="M")
    weeks = pandas.period_range("2020-01-06", periods=3, freq="W", name="week")
    job = opened.submit(
        pandas.DataFrame({"month": months}, index=weeks), prompt="{{ month or 'none' }} {{ week }}"
    )
    job.run(progress=False)
    asked = job.results(with_inputs=True, with_prompts=True).arrow()
    assert asked["prompt"].to_pylist() == [
        "2020-01 2020-01-06/2020-01-12",
        "none 2020-01-13/2020-01-19",
        "2020-03 2020-01-20/2020-01-26",
    ]
    assert asked["month"].to_pylist() == ["2020-01", None, "2020-03"]


def test_a_sparse_column_of_pandas_is_a_mistake_of_the_input(opened: conserve.Store) -> None:
    sparse = pandas_frame().astype({"n": "Sparse[int]"})
    with pytest.raises(InputError, match=r"Sparse pandas data \(column n\) not supported.*; cast or rename"):
        opened.submit(sparse, prompt="{{ q }}")
    assert opened.jobs() == []


def test_categories_of_polars_are_text_at_any_depth(opened: conserve.Store) -> None:
    polars = pytest.importorskip("polars")
    kinds = polars.Categorical, polars.Enum(["x", "y"])
    columns = {
        "plain": polars.Series(["x", "y"], dtype=kinds[0]),
        "list": polars.Series([["x"], ["y", None]], dtype=polars.List(kinds[0])),
        "struct": polars.Series([{"a": "x"}, None], dtype=polars.Struct({"a": kinds[1]})),
    }
    job = opened.submit(
        polars.DataFrame(columns), prompt="{{ plain }} {{ list | tojson }} {{ struct | tojson }}"
    )
    job.run(progress=False)
    asked = job.results(with_prompts=True).arrow()
    assert asked["prompt"].to_pylist() == ['x ["x"] {"a": "x"}', 'y ["y", null] null']


@pytest.mark.parametrize("kind", ["Int128", "UInt128"])
def test_a_column_of_polars_that_arrow_lacks_is_named(opened: conserve.Store, kind: str) -> None:
    polars = pytest.importorskip("polars")
    frame = polars_frame().with_columns(n=polars.Series(range(5), dtype=getattr(polars, kind)))
    for source in (frame, frame.lazy()):
        with pytest.raises(
            InputError, match=rf"hold the frame \(column 'n' of type {kind}; .*; cast or rename"
        ):
            opened.submit(source, prompt="{{ q }}")
    assert opened.jobs() == []


def test_values_of_a_relation_that_arrow_or_parquet_lacks_are_their_text(opened: conserve.Store) -> None:
    """Values are those of a job that the command line submits with the same query."""
    sql = (
        "select 340282366920938463463374607431768211455::uhugeint as n, '101'::bit as b, "
        "'12:30:00+02'::timetz as t, interval 90 minute as i, 7 as plain"
    )
    job = opened.submit(duckdb.sql(sql), prompt="{{ n }} {{ b }} {{ t }} {{ i }} {{ plain }}")
    job.run(progress=False)
    asked = job.results(with_inputs=True, with_prompts=True).arrow()
    assert asked["prompt"].to_pylist() == [
        "340282366920938463463374607431768211455 101 12:30:00+02 01:30:00 7"
    ]
    assert asked["n"].to_pylist() == ["340282366920938463463374607431768211455"]


def test_a_relation_that_fails_is_a_mistake_of_the_input(opened: conserve.Store) -> None:
    with pytest.raises(InputError, match=r"the relation fails: .*no such day; correct it and submit again"):
        opened.submit(duckdb.sql("select error('no such day') as q"), prompt="{{ q }}")
    late = duckdb.sql("select if(n < 99999, 'a', error('no such day')) as q from range(100000) t(n)")
    with pytest.raises(
        InputError, match=r"the table cannot be read \(.*no such day\); correct it and submit"
    ):
        opened.submit(late, prompt="{{ q }}")
    assert opened.jobs() == []


def test_a_series_of_pandas_is_rows(opened: conserve.Store) -> None:
    series = pytest.importorskip("pandas").Series
    assert opened.submit(series([{"q": "a"}, {"q": "b"}]), prompt="{{ q }}").progress().rows == 2
    with pytest.raises(InputError, match="row 0 of the rows is of type str; give a dict of its columns"):
        opened.submit(series(["a"]), prompt="{{ q }}")


def test_paths_patterns_and_lists_of_them_are_files(opened: conserve.Store, tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(TABLE, tmp_path / f"{name}.parquet")
    one = opened.submit(tmp_path / "a.parquet", prompt="{{ q }}", keep_input="reference")
    assert one.id.startswith("a-")
    assert one.progress().rows == 5
    assert opened.submit(str(tmp_path / "*.parquet"), prompt="{{ q }}").progress().rows == 10
    both = [tmp_path / "a.parquet", str(tmp_path / "b.parquet")]
    assert opened.submit(both, prompt="{{ q }}").progress().rows == 10


def test_dicts_without_a_prompt_are_openai_lines(opened: conserve.Store) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
    job = opened.submit([line])
    job.run(progress=False)
    assert [row["custom_id"] for row in job.results()] == ["x"]


def test_a_named_index_of_pandas_is_a_column_and_another_is_not(opened: conserve.Store) -> None:
    frame = pandas_frame()
    named = opened.submit(frame.set_index("n"), prompt="{{ q }}", id="n")
    named.run(progress=False)
    assert named.results().arrow()["custom_id"].to_pylist() == list("01234")
    filtered = opened.submit(frame[frame.n > 2], prompt="{{ q }}")
    (kept,) = opened.path.glob(f"jobs/{filtered.id}/inputs.parquet")
    assert pq.read_table(kept).column_names == ["q", "n"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (7, "made of a value of type int; give a path, a table, a frame, a relation, or dicts"),
        ({"q": "one"}, "a job cannot be made of a value of type dict"),
        (OddFrame(), "Arrow cannot hold the frame (Cannot import schema"),
        (pa.chunked_array([["a"]]), "row 0 of the rows is of type StringScalar; give a dict"),
        (type("Series", (list,), {"__module__": "pandas"})([7]), "row 0 of the rows is of type int"),
        ([{"q": "a"}, 7], "row 1 of the rows is of type int; give a dict of its columns"),
        ([{"q": object()}], "row 0 of the rows has no JSON (a value of type object); give text, numbers"),
        ([], "there are no rows; nothing was submitted"),
        (pa.table({"q": pa.array([], pa.string())}), "the input has no rows; nothing was submitted"),
        (pa.table([["a"], ["b"]], names=["q", "q"]), "the table has two columns called 'q'"),
        (
            pa.table({"q": ["a"], "d": CATEGORIES}),
            "the table cannot be kept as Parquet (column 'd': Unsupported cast from dictionary<values=string_view",
        ),
        (
            pa.table({"q": ["a"], "d": pa.array([None], pa.month_day_nano_interval())}),
            "the table cannot be kept as Parquet (column 'd': Unhandled type",
        ),
    ],
)
def test_a_source_that_is_none_leaves_nothing_behind(opened: conserve.Store, source: Any, said: str) -> None:
    with pytest.raises(InputError) as raised:
        opened.submit(source, prompt="{{ q }}")
    assert said in str(raised.value)
    assert opened.jobs() == []
    assert list(opened.path.glob("jobs/*")) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": "{{ q }}", "messages": "q"}, "give prompt or messages, not both"),
        ({}, 'no requests of its own; say what to ask: prompt "... {{ COLUMN }}" or messages COLUMN'),
        ({"prompt": "same"}, "give constant_prompt"),
        ({"prompt": "{{ q }}", "params": {"max_tokenz": 1}}, "params: "),
        ({"prompt": "{{ q }}", "order": "upwards"}, "order takes prefix, input, random or random:SEED"),
        ({"prompt": "{{ q }}", "format": "csv"}, "format and keep_input are for files"),
        ({"prompt": "{{ q }}", "priority": 2**40}, "priority goes from"),
        ({"prompt": "{{ q }}", "tags": {"a": 1}}, "a tag and its value are text, not 'a': 1"),
        ({"prompt": "{{ q }}", "name": "!"}, "name takes Latin letters"),
    ],
)
def test_errors_name_arguments_and_not_flags(
    opened: conserve.Store, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        opened.submit(TABLE, **arguments)
    assert said in str(raised.value)
    assert "--" not in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "said",
    [
        f"no engine is installed (vLLM); run: {install_line('cpu')}",
        f"vLLM is a CUDA build; run: {uninstall_line('vllm')}; {install_line('cpu')}",
        "there is no file day--night.parquet",
        "the columns are: a--b, '--c'; a template names 'a--b' as {{ row['a--b'] }}",
        "there is no job 'a--b'",
    ],
)
def test_names_and_commands_of_other_programs_stay_as_they_are(said: str) -> None:
    assert in_python(said) == said
    assert in_python(f"{said}, or name an HTTP endpoint: --endpoint URL") == (
        f"{said}, or name an HTTP endpoint: endpoint URL"
    )


def test_commands_in_a_sentence_are_calls_where_there_is_one() -> None:
    said = "go on with: conserve retry gsm-k3f9; or run: conserve retry --all"
    assert in_python(said) == "go on with: store.job('gsm-k3f9').retry(); or run: conserve retry --all"
    said = "run: conserve run --endpoint URL; give --api-key, or more with --timeout"
    assert in_python(said) == (
        "run: conserve run --endpoint URL; give api_key, or more with the setting sql_timeout_s"
    )


@pytest.mark.parametrize("name", ["it's", "do$lar", 'quo"te`s'])
def test_the_relation_that_an_error_names_reads_the_file(
    opened: conserve.Store, tmp_path: Path, name: str
) -> None:
    for path, text in (
        (tmp_path / f"{name}.csv", "id;q\n007;a,b\n"),
        (tmp_path / f"{name}.tabs.csv", "id\tq\n007\ta,b\n"),
        (tmp_path / f"{name}.json", '[{"id": "007", "q": "a,b"}]'),
    ):
        path.write_text(text)
        with pytest.raises(UsageError) as raised:
            opened.submit(path, prompt="{{ q }}")
        offered = str(raised.value).partition("duckdb.sql(")[2].rpartition(")")[0]
        job = opened.submit(duckdb.sql(ast.literal_eval(offered)), prompt="{{ id }} {{ q }}")
        job.run(progress=False)
        assert job.results(with_prompts=True).arrow()["prompt"].to_pylist() == ["007 a,b"]


def test_values_in_a_sentence_are_as_python_writes_them() -> None:
    column = "{{ row['a$b'] }}"
    assert in_python(f"use --prompt {quoted(column)} to send it") == f'use prompt "{column}" to send it'
    assert in_python("make text of them with --sql") == "make text of them with duckdb.sql()"


def test_a_place_that_cannot_hold_a_store_is_that_of_the_call() -> None:
    with pytest.raises(StoreError, match=r"; check the path of conserve\.open\(\) or CONSERVE_HOME"):
        conserve.open("/proc/nope")


def test_a_folder_beside_a_database_that_a_variable_names_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = f"sqlite:///{tmp_path / 'team.db'}"
    conserve.open(tmp_path / "work", store=database)
    monkeypatch.setenv("CONSERVE_STORE", database)
    conserve.open()
    conserve.open(tmp_path / "work", store=database)
    with pytest.warns(UserWarning, match="which CONSERVE_STORE names") as warned:
        conserve.open(tmp_path / "work")
    assert [one.filename for one in warned] == [__file__]


def test_rows_that_cannot_be_sent_are_warned_of_where_they_were_submitted(opened: conserve.Store) -> None:
    rows = [{"q": {"a": "b"}}, {"q": {}}]

    async def submit() -> None:
        opened.submit(rows, prompt="{{ q.a }}")
        await opened.submit.aio(rows, prompt="{{ q.a }}")
        conserve.map(rows, "{{ q.a }}", store=opened, endpoint="fake:", progress=False)

    with pytest.warns(RowsUnanswerable, match="1 of 2 rows") as warned:
        asyncio.run(submit())
    assert [one.filename for one in warned] == 3 * [__file__]
    assert len({one.lineno for one in warned}) == 3


def test_the_command_line_and_python_see_one_store(opened: conserve.Store, tmp_path: Path) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}", name="nightly", tags={"team": "search"})
    (listed,) = json.loads(commands.conserve("jobs", "--json").stdout)
    assert (listed["id"], listed["tags"]) == (job.id, {"team": "search"})
    assert commands.conserve("run", "nightly").returncode == 0
    assert job.status == "completed"
    lines = commands.conserve("results", "nightly").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == job.results().arrow()["text"].to_pylist()


def test_answers_come_in_the_form_that_is_asked_for(opened: conserve.Store, tmp_path: Path) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}", schema={"type": "object"})
    job.run(progress=False)
    texts = job.results().arrow()["text"].to_pylist()
    assert len(set(texts)) == 5
    relation = job.results().duckdb()
    assert [row[relation.columns.index("text")] for row in relation.fetchall()] == texts
    first = next(iter(job.results()))["finished_at"]
    assert relation.project("finished_at").fetchall()[0][0] == first.replace(tzinfo=None)
    assert [row["text"] for row in job.results()] == texts
    assert job.results().write(tmp_path / "answers.parquet") == 5
    assert pq.read_table(tmp_path / "answers.parquet")["text"].to_pylist() == texts
    with pytest.raises(UsageError, match="names no format"):
        job.results().write(tmp_path / "answers.xyz")
    assert job.results().write(tmp_path / "answers.xyz", format="csv") == 5
    for wrong in ("xml", "openai", "CSV"):
        with pytest.raises(UsageError, match=f"format is parquet, jsonl or csv, not '{wrong}'"):
            job.results().write(tmp_path / "wrong.csv", format=wrong)
    assert not (tmp_path / "wrong.csv").exists()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_answers_come_as_frames(opened: conserve.Store, library: str) -> None:
    pytest.importorskip(library)
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.run(progress=False)
    frame = getattr(job.results(), library)()
    assert list(frame["text"]) == job.results().arrow()["text"].to_pylist()


@pytest.mark.parametrize("beside", ["nothing", "pandas"])
def test_times_in_nanoseconds_are_pythons_own(opened: conserve.Store, beside: str) -> None:
    if beside != "nothing":
        pytest.importorskip(beside)
    times = pa.array([0, 1], pa.timestamp("ns"))
    job = opened.submit(pa.table({"q": ["a", "b"], "at": times}), prompt="{{ q }}")
    job.run(progress=False)
    whole, finer = job.results(with_inputs=True)
    assert type(whole["at"]) is datetime
    assert whole["at"] == datetime(1970, 1, 1)
    assert finer["at"] == "1970-01-01 00:00:00.000000001"


def test_a_package_that_is_missing_is_named(opened: conserve.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(PackageMissing, match="polars is not installed; install it beside ConServe, or use"):
        job.results().polars()


def test_sql_answers_with_a_relation_that_joins_what_the_program_has(opened: conserve.Store) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.run(progress=False)
    answers = opened.sql("select row_index, text from results order by row_index", jobs=[job.id])
    gold = pa.table({"row_index": range(5), "right": [True, False] * 2 + [True]})
    joined = answers.join(duckdb.from_arrow(gold, connection=duckdb.default_connection()), "row_index")
    assert joined.filter('"right"').count("*").fetchall() == [(3,)]
    with pytest.raises(QueryError, match="only SELECT is possible"):
        opened.sql("create table x as select 1")
    with pytest.raises(QueryError, match="and nothing else"):
        opened.sql("select * from '/etc/passwd'")


def test_sql_reads_files_that_it_is_given(opened: conserve.Store, tmp_path: Path) -> None:
    gold = tmp_path / "gold.csv"
    gold.write_text("row_index,label\n0,good\n")
    opened.submit(TABLE, prompt="{{ q }}").run(progress=False)
    query = "select label from results join gold using (row_index)"
    assert opened.sql(query, files={"gold": gold}).fetchall() == [("good",)]


def busy(stop: threading.Event) -> None:
    """Keep DuckDB's threads, and those of polars, at work."""
    duck = duckdb.connect()
    polars = sys.modules.get("polars")
    while not stop.is_set():
        duck.execute("select sum(range * random()) from range(1000000)").fetchall()
        if polars is not None:
            polars.DataFrame({"n": range(100_000)}).group_by(polars.col("n") % 7).agg(polars.len())


@pytest.mark.full
def test_queries_are_answered_beside_threads_and_a_run(opened: conserve.Store) -> None:
    job = opened.submit(LINES)
    job.start(endpoint=SLOW)
    stop = threading.Event()
    working = threading.Thread(target=busy, args=(stop,))
    working.start()
    try:
        for _ in range(30):
            assert len(opened.sql("select * from jobs").fetchall()) == 1
            assert job.results(with_inputs=True).arrow().num_rows <= 3
    finally:
        stop.set()
        working.join()
        job.stop()


def test_documents_are_json_in_a_relation_and_values_in_a_dict(opened: conserve.Store) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}", params={"n": 2})
    job.run(progress=False)
    (row, *_) = job.results()
    kinds = dict(zip(job.results().duckdb().columns, map(str, job.results().duckdb().types), strict=True))
    assert kinds["choices"] == "JSON"
    assert row["choices"] is None or isinstance(row["choices"], list)


def test_results_that_cannot_be_read_are_warned_of(opened: conserve.Store) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.run(progress=False)
    (shard,) = opened.path.glob(f"jobs/{job.id}/**/0*.parquet")
    shard.write_bytes(b"no shard")
    with pytest.warns(RowsLeftOut, match=job.id):
        assert job.results().arrow().num_rows == 0


def test_failed_rows_raise_nothing_and_come_back(opened: conserve.Store) -> None:
    job = opened.submit([{"q": "good"}, {"q": "REJECT this"}], prompt="{{ q }}")
    done = job.run(progress=False)
    assert (done.succeeded, done.failed, done.done) == (1, 1, 2)
    assert job.retry() == 1
    assert job.run(progress=False).failed == 1
    assert [row["error_type"] for row in job.results()] == [None, "invalid_request"]


def test_a_job_that_may_not_run_says_why(opened: conserve.Store) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.pause()
    assert job.status == "paused"
    with pytest.raises(JobRefused, match="is paused and 5 rows of it wait"):
        job.run(progress=False)
    job.resume()
    assert job.run(progress=False).succeeded == 5
    again = job.run(progress=False)
    assert (again.done, again.jobs) == (0, {job.id: "completed"})
    cancelled = opened.submit(TABLE, prompt="{{ q }}")
    cancelled.cancel()
    with pytest.raises(JobRefused, match="was cancelled"):
        cancelled.run(progress=False)


def test_a_job_keeps_its_model_unless_it_is_rebound(opened: conserve.Store) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}", model="other")
    with pytest.raises(JobRefused, match="is bound to other"):
        job.run(endpoint="fake:?model=one", progress=False)
    job.resume()
    assert job.run(endpoint="fake:?model=one", rebind=True, progress=False).succeeded == 5
    assert job.progress().model == "one"


def test_jobs_are_found_by_id_beginning_name_and_age(opened: conserve.Store) -> None:
    first, second = (opened.submit(TABLE, prompt="{{ q }}", name="nightly") for _ in range(2))
    assert opened.jobs() == [first, second]
    assert opened.job(first.id) == first
    assert opened.job("nightly") == opened.job("last") == second
    with pytest.raises(JobNotFound, match=r"run: store\.jobs\(\)$"):
        opened.job("zzz")


def test_handles_are_pickled_and_engines_are_not(opened: conserve.Store) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.run(progress=False)
    again = pickle.loads(pickle.dumps(job))
    assert again == job
    assert hash(again) == hash(job)
    assert again.results().arrow().num_rows == 5
    assert pickle.loads(pickle.dumps(opened)).jobs() == [job]
    assert pickle.loads(pickle.dumps(job.results())).arrow().num_rows == 5
    with pytest.raises(UsageError, match="an engine cannot be pickled"):
        pickle.dumps(conserve.Engine())


def test_an_engine_stays_up_across_jobs(opened: conserve.Store) -> None:
    jobs = [opened.submit(TABLE, prompt="{{ q }}") for _ in range(2)]
    with conserve.Engine("one", endpoint="fake:?model=one", progress=False) as engine:
        assert "ready" in repr(engine)
        endpoint = engine._endpoint
        for job in jobs:
            assert job.run(engine=engine, progress=False).succeeded == 5
            assert engine._endpoint is endpoint
        with pytest.raises(UsageError, match="give the engine alone"):
            jobs[0].run(engine=engine, model="other")
    assert endpoint is not None
    assert endpoint.calls == 10  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="the engine is closed"):
        opened.submit(TABLE, prompt="{{ q }}").run(engine=engine, progress=False)


def test_map_is_a_job_in_one_line(opened: conserve.Store) -> None:
    answers = conserve.map(TABLE, "{{ q }}", params={"max_tokens": 2}, name="mapped", progress=False)
    assert answers.arrow().select(["n", "q"]).to_pydict() == {"n": [0, 1, 2, 3, 4], "q": QUESTIONS}
    assert all(len(row["text"].split()) == 2 for row in answers)
    assert opened.job("mapped").status == "completed"


def test_map_takes_the_arguments_that_its_errors_name(opened: conserve.Store) -> None:
    params = {"max_tokenz": 2}
    with pytest.raises(UsageError, match="give constant_prompt"):
        conserve.map(TABLE, "hi", progress=False)
    with pytest.raises(UsageError, match="unknown_params sends it all the same"):
        conserve.map(TABLE, "{{ q }}", params=params, progress=False)
    answers = conserve.map(
        TABLE, "hi", params=params, constant_prompt=True, unknown_params=True, progress=False
    )
    assert answers.arrow().num_rows == 5


def test_map_leaves_no_job_where_nothing_could_be_asked(opened: conserve.Store) -> None:
    for endpoint, error in (("localhost:9", SettingsError), ("http://127.0.0.1:9", EndpointUnusable)):
        with pytest.raises(error):
            conserve.map(TABLE, "{{ q }}", endpoint=endpoint, progress=False)
    assert opened.jobs() == []


def test_map_names_the_job_of_rows_that_were_asked(opened: conserve.Store) -> None:
    fault = patch(
        "conserve.endpoints.fake.FakeEndpoint.complete", side_effect=EndpointUnusable("no such model")
    )
    with fault, pytest.raises(EndpointUnusable) as caught:
        conserve.map(TABLE, "{{ q }}", progress=False)
    (job,) = opened.jobs()
    said = f"its rows are job {job.id}, and store.job({job.id!r}).run() goes on with them"
    assert caught.value.__notes__ == [said]
    assert job.run(progress=False).succeeded == 5


def test_the_twins_that_are_awaited_work_in_a_running_loop(opened: conserve.Store) -> None:
    async def work() -> list[int]:
        job = await opened.submit.aio(TABLE, prompt="{{ q }}")
        running = asyncio.create_task(job.run.aio(progress=False))
        seen = [answer.row_index async for answer in job]
        assert (await running).succeeded == 5
        assert await job.wait.aio() == "completed"
        assert (await job.results().arrow.aio()).num_rows == 5
        async with conserve.Engine(endpoint="fake:", progress=False) as engine:
            other = await opened.submit.aio(TABLE, prompt="{{ q }}")
            await other.run.aio(engine=engine, progress=False)
        assert (await conserve.map.aio(TABLE, "{{ q }}", progress=False)).arrow().num_rows == 5
        with pytest.raises(UsageError, match="give prompt or messages"):
            await opened.submit.aio(TABLE, prompt="{{ q }}", messages="q")
        return seen

    assert sorted(asyncio.run(work())) == [0, 1, 2, 3, 4]


def test_blocking_calls_work_while_a_loop_runs_as_in_a_notebook(opened: conserve.Store) -> None:
    async def cell() -> None:
        job = opened.submit(TABLE, prompt="{{ q }}")
        assert job.run(progress=False).succeeded == 5
        assert job.wait() == "completed"

    asyncio.run(cell())


def test_answers_are_seen_as_they_come_each_once(opened: conserve.Store) -> None:
    job = opened.submit([{"q": str(n)} for n in range(300)], prompt="{{ q }}")
    job.start()
    seen = [answer.row_index for answer in job]
    assert sorted(seen) == list(range(300))
    assert job.wait() == "completed"


def test_a_run_that_is_stopped_saves_its_rows_and_the_next_goes_on(opened: conserve.Store) -> None:
    job = opened.submit(LINES)
    job.start(endpoint=SLOW)
    with pytest.raises(UsageError, match="running in this process already"):
        job.start()
    answers = iter(job)
    assert sorted(next(answers).row_index for _ in range(3)) == [0, 1, 2]
    job.stop()
    assert (job.progress().done, job.progress().running) == (3, 0)
    assert job.run(progress=False).done == 2
    assert [row["row_index"] for row in job.results()] == list(range(5))


def test_a_cancelled_task_saves_its_rows_before_it_ends(opened: conserve.Store) -> None:
    job = opened.submit(LINES)

    async def work() -> None:
        running = asyncio.create_task(job.run.aio(endpoint=SLOW, progress=False))
        answers = aiter(job)
        assert sorted([(await anext(answers)).row_index for _ in range(3)]) == [0, 1, 2]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(work())
    assert (job.progress().done, job.progress().running) == (3, 0)


def test_ctrl_c_saves_the_rows_and_is_passed_on(opened: conserve.Store) -> None:
    job = opened.submit(LINES)
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        list(islice(job, 3))
        signal.pthread_kill(main, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        job.run(endpoint=SLOW, progress=False)
    pressing.join()
    assert (job.progress().done, job.progress().running) == (3, 0)


def test_the_error_of_a_run_in_the_background_is_raised_where_it_is_waited_for(
    opened: conserve.Store,
) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.start(endpoint="ftp://nowhere")
    with pytest.raises(SettingsError, match="endpoint takes an http"):
        job.wait()
    with pytest.raises(TimeoutError):
        job.wait(timeout_s=0)
    job.start(endpoint="ftp://nowhere")
    with pytest.raises(SettingsError):
        list(job)


def test_waiting_has_an_end(opened: conserve.Store) -> None:
    with pytest.raises(TimeoutError, match="is queued after 0 s"):
        opened.submit(TABLE, prompt="{{ q }}").wait(timeout_s=0)


BEGUN = f"""
import conserve
job = conserve.open().submit({LINES!r}, name="nightly")
job.start(endpoint={SLOW!r})
answers = iter(job)
for _ in range(3):
    print(next(answers).row_index, flush=True)
"""


def test_a_killed_notebook_goes_on_with_the_job_by_name(opened: conserve.Store) -> None:
    hangs = f"{BEGUN}\nimport time\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hangs], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert sorted(int(first.stdout.readline()) for _ in range(3)) == [0, 1, 2]
        first.kill()
    job = opened.job("nightly")
    assert job.progress().done == 3
    assert job.run(progress=False).done == 2
    assert [row["row_index"] for row in job.results()] == list(range(5))


def test_a_program_that_ends_gives_its_rows_back(opened: conserve.Store) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGUN], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    left = opened.job("nightly").progress()
    assert (left.done, left.running) == (3, 0)


def test_open_takes_settings_by_name_and_no_others(tmp_path: Path) -> None:
    store = conserve.open(tmp_path / "other", endpoint="fake:?tokens=1")
    assert store.path == tmp_path / "other"
    job = store.submit(TABLE, prompt="{{ q }}")
    job.run(progress=False)
    assert {row["completion_tokens"] for row in job.results()} == {1}
    with pytest.raises(SettingsError, match="there is no setting 'enpoint'; there are: home, store"):
        conserve.open(enpoint="x")


def test_notebooks_see_html_and_hostile_text_stays_text(opened: conserve.Store) -> None:
    job = opened.submit([{"q": "<script>"}, {"q": "x"}], prompt="{{ q }}", name="shown")
    assert 'value="0" max="2"' in job_html(job.progress())
    assert set(job._repr_mimebundle_()) == {"text/plain", "text/html"}
    job.run(progress=False)
    assert 'value="2" max="2"' in job._repr_html_()
    shown = job.results(with_inputs=True)._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert job.id in opened._repr_html_()
    assert "…" in table_html(["a"], [["x" * 500]])
    assert not in_notebook()


def test_progress_is_said_on_stderr(opened: conserve.Store, capsys: pytest.CaptureFixture[str]) -> None:
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.run()
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{job.id}: completed, 5 of 5 rows done; 5 rows in " in said.err.splitlines()[-1]


def test_a_job_is_read_alone(opened: conserve.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = opened.submit(TABLE, prompt="{{ q }}"), opened.submit(TABLE, prompt="{{ q }}")
    job.run(progress=False)
    read: list[str] = []
    to_reading = readings.to_reading
    monkeypatch.setattr(readings, "to_reading", lambda row: read.append(row[0]) or to_reading(row))
    assert job.wait() == job.status == "completed"
    assert len(list(job)) == 5
    with closing(Store.open(load())) as store:
        assert [unfinished_rows(store, only) for only in ([job.id], None)] == [0, 5]
    assert set(read) == {job.id}


def test_a_terminal_has_one_line_that_is_written_over(
    opened: conserve.Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    job = opened.submit(TABLE, prompt="{{ q }}")
    job.run()
    first, *others = capsys.readouterr().err.split("\r")
    assert first == ""
    assert others[0] == "starting the fake endpoint\x1b[K"
    assert others[-1].startswith(f"{job.id}: completed, 5 of 5 rows done; 5 rows in ")
    assert others[-1].endswith("\x1b[K\n")


def test_public_names_have_docstrings_and_signatures() -> None:
    for name in conserve.__all__:
        assert getattr(conserve, name).__doc__ or name == "errors", name
    assert "source" in inspect.signature(conserve.Store.submit).parameters
    assert "timeout_s" in inspect.signature(conserve.open().submit(TABLE, prompt="{{ q }}").wait).parameters
    assert set(conserve.__all__) <= set(dir(conserve))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = conserve.nothing
