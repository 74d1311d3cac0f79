"""SQL sees journal, shards and inputs as one, and nothing else."""

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import event, text

from conserve.api.queries import results_query, sql_query
from conserve.config import Settings, load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import Call, Completion, OnTokens
from conserve.errors import InputError, QueryError
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.source import Input
from conserve.jobs.task import Kind, Task
from conserve.store.books import shards
from conserve.store.books.catalog import Source
from conserve.store.database.store import Store
from conserve.store.files import digests, layout
from conserve.store.sql import answer, duplicates, export, query, scratch
from conserve.store.sql import snapshot as snapshots
from conserve.store.sql.batches import RowBatches, rows_of
from conserve.store.sql.duplicates import first_duplicate
from conserve.store.sql.export import Format
from conserve.store.sql.input_columns import input_types, shown_names
from conserve.store.sql.input_parts import changed, parts_of
from conserve.store.sql.mistakes import one_line
from conserve.store.sql.per_row import by_row
from conserve.store.sql.query import VIEWS, Views, ask, views, views_of
from conserve.store.sql.read_only import names_writing, only_reads
from conserve.store.sql.readable import LeftOut
from conserve.store.sql.relation import relation
from conserve.store.sql.scan import scanned
from conserve.store.sql.snapshot import snapshot
from conserve.store.sql.unsupported_values import read_fault
from tests import commands, virtual_time
from tests.conftest import WriteInput, own_environment
from tests.store_rows import finish, leased
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


def drain(store: Store, **script: object) -> None:
    async def run() -> None:
        await harvester(store, FakeEndpoint(Script(**script))).run(asyncio.Event())  # type: ignore[arg-type]

    virtual_time.run(run())


def harvester(store: Store, endpoint: FakeEndpoint) -> Harvester:
    """A harvester that goes by the clock of the running loop."""
    return Harvester(store, endpoint, clock=asyncio.get_running_loop().time)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    """Views over a job of three rows, of which one failed. No query changes them, so that all tests share them."""
    folder = tmp_path_factory.mktemp("views")
    path = folder / "input.parquet"
    pq.write_table(pa.table({"q": ["a", "b", "REJECT"]}), path)
    with pytest.MonkeyPatch.context() as environment:
        own_environment(environment, folder / "home")
        store = Store.open(load())
        with closing(store):
            submit(store, str(path), TASK)
            drain(store)
            taken = snapshot(store, now=0.0)
    with scratch.place() as spill, query.opened(taken, spill=spill) as views:
        yield views


@pytest.mark.parametrize(
    "sql",
    [
        "copy results to 'out.csv'",
        "copy (select 1) to 'out.parquet'",
        "attach 'other.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "pragma database_list",
        "create table x as select 1",
        "drop table jobs",
        "insert into jobs select * from jobs",
        "explain analyze copy (select 1) to 'x.csv'",
        "select 1; select 2",
        "",
        "select * from read_text('/etc/passwd')",
        "select * from read_csv('/etc/passwd')",
        "select * from glob('/etc/*')",
        "select * from '/etc/passwd'",
        "select * from opened",
        "select getenv('HOME')",
    ],
)
def test_nothing_but_the_views_is_in_reach(opened: Views, sql: str) -> None:
    with pytest.raises(QueryError) as error:
        ask(opened.duck, sql).fetchall()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("", "there is no SQL"),
        ("select 1; select 2", "one statement at a time"),
        ("copy jobs to 'out.csv'", "nothing else: only SELECT is possible"),
        ("select '\udcff'", "is not UTF-8"),
        ("select * from read_text('/etc/passwd')", "nothing else: no other files, databases or settings"),
        ("from nowhere", "^there is no view nowhere; conserve sql reads the views .* and nothing else$"),
        (
            "from result",
            "^there is no view result; did you mean results. If not, conserve sql reads the views",
        ),
        (
            "select nope from jobs",
            '^there is no column nope; the columns are shown by: conserve sql "describe jobs"$',
        ),
        (
            "select txt from results join inputs using (job_id)",
            "^there is no column txt; did you mean text. If not, the columns are shown by: "
            'conserve sql "describe results" .or inputs.$',
        ),
        (
            "select * from results join inputs using (nope)",
            '^there is no column nope; the columns are shown by: conserve sql "describe results" .or inputs.$',
        ),
        (
            'select mean from (select text as "Mean Text" from results)',
            '^there is no column mean; did you mean "Mean Text". If',
        ),
        ("select nope(1)", "^there is no function nope; correct the query and ask again$"),
        ("select contain(1)", "^there is no function contain; did you mean contains. If not, correct the"),
        ("selec 1", '^syntax error at or near "selec"; correct the query and ask again$'),
        (
            "select sum(text) from results",
            r"^No function matches the given name and argument types 'sum.VARCHAR.'. You might need to add "
            "explicit type casts; the columns are shown by",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong(opened: Views, sql: str, said: str) -> None:
    with pytest.raises(QueryError, match=said):
        ask(opened.duck, sql)


def test_an_error_is_one_line_without_what_points_at_the_mistake() -> None:
    said = "Conversion Error: no number: '^'\n\nLINE 1: select cast('^' as int)\n               ^^^^^^^^^^^"
    assert one_line(said) == "Conversion Error: no number: '^' LINE 1: select cast('^' as int)"


def test_an_answer_may_have_so_many_rows_at_most(opened: Views) -> None:
    assert ask(opened.duck, "from range(9) t(n) order by n desc;", limit=2).fetchall() == [(8,), (7,)]
    assert len(ask(opened.duck, "from range(9)").fetchall()) == 9
    assert ask(opened.duck, "pivot (from range(9)) on range using count(*)", limit=0).fetchall() == []


@pytest.mark.parametrize(
    ("sql", "used"),
    [
        ("select 1", set()),
        ('from Results join "INPUTS" using (job_id), nowhere', {"results", "inputs"}),
        ("from eval_items where run_id in (select id from jobs)", {"eval_items", "jobs"}),
        ("from requests", {"requests", "results"}),
        ("select 'inputs' as word from jobs", {"inputs", "jobs"}),
        ("describe inputs", {"inputs"}),
        ('DESCRIBE "Results"', {"results"}),
        ("describe select * from jobs", {"jobs"}),
        ("from (show inputs)", {"inputs"}),
        ("describe", None),
        ("describe store.inputs", None),
        ("from (describe jobs), (show tables)", None),
        ("show all tables", None),
        ("from query_table('res' || 'ults')", None),
        ("select column_name from information_schema.columns", None),
        ("select attname from pg_catalog.pg_attribute", None),
        ("select sql from sqlite_master", None),
        ("selec", None),
        ("select '\udcff' from jobs", None),
    ],
)
def test_the_views_that_a_query_reads_are_known_from_its_text(sql: str, used: set[str] | None) -> None:
    """The view `requests` reads results."""
    with duckdb.connect() as empty:
        assert views_of(empty, sql) == used


@pytest.mark.parametrize(("sql", "looks"), [("select count(*) from jobs", 0), ("from inputs", 3)])
def test_inputs_of_a_store_full_of_jobs_are_opened_for_queries_that_read_them(
    sql: str, looks: int, store: Store, write_input: WriteInput
) -> None:
    """Each batch of the Batch API is a job."""
    for number in range(3):
        submit(store, str(write_input(f"{number}.parquet", q=["a"])), TASK)
    asked = mock.Mock(wraps=input_types)
    with (
        scratch.place() as spill,
        mock.patch("conserve.store.sql.views.input_types", asked),
        query.opened(snapshot(store, now=0.0), spill=spill, uses=lambda empty: views_of(empty, sql)) as found,
    ):
        assert len(ask(found.duck, sql).fetchall()) == (looks or 1)
    assert asked.call_count == looks


INPUTS, REQUESTS = "inputs.parquet", "requests.parquet"


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        ("select count(*) from jobs", set()),
        ("from eval_runs", set()),
        ("selec inputs", {INPUTS}),
        ("from results", {"results"}),
        ("from inputs", {INPUTS}),
        ("describe inputs", {INPUTS}),
        ("from requests", {REQUESTS, "results"}),
        ("from results join inputs using (job_id, row_index)", {INPUTS, "results"}),
        ("show all tables", {INPUTS, REQUESTS, "results"}),
    ],
)
def test_files_are_compared_with_their_digests_for_queries_that_read_them(
    sql: str, read: set[str], settings: Settings, store: Store, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    finish(store, leased(store))
    shards.compact(store, job_id, now=0.0)
    asked = mock.Mock(wraps=digests.digest_of)
    with mock.patch("conserve.store.files.digests.digest_of", asked):
        sql_query(settings, sql)
    names = [Path(call.args[0]) for call in asked.call_args_list]
    assert {path.name if path.parent.name == job_id else path.parent.name for path in names} == read


@pytest.mark.parametrize(
    ("sql", "journalled", "live"),
    [
        ("select count(*) from jobs", 0, 0),
        ("from inputs", 0, 0),
        ("from results", 1, 0),
        ("from requests", 1, 2),
        ("show all tables", 1, 2),
    ],
)
def test_rows_of_the_database_are_read_for_queries_that_have_them(
    sql: str, journalled: int, live: int, settings: Settings, store: Store, write_input: WriteInput
) -> None:
    """Rows of the database take half a gigabyte after a retry of a million."""
    submit(store, str(write_input(q=["a", "b", "c"])), TASK)
    finish(store, leased(store), of=[0])
    taken = sql_query(settings, sql).taken
    assert (taken.journal_rows.num_rows, taken.live_rows.num_rows) == (journalled, live)


def test_answers_are_exported_without_a_look_at_the_files_of_questions(
    settings: Settings, store: Store, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    for name in (INPUTS, REQUESTS):
        (layout.job_folder(store.home, job_id) / name).write_bytes(b"spoilt")
    _, plain = results_query(settings, job_id, with_inputs=False, with_prompts=False)
    _, joined = results_query(settings, job_id, with_inputs=True, with_prompts=False)
    assert [Path(one.file).name for one in plain.taken.damages] == []
    assert [Path(one.file).name for one in joined.taken.damages] == [INPUTS]


def test_a_connection_loads_and_remembers_nothing(opened: Views) -> None:
    names = {
        "allow_persistent_secrets": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "enable_external_access": "false",
        "lock_configuration": "true",
        "preserve_insertion_order": "true",
        "python_enable_replacements": "false",
        "TimeZone": "UTC",
    }
    shown = dict(ask(opened.duck, "select name, value from duckdb_settings()").fetchall())
    assert {name: shown[name] for name in names} == names
    assert Path(shown["temp_directory"]).name.startswith(scratch.PREFIX)


def test_without_a_seal_other_files_can_be_read(store: Store, write_input: WriteInput) -> None:
    path = write_input(q=["a"])
    submit(store, str(path), TASK)
    with views(store, now=0.0, sealed=False) as opened:
        assert opened.duck.execute(f"select q from '{path}'").fetchall() == [("a",)]


@pytest.mark.parametrize(
    "sql", ["describe results", "summarize results", "show tables", "from jobs", "values (1)"]
)
def test_looking_around_is_possible(opened: Views, sql: str) -> None:
    assert ask(opened.duck, sql).to_arrow_table().num_rows


@pytest.mark.parametrize(
    "sql",
    [
        "with x as (insert into jobs select * from jobs returning id) select * from x",
        "with x as (delete from jobs returning id) from x",
        "with x as (update jobs set error = 'none' returning id) from x",
        "with x as (delete from jobs returning id) pivot x on id",
        "describe with x as (delete from jobs returning id) from x",
    ],
)
def test_a_with_clause_that_writes_is_refused(opened: Views, sql: str) -> None:
    with pytest.raises(QueryError, match="only SELECT is possible"):
        ask(opened.duck, sql).fetchall()
    assert opened.duck.execute("select count(*) from jobs where error is null").fetchall() == [(1,)]


@pytest.mark.parametrize(
    "rest",
    [
        "from x",
        "select * from (pivot (select 1 a, 2 b) on a using sum(b))",
        "from (pivot x on z using sum(z))",
    ],
)
def test_a_with_clause_cannot_write_over_a_file_that_a_view_reads(
    store: Store, write_input: WriteInput, rest: str
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    drain(store)
    shards.compact(store, job_id, now=0.0)
    with views(store, now=0.0) as opened:
        (shard,) = opened.files["results"]
        before = shard.read_bytes()
        with pytest.raises(QueryError, match="only SELECT is possible"):
            ask(
                opened.duck,
                f"with é as (from jobs), x as (CoPy (select 42 as z) to '{shard}' "
                f"(format csv, use_tmp_file false)) {rest}",
            ).fetchall()
    assert shard.read_bytes() == before


def test_the_order_of_an_answer_is_kept(opened: Views) -> None:
    rows = ask(opened.duck, "select range as a, -range as a from range(100000) order by 2").fetchall()
    assert rows == [(n, -n) for n in reversed(range(100_000))]


def test_only_the_views_are_shown(opened: Views) -> None:
    shown = ask(opened.duck, "show tables").fetchall()
    assert [name for (name,) in shown] == sorted(VIEWS)


def test_results_join_inputs_by_row(opened: Views) -> None:
    rows = ask(
        opened.duck,
        "select i.q, r.text is null, r.error_type from results r "
        "join inputs i using (job_id, row_index) order by row_index",
    ).fetchall()
    assert rows == [("a", False, None), ("b", False, None), ("REJECT", True, "invalid_request")]


class Rationed(FakeEndpoint):
    """Answers as many requests as `answers` has been released for."""

    def __init__(self) -> None:
        super().__init__(Script(capacity=10))
        self.answers = asyncio.Semaphore(0)

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        await self.answers.acquire()
        return await super().complete(call, on_tokens)


def test_a_running_job_shows_journal_and_shards_together(store: Store, write_input: WriteInput) -> None:
    job_id = submit(store, str(write_input(q=[str(n) for n in range(40)])), TASK).job_id

    async def stop_half_way() -> None:
        endpoint, stop = Rationed(), asyncio.Event()
        harvesting = harvester(store, endpoint)
        running = asyncio.create_task(harvesting.run(stop))
        for rows_done in (10, 20):
            for _ in range(10):
                endpoint.answers.release()
            while harvesting.tally.done < rows_done:
                await asyncio.sleep(0.01)
            if rows_done == 10:
                assert shards.compact(store, job_id, now=0.0)
        stop.set()
        await running

    virtual_time.run(stop_half_way())
    with views(store, now=0.0) as opened:
        rows, distinct = opened.duck.execute(
            "select count(*), count(distinct row_index) from results"
        ).fetchall()[0]
        (done,) = opened.duck.execute("select succeeded from jobs").fetchall()[0]
    assert rows == distinct == done == 20


def test_awkward_file_names_can_be_joined(store: Store, write_input: WriteInput) -> None:
    submit(store, str(write_input("it's [a] *strange* name?.parquet", q=["a"])), TASK)
    with views(store, now=0.0) as opened:
        assert ask(opened.duck, "select q from inputs").fetchall() == [("a",)]


def test_columns_of_the_user_called_like_ours_get_a_prefix(store: Store, write_input: WriteInput) -> None:
    submit(store, str(write_input(q=["a"], job_id=["theirs"], row_index=[99])), TASK)
    with views(store, now=0.0) as opened:
        rows = ask(opened.duck, "select row_index, input_job_id, input_row_index from inputs").fetchall()
    assert rows == [(0, "theirs", 99)]


def test_a_prefix_never_meets_a_column_that_is_there(store: Store, write_input: WriteInput) -> None:
    columns = {"q": ["a"], "Job_ID": ["theirs"], "input_Job_ID": ["before"]}
    submit(store, str(write_input(**columns)), TASK)
    with views(store, now=0.0) as opened:
        rows = ask(opened.duck, "select input_job_id, input_input_job_id from inputs").fetchall()
    assert rows == [("before", "theirs")]


def test_names_that_differ_in_case_alone_get_prefixes_of_their_own() -> None:
    assert shown_names(["text", "q", "Text"]) == {"text": "input_text", "q": "q", "Text": "input_input_Text"}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_inputs_beside_results_hide_no_answer(store: Store, write_input: WriteInput, kind: str) -> None:
    """An input column may be called like a column of results; both are there, the answer under its own name."""
    path = write_input(text=["to be classified"], Model=["theirs"], json=["{no json"], input_text=["more"])
    job_id = submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ text }}")).job_id
    drain(store)
    with views(store, now=0.0, only=[job_id]) as opened:
        sink, answer = io.BytesIO(), export.ordered(opened.duck, job_id, with_inputs=True)
        export.write(rows_of(answer), sink, Format(kind))
        (text,) = opened.duck.execute("select text from results").fetchone() or ()
    (row,) = read_back(sink, kind)
    assert (row["text"], row["model"]) == (text, "fake")
    assert (row["input_input_text"], row["input_text"]) == ("to be classified", "more")
    assert (row["input_Model"], row["input_json"]) == ("theirs", "{no json")


def read_back(sink: io.BytesIO, kind: str) -> list[dict[str, Any]]:
    """Rows that an export wrote."""
    if kind == "parquet":
        sink.seek(0)
        return pq.read_table(sink).to_pylist()
    lines = sink.getvalue().decode().splitlines()
    return [json.loads(line) for line in lines] if kind == "jsonl" else list(csv.DictReader(lines))


def test_text_of_the_user_in_a_column_called_json_stays_text() -> None:
    sink = io.BytesIO()
    export.write_lines(rows_of(duckdb.sql("select '{no json' as json")), sink)
    assert json.loads(sink.getvalue()) == {"json": "{no json"}


def test_jobs_whose_columns_disagree_in_type_are_both_shown(store: Store, write_input: WriteInput) -> None:
    submit(store, str(write_input("one.parquet", q=["a"], x=[{"y": 1}])), TASK)
    submit(store, str(write_input("two.parquet", q=["b"], x=[[1.5]])), TASK)
    with views(store, now=0.0) as opened:
        assert len(ask(opened.duck, "select x from inputs").fetchall()) == 2


def test_numbers_of_different_kinds_are_numbers_together(store: Store, write_input: WriteInput) -> None:
    for name, values in (("one", [1]), ("two", [1.5]), ("three", pa.array([2], pa.int8()))):
        submit(store, str(write_input(f"{name}.parquet", q=["a"], x=values)), TASK)
    with views(store, now=0.0) as opened:
        assert ask(opened.duck, "select sum(x) from inputs").fetchall() == [(4.5,)]


LARGE = 2**24 + 1  # which no float of 32 bits is
SHORT = pa.array([0.5, 1.5], pa.float32())


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([LARGE], pa.int32()), "DOUBLE"),
        (pa.array([LARGE], pa.uint32()), "DOUBLE"),
        (pa.array([LARGE], pa.int64()), "DOUBLE"),
        (pa.array([LARGE], pa.float64()), "DOUBLE"),
        (pa.array([2**15 - 1], pa.int16()), "FLOAT"),
    ],
)
def test_whole_numbers_of_a_job_are_not_rounded_beside_short_floats_of_another(
    store: Store, write_input: WriteInput, column: pa.Array, kind: str
) -> None:
    submit(store, str(write_input("one.parquet", q=["a"], text=column)), TASK)
    submit(store, str(write_input("two.parquet", q=["b", "c"], text=SHORT)), TASK)
    with views(store, now=0.0) as opened:
        found = ask(opened.duck, "select input_text, typeof(input_text) from inputs order by 1").fetchall()
    assert found == [(0.5, kind), (1.5, kind), (column[0].as_py(), kind)]


def test_a_job_with_whole_numbers_changes_no_answer_on_short_floats(
    store: Store, write_input: WriteInput
) -> None:
    count = "select count(*) from inputs where x = 0.1 and x::varchar = '0.1'"
    for name, column in (("one", pa.array([0.1], pa.float32())), ("two", pa.array([LARGE]))):
        submit(store, str(write_input(f"{name}.parquet", q=["a"], x=column)), TASK)
        with views(store, now=0.0) as opened:
            assert ask(opened.duck, count).fetchall() == [(1,)]


@pytest.mark.parametrize("own", ["n", "file_row_number"])
@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([LARGE], pa.int32()), "DOUBLE"),
        (pa.array([LARGE]).cast(pa.decimal128(20, 1)), "DOUBLE"),
        (pa.array([LARGE], pa.float64()), "DOUBLE"),
        (pa.array([2**15 - 1], pa.int16()), "FLOAT"),
    ],
)
def test_whole_numbers_of_a_file_are_not_rounded_beside_short_floats_of_another(
    store: Store, tmp_path: Path, column: pa.Array, kind: str, own: str
) -> None:
    """Rows keep their numbers, partitions and null columns, also beside a column called like DuckDB's own."""
    for day, columns in (("1", {"q": ["a", "b"], "x'": SHORT}), ("2", {"x'": column, own: [7], "q": ["c"]})):
        (tmp_path / "data" / f"day={day}").mkdir(parents=True)
        pq.write_table(pa.table(columns), tmp_path / "data" / f"day={day}" / "part.parquet")
    submit(store, Input(names=[str(tmp_path / "data")], keep=Keep.LINK), TASK)
    with views(store, now=0.0) as opened:
        sql = f'select row_index, q, "x\'", typeof("x\'"), {own}, day from inputs order by row_index'
        assert ask(opened.duck, sql).fetchall() == [
            (0, "a", 0.5, kind, None, 1),
            (1, "b", 1.5, kind, None, 1),
            (2, "c", column[0].as_py(), kind, 7, 2),
        ]


def test_only_the_wanted_jobs_are_in_the_views(store: Store, write_input: WriteInput) -> None:
    ids = [submit(store, str(write_input(f"{name}.parquet", q=["a", "b"])), TASK).job_id for name in "xy"]
    drain(store)
    for job_id in ids:
        shards.compact(store, job_id, now=0.0)
    with views(store, now=0.0, only=ids[:1]) as opened:
        for view, rows in (("jobs", 1), ("results", 2), ("inputs", 2)):
            name = "id" if view == "jobs" else "job_id"
            assert ask(opened.duck, f"select {name}, count(*) from {view} group by 1").fetchall() == [
                (ids[0], rows)
            ]


def test_times_are_shown_in_utc(store: Store, write_input: WriteInput) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    with store.write() as tx:
        tx.execute(text("update job set submitted_at = 86400.5, started_at = 86401, finished_at = null"))
    drain(store)
    with views(store, now=0.0, only=[job_id]) as opened:
        shown = ask(opened.duck, "select submitted_at::varchar, started_at::varchar from jobs").fetchall()
        assert shown == [("1970-01-02 00:00:00.5+00", "1970-01-02 00:00:01+00")]
        assert ask(opened.duck, "select finished_at > started_at from jobs").fetchall() == [(True,)]


def test_mistakes_in_sql_are_one_line_that_names_the_next_step(opened: Views) -> None:
    with pytest.raises(QueryError) as error:
        ask(opened.duck, "select nope\nfrom results")
    assert "nope" in str(error.value)
    assert "^" not in str(error.value)
    assert str(error.value).endswith('; the columns are shown by: conserve sql "describe results"')


@pytest.mark.parametrize("few_rows", [0, 10_000])
def test_a_duplicate_is_found_with_how_often_it_is_there(
    few_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "FEW_ROWS", few_rows)  # more are counted by DuckDB
    path = tmp_path / "ids.parquet"
    column = 'an "awkward" name'
    for values, found in (
        (["a", "b", None, None], None),
        (["b", None, "a", "a", "a"], ("a", 3)),
        ([None], None),
    ):
        pq.write_table(pa.table({column: values}), path)
        assert first_duplicate(path, column) == found


def test_a_changed_or_missing_input_is_left_out_with_the_reason(
    store: Store, write_input: WriteInput
) -> None:
    def referring(path: Path) -> str:
        return submit(store, Input(names=[str(path)], keep=Keep.REFERENCE), TASK).job_id

    changed = referring(write_input("changed.parquet", q=["a"]))
    gone = referring(write_input("gone.parquet", q=["a"]))
    write_input("changed.parquet", q=["a", "b"])
    Path(write_input("gone.parquet", q=["a"])).unlink()
    with views(store, now=0.0) as opened:
        reasons = {left_out.job_id: left_out.reason for left_out in opened.left_out}
        assert ask(opened.duck, "select * from inputs").fetchall() == []
    assert "changed after submit" in reasons[changed]
    assert "is gone" in reasons[gone]


@pytest.mark.parametrize(
    ("copied", "linked", "reason"),
    [
        (True, False, None),
        (True, True, "where its input lay is not known"),
        (False, False, "where its input lay is not known"),
    ],
)
def test_only_a_copy_is_joined_without_a_look_at_the_users_file(
    copied: bool, linked: bool, reason: str | None
) -> None:
    """Nothing tells that a file without a path is the one that was submitted."""
    source = Source(path=None, format="parquet", copied=copied, linked=linked)
    known = digests.Memory(Path("home") / digests.MEMORY, now=0.0)
    assert changed(source, parts_of(Path("home"), "job-1", source), known) == reason


def test_a_store_without_jobs_has_empty_views(store: Store) -> None:
    with views(store, now=0.0) as opened:
        for view in ("jobs", "results", "inputs"):
            assert ask(opened.duck, f"select count(*) from {view}").fetchall() == [(0,)]


def test_json_that_a_model_wrote_in_lines_is_one_line_of_output() -> None:
    written = '{\n"a": "b\\nc",\r\n "d":\n\n812\n}'
    sink = io.BytesIO()
    found = duckdb.sql("select $1::json as json, 2 as n", params=[written])
    assert export.write_lines(rows_of(found), sink) == 1
    (line,) = sink.getvalue().splitlines()
    assert json.loads(line) == {"json": {"a": "b\nc", "d": 812}, "n": 2}


@pytest.mark.parametrize(
    ("sql", "reads"),
    [
        ("select 1", True),
        ("from a union all from b", True),
        ("with recursive t as (select 1 n union all select n + 1 from t) from t", True),
        ("with x as (delete from t returning a) from x", False),
        ("copy (select 1) to 'x.csv'", False),
        ("delete from t", False),
        ("selec", False),
        ("from query('select 1')", True),
        ("select query from (select 'x' as query)", True),
        ("from query('from query(''select 1'')')", True),
        ("from query('select ' || '1')", False),
        ("from query(getvariable('x'))", False),
        ("from query('delete from t')", False),
        ("from query('from query(''with x as (copy (select 1) to y) select 1'')')", False),
        ("from \"query\"('with x as (delete from t returning a) from x')", False),
        ("select * from json_execute_serialized_sql(json_serialize_sql('select 1'))", False),
        ("select (select 1 from JSON_execute_serialized_sql('{}'))", False),
    ],
)
def test_a_statement_only_reads_if_no_part_of_it_writes(sql: str, reads: bool) -> None:
    with duckdb.connect() as empty:
        assert only_reads(empty, sql) is reads


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("pivot x on y using sum(z)", False),
        ("pivot (COPY x to 'y') on z", True),
        ("pivot x on é, insert", True),
        ('pivot x on "insert"', False),
        ("pivot x on 'insert'", False),
        ("pivot copies on inserted", False),
        ("pivot (from json_execute_serialized_sql('{}')) on k", True),
        ("pivot (from query('select 1')) on k", True),
    ],
)
def test_a_pivot_names_no_word_that_writes(sql: str, names: bool) -> None:
    assert names_writing(sql) is names


def test_no_query_leaves_a_file_where_the_command_runs(
    store: Store, write_input: WriteInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(q=["a"])
    submit(store, str(path), TASK)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with views(store, now=0.0) as opened:
        assert ask(opened.duck, "select count(*) from inputs").fetchall() == [(1,)]
    with duckdb.connect() as empty:
        assert views_of(empty, "from inputs") == {"inputs"}
    assert by_row("select row_index, 1 as one from inputs")
    assert first_duplicate(path, "q") is None
    assert read_fault(path, ["q"]) is None
    with scanned(f"select q from '{path}'", tmp_path) as rows:
        assert rows.read_all().num_rows == 1
    assert not list(here.iterdir())


def test_numbers_and_times_that_arrow_lacks_are_their_text() -> None:
    sql = (
        "select 340282366920938463463374607431768211455::uhugeint as n, '101'::bit as b, "
        "'12:30:00+02'::timetz as t, 7 as n, null::uhugeint as none, 1::hugeint as h"
    )
    found = rows_of(duckdb.sql(sql))
    (row,) = found.tuples()
    assert row[:4] == ("340282366920938463463374607431768211455", "101", "12:30:00+02", 7)
    assert row[4:] == (None, 1)
    assert found.schema.names == ["n", "b", "t", "n_1", "none", "h"]


def test_a_query_over_files_writes_none(tmp_path: Path) -> None:
    precious = tmp_path / "precious.csv"
    precious.write_text("mine\n")
    copy = f"with x as (copy (select 9) to ''{precious}'') select 1 as a"
    for sql in (
        f"from json_execute_serialized_sql(json_serialize_sql('{copy}'))",
        f"from query('{copy}')",
        copy.replace("''", "'"),
    ):
        with pytest.raises(InputError, match="takes one SELECT"), scanned(sql, tmp_path):
            pass
    assert precious.read_text() == "mine\n"
    with scanned("select '170141183460469231731687303715884105728'::uhugeint as n", tmp_path) as rows:
        assert rows.read_all().to_pylist() == [{"n": "170141183460469231731687303715884105728"}]


def test_an_interval_is_a_length_of_time() -> None:
    found = rows_of(duckdb.sql("select interval 90 second as a, interval 14 month as b, null::interval as c"))
    assert list(found.tuples()) == [(timedelta(seconds=90), "14 months 0:00:00", None)]
    sink = io.BytesIO()
    export.write_lines(rows_of(duckdb.sql("select interval 90 second as a")), sink)
    assert sink.getvalue() == b'{"a":"PT90S"}\n'


def test_a_store_that_is_changed_while_it_is_read_is_read_again(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are put back take their shards along, which is no damage."""
    path = write_input(q=["a", "REJECT"])
    job_id = submit(store, str(path), TASK).job_id
    drain(store)
    real, calls = snapshots.unreadable, list[int]()

    def compared(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            commands.conserve("retry", job_id)
        return real(*args, **named)

    monkeypatch.setattr(snapshots, "unreadable", compared)
    found = snapshot(store, now=0.0)
    assert (found.damages, len(calls)) == ([], 2)


@pytest.mark.parametrize("words", [["retry"], ["rm", "--yes"]], ids=["retry", "rm"])
def test_files_that_are_deleted_under_a_query_are_no_damage(
    settings: Settings, store: Store, write_input: WriteInput, words: list[str]
) -> None:
    job_id = submit(store, str(write_input(q=["a", "REJECT"])), TASK).job_id
    drain(store)
    asked = sql_query(settings, "select text from results where error_type is null")
    assert commands.conserve(*words, job_id).returncode == 0
    heard: list[LeftOut] = []
    with answer.answered(asked, warn=heard.append) as rows:
        assert len(list(rows.tuples())) == (words == ["retry"])
    (gap,) = heard
    assert gap.sentence == (
        f"the view results leaves out rows of job {job_id}: it was retried, repaired or removed while the query "
        "read its results; run the query again"
    )
    assert not gap.damaged


def test_a_file_that_is_gone_from_a_job_that_stays_is_damage(
    settings: Settings, store: Store, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    drain(store)
    asked = sql_query(settings, "from results")
    for path in (layout.job_folder(store.home, job_id) / layout.RESULTS).iterdir():
        path.unlink()
    heard: list[LeftOut] = []
    with answer.answered(asked, warn=heard.append):
        pass
    assert [gap.damaged for gap in heard] == [True]


def test_relations_can_be_made_in_threads(opened: Views) -> None:
    rows = pa.table({"a": [1]})

    def made(number: int) -> int:
        batches = RowBatches(rows.schema, frozenset(), rows.to_batches())
        return len(relation(batches).columns)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(made, range(64))) == [1] * 64


def test_a_question_about_all_jobs_names_none_of_them(store: Store, write_input: WriteInput) -> None:
    """A statement takes a bounded number of values, and a store may have more jobs."""
    for name in ("a", "b"):
        submit(store, str(write_input(f"{name}.parquet", q=[name])), TASK)
    asked: list[Any] = []
    event.listen(store.engine, "before_cursor_execute", lambda *call: asked.append(call[3]))
    assert len(snapshot(store, now=0.0).jobs) == 2
    assert max(map(len, asked)) < 2
