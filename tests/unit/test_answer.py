"""A query computes in a child within bounds, and fails alone."""

import ast
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.errors import QueryError, QueryTooGreedy, StoreError
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql import answer, child, query, readable, scratch
from conserve.store.sql.answer import SnapshotQuery, checked, described, failure, named_error
from conserve.store.sql.bounds import Bounds
from conserve.store.sql.named_files import NamedFile
from conserve.store.sql.query import ask, views_of
from conserve.store.sql.readable import LeftOut
from conserve.store.sql.snapshot import Snapshot, snapshot
from conserve.units import MIB
from tests.commands import threads_of
from tests.conftest import WriteInput
from tests.submitting import submit

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")


@pytest.fixture
def taken(store: Store, write_input: WriteInput) -> Snapshot:
    submit(store, str(write_input(q=["a", "b"])), TASK)
    return snapshot(store, now=0.0)


def asked(taken: Snapshot, sql: str, **bounds: Any) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, sql),
        uses=lambda empty: None,
        bounds=Bounds(**({"threads": 2, "memory_bytes": 512 * MIB} | bounds)),
    )
    with answer.answered(question, warn=lambda found: None) as rows:
        return list(rows.tuples())


CHILD, HERE = "in a child", "in this process"


@pytest.fixture(params=[CHILD, HERE])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Answers are computed in a child, or by the same function in this process."""

    @contextmanager
    def working(work: Callable[[child.Send], None], **_: Any) -> Iterator[Iterator[child.Frame]]:
        frames: list[child.Frame] = []
        work(lambda kind, payload: frames.append(child.Frame(kind, payload)))
        yield iter(frames)

    pool = pa.default_memory_pool()
    if request.param == HERE:
        monkeypatch.setattr(child, "working", working)
        monkeypatch.setattr(answer.PREPARED, "for_next", lambda: None)  # a child's copy is sealed for good
    yield request.param
    pa.set_memory_pool(pool)


def test_processes_of_later_queries_inherit_a_database_that_has_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # earlier tests may have left some
    prepared = answer.PreparedDatabase()
    before = threads_of("self")
    assert prepared.for_next() is None, "a program of one query needs none"
    empty = prepared.for_next()
    assert empty is not None
    assert prepared.for_next() is empty
    assert threads_of("self") <= before, "a fork would lose them"  # those of earlier tests may end meanwhile
    prepared.close()
    with pytest.raises(duckdb.ConnectionException):
        empty.execute("select 1")
    prepared.close()


def test_beside_other_threads_the_first_process_inherits_a_database_that_was_used() -> None:
    """A thread that began to use DuckDB would not be there to go on in the process."""
    prepared, ended = answer.PreparedDatabase(), threading.Event()
    beside = threading.Thread(target=ended.wait)
    beside.start()
    try:
        empty = prepared.for_next()
    finally:
        ended.set()
        beside.join()
    assert empty is not None
    zone = "select value from duckdb_settings() where name = 'TimeZone'"
    assert empty.execute(zone).fetchall() == [("UTC",)], "which the first statement has set"
    prepared.close()


@pytest.mark.full
def test_a_process_that_is_forked_while_a_thread_begins_to_use_duckdb_answers() -> None:
    program = [sys.executable, "-m", "tests.first_use"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("20 of 20\n", "")


def test_an_inherited_database_is_new_to_each_query_and_has_its_bounds(taken: Snapshot) -> None:
    shown = "select value from duckdb_settings() where name = '{}'".format
    for threads in (3, 2, 1):
        assert asked(taken, shown("threads"), threads=threads) == [(str(threads),)]
    assert int(asked(taken, shown("async_threads"))[0][0]) > 0, "which files of object stores are read with"
    assert asked(taken, "select count(*) from jobs") == [(1,)]


def test_a_duckdb_without_such_a_setting_has_no_database_to_inherit(
    taken: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "ASYNC_THREADS", "such_threads")
    assert query.empty_database() is None
    monkeypatch.setattr(answer, "PREPARED", answer.PreparedDatabase())
    assert [asked(taken, "select 1") for _ in range(3)] == [[(1,)]] * 3


def test_views_that_a_query_does_not_read_are_made_for_the_names_in_its_error_alone(
    taken: Snapshot, computed: str
) -> None:
    made: list[tuple[str, ...]] = []

    def noting(duck: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
        names = duck.execute("select view_name from duckdb_views() where not internal").fetchall()
        made.append(tuple(sorted(name for (name,) in names)))
        return ask(duck, sql)

    def answers(sql: str) -> list[tuple[Any, ...]]:
        question = SnapshotQuery(
            taken=taken,
            ask=lambda duck: noting(duck, sql),
            uses=lambda empty: views_of(empty, sql),
            bounds=Bounds(threads=1),
        )
        with answer.answered(question, warn=lambda found: None) as rows:
            return list(rows.tuples())

    assert answers("select count(*) from inputs") == [(2,)]
    with pytest.raises(QueryError, match="there is no view input; did you mean inputs"):
        answers("from input")
    with pytest.raises(QueryError, match="there is no column txet; did you mean text"):
        answers("select txet from results")
    if computed == HERE:
        every = ("eval_items", "inputs", "requests", "results")
        assert made == [("inputs",), (), every, ("results",)]


def pages(path: Path, group: int) -> tuple[int, int]:
    """First byte of a row group's pages, and the first behind them."""
    column = pq.read_metadata(path).row_group(group).column(0)
    first = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
    return first, first + column.total_compressed_size


def spoil(path: Path, group: int) -> None:
    """Overwrite the pages of one row group."""
    first, end = pages(path, group)
    data = path.read_bytes()
    path.write_bytes(data[:first] + b"\xff" * (end - first) + data[end:])


@pytest.mark.parametrize("held", [0, 1 << 30])
def test_damage_ends_an_answer_of_which_rows_were_sent_and_is_left_out_before(
    store: Store, tmp_path: Path, computed: str, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """DuckDB itself keeps megabytes of rows before it gives out the first."""
    monkeypatch.setattr(answer, "HELD_BYTES", held)
    job_ids = []
    for name, number in (("bad", 9_000), ("good", 1)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"q": [f"{n:02500}" for n in range(number)]}), path, row_group_size=2048)
        job_ids.append(submit(store, str(path), TASK).job_id)
    bad, good = job_ids
    taken = snapshot(store, now=0.0)
    spoil(layout.inputs_file(store.home, bad), 3)
    if held:
        assert asked(taken, "select job_id, length(q) from inputs", threads=1) == [(good, 2500)]
    else:
        with pytest.raises(StoreError, match=r"inputs\.parquet is damaged .*; run: conserve check --repair"):
            asked(taken, "select job_id, q from inputs", threads=1)


def test_a_question_has_all_that_it_needs(
    taken: Snapshot, tmp_path: Path, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "HELD_BYTES", 0)
    gold, other = tmp_path / "gold.csv", tmp_path / "other.csv"
    gold.write_text("q,label\na,1\nb,2\n")
    other.write_text("n\n7\n")
    sql = (
        "select label, prompt, '{}'::json as b, '{}'::json as a, current_setting('threads') as threads, n "
        f"from requests join inputs using (job_id, row_index) join gold using (q), '{other}' order by label"
    )
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: duck.sql(sql),
        uses=lambda empty: {"requests", "results", "inputs"},
        bounds=Bounds(threads=3),
        sealed=False,
        wording=Loud(),
        named=(NamedFile("gold", gold, "csv"),),
    )
    with answer.answered(question, warn=lambda found: None) as rows:
        assert list(rows.tuples()) == [(1, "A!", "{}", "{}", 3, 7), (2, "B!", "{}", "{}", 3, 7)]
        assert rows.documents == {"a", "b"}
    sealed = replace(question, sealed=True)
    with pytest.raises(QueryError), answer.answered(sealed, warn=lambda found: None):
        pass


class Loud:
    """Wording of requests in capitals."""

    def body(self, job_id: str, payload: str) -> str:
        return "{}"

    def prompt(self, job_id: str, payload: str) -> str:
        return f"{payload.upper()}!"


@pytest.mark.parametrize(
    ("uses", "warned"),
    [(None, ["inputs", "requests"]), ({"inputs"}, ["inputs"]), ({"jobs"}, []), (set(), [])],
)
def test_only_what_the_query_would_have_read_is_warned_of(
    store: Store, write_input: WriteInput, computed: str, uses: set[str] | None, warned: list[str]
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), TASK).job_id
    for path in (layout.inputs_file(store.home, job_id), layout.requests_file(store.home, job_id)):
        path.unlink()
    question = SnapshotQuery(
        taken=snapshot(store, now=0.0),
        ask=lambda duck: ask(duck, "select 1"),
        uses=lambda empty: uses,
        bounds=Bounds(threads=1),
    )
    heard: list[LeftOut] = []
    with answer.answered(question, warn=heard.append) as rows:
        assert list(rows.tuples()) == [(1,)]
    assert sorted(one.view for one in heard) == warned


@pytest.mark.parametrize("sql", ["select cast(q as int) from inputs", "select 1 where", "from nowhere"])
def test_no_file_is_looked_at_for_a_mistake_of_the_querys(
    taken: Snapshot, computed: str, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.delattr(readable, "damage")
    with pytest.raises(QueryError):
        asked(taken, sql)


def test_a_parent_that_reads_no_further_is_told_nothing(taken: Snapshot, tmp_path: Path) -> None:
    sent: list[bytes] = []

    def send(kind: bytes, payload: bytes) -> None:
        if sent:
            raise BrokenPipeError
        sent.append(kind)

    pool = pa.default_memory_pool()
    answer.compute(question_of(taken, "from range(9)"), tmp_path, send)
    pa.set_memory_pool(pool)
    assert len(sent) == 1


def question_of(taken: Snapshot, sql: str) -> SnapshotQuery:
    return SnapshotQuery(
        taken=taken, ask=lambda duck: ask(duck, sql), uses=lambda empty: None, bounds=Bounds(threads=1)
    )


def test_waits_for_the_answer_are_told(taken: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "TICK_S", 0.001)
    heard: list[float | None] = []
    reader, writer = os.pipe()

    def ask_later(duck: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyRelation:
        os.read(reader, 1)
        return ask(duck, "select true")

    def heard_once(waited_s: float | None) -> None:
        if not heard:
            os.write(writer, b"x")
        heard.append(waited_s)

    question = replace(question_of(taken, ""), ask=ask_later)
    with answer.answered(question, warn=lambda found: None, on_wait=heard_once) as rows:
        assert list(rows.tuples()) == [(True,)]
    os.close(reader)
    os.close(writer)
    assert heard[-1] is None


def test_rows_arrive_in_order_over_many_batches(taken: Snapshot, computed: str) -> None:
    found = asked(taken, "select range as n, 'x' || range as s from range(10000)")
    assert found == [(n, f"x{n}") for n in range(10_000)]


def test_every_type_of_duckdbs_arrives(taken: Snapshot) -> None:
    """Types without a place in Python arrive as text."""
    kinds = asked(taken, "from test_all_types()")
    assert len(kinds) == 3
    assert asked(taken, "select date '12000-01-01'") == [("12000-01-01",)]


@pytest.mark.parametrize(
    "sql",
    [
        "select cast('x' as int)",
        "select cast(q as int) from inputs",
        "select error('mine')",
        "select 9223372036854775807 + 1",
        "select * from inputs where row_index / 0 = cast(q as int)",
        "with recursive t as (select 1 n union all select n + 1 from t where n < 9) from t select ('n' || n)::int",
        "select 1 where",
        "select nope from results",
        "select * from nowhere",
        "copy jobs to 'x.csv'",
    ],
)
def test_a_mistake_found_at_any_time_is_one_line(taken: Snapshot, computed: str, sql: str) -> None:
    with pytest.raises(QueryError) as error:
        asked(taken, sql)
    assert "\n" not in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    "sql",
    [
        "select length(repeat('x', 2000000000))",
        "select repeat('x', 2000000000)",
        "select list(range) from range(200000000)",
        "select string_agg(range::varchar, ',') from range(200000000)",
    ],
)
def test_a_query_cannot_take_more_memory_than_it_may(taken: Snapshot, sql: str) -> None:
    with pytest.raises(QueryTooGreedy, match=r"memory than 512 MiB.*--memory"):
        asked(taken, sql)


def test_what_does_not_fit_into_memory_is_spilled(taken: Snapshot) -> None:
    sql = "select count(*) from (select range % 3000000 as k, count(*) as n from range(6000000) group by 1)"
    assert asked(taken, sql, memory_bytes=160 * MIB) == [(3_000_000,)]


def test_a_query_cannot_take_more_disk_than_it_may(taken: Snapshot) -> None:
    sql = "select count(*) from (select range % 3000000 as k, count(*) as n from range(6000000) group by 1)"
    with pytest.raises(QueryTooGreedy, match="temporary disk than 1 MiB"):
        asked(taken, sql, memory_bytes=160 * MIB, disk_bytes=MIB)


def test_a_query_cannot_take_longer_than_it_may(taken: Snapshot) -> None:
    with pytest.raises(QueryTooGreedy, match=r"longer than 0.2 s.*--timeout"):
        asked(taken, "select count(*) from range(1000000000000) where hash(range) = 1", timeout_s=0.2)


def test_files_that_turn_out_to_be_damaged_are_left_out_and_each_is_said_once(
    store: Store, write_input: WriteInput, computed: str
) -> None:
    """The second attempt begins with the warnings of the first."""
    good, gone, bad = (
        submit(store, str(write_input(f"{name}.parquet", q=["a"])), TASK).job_id for name in "abc"
    )
    layout.inputs_file(store.home, gone).unlink()
    taken = snapshot(store, now=0.0)
    spoil(layout.inputs_file(store.home, bad), 0)
    heard: list[LeftOut] = []
    for uses in (None, {"inputs"}):
        question = SnapshotQuery(
            taken=taken,
            ask=lambda duck: ask(duck, "select job_id, q from inputs"),
            uses=lambda empty, uses=uses: uses,  # type: ignore[misc]
            bounds=Bounds(threads=1),
        )
        with answer.answered(question, warn=heard.append) as rows:
            assert list(rows.tuples()) == [(good, "a")]
        assert [one.job_id for one in heard] == [gone, bad]
        heard.clear()


def test_time_that_the_reader_takes_does_not_count(taken: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 1000))  # each look at the clock is a thousand seconds after the last
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, "from range(5000)"),
        uses=lambda empty: None,
        bounds=Bounds(threads=1, timeout_s=100.0),
    )
    with answer.answered(question, warn=lambda found: None) as rows:
        batches = iter(rows.batches)
        first = next(batches)
        monkeypatch.setattr(child.select, "poll", None)  # nothing is waited for from here on
        assert first.num_rows + sum(batch.num_rows for batch in batches) == 5000
    assert next(clock) == 0


def test_a_process_that_dies_is_a_sentence(taken: Snapshot) -> None:
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: os.kill(os.getpid(), signal.SIGKILL),  # type: ignore[arg-type,return-value]
        uses=lambda empty: None,
        bounds=Bounds(threads=1, memory_bytes=512 * MIB),
    )
    with (
        pytest.raises(QueryTooGreedy, match=r"ended by SIGKILL, .* want of memory \(it may take 512 MiB\); "),
        answer.answered(question, warn=lambda found: None),
    ):
        pass


def test_our_own_mistakes_are_not_hidden(taken: Snapshot, computed: str) -> None:
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: {}["nowhere"],  # type: ignore[index,return-value]
        uses=lambda empty: None,
        bounds=Bounds(threads=1),
    )
    with pytest.raises(RuntimeError, match="KeyError: 'nowhere'"), answer.answered(question, warn=print):
        pass


def working_forever(send: child.Send) -> None:
    """A child that says its process id and never ends."""
    send(b"P", str(os.getpid()).encode())
    while True:
        signal.pause()


def test_the_child_ends_with_its_context_whatever_it_does() -> None:
    with child.working(working_forever) as frames:
        pid = int(next(frames).payload)
        os.kill(pid, signal.SIGINT)  # which is for the parent
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupted_wait_ends_the_child() -> None:
    pids: list[int] = []

    def interrupted(waited_s: float | None) -> None:
        if pids:  # on a busy machine the first frame is waited for as well
            raise KeyboardInterrupt

    def wait() -> None:
        with child.working(working_forever, on_wait=interrupted) as frames:
            pids.append(int(next(frames).payload))
            next(frames)

    with pytest.raises(KeyboardInterrupt):
        wait()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_wait_is_reported_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float | None] = []

    def slow(send: child.Send) -> None:
        os.read(reader, 1)
        send(b"X", b"done")

    reader, writer = os.pipe()

    def heard_twice(waited_s: float | None) -> None:
        heard.append(waited_s)
        if len(heard) == 2:
            os.write(writer, b"go")

    with child.working(slow, on_wait=heard_twice) as frames:
        assert [frame.payload for frame in frames] == [b"done"]
    os.close(reader)
    os.close(writer)
    assert heard[-1] is None
    first = heard[: heard.index(None)]  # a child that is slow to end is waited for once more
    assert len(first) >= 2
    assert all(waited_s is not None and waited_s > 0 for waited_s in first)


def test_a_query_that_spills_leaves_nothing(taken: Snapshot, tmp_path: Path) -> None:
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, "select range % 2000000, count(*) from range(4000000) group by 1"),
        uses=lambda empty: None,
        bounds=Bounds(threads=2, memory_bytes=160 * MIB),
    )
    with answer.answered(question, warn=lambda found: None, spill_in=tmp_path) as rows:
        next(iter(rows.batches))
        (spilled,) = tmp_path.glob(f"{scratch.PREFIX}*")
        assert spilled.stat().st_mode & 0o077 == 0, "others may not read it"
    assert not list(tmp_path.glob(f"{scratch.PREFIX}*"))


def test_waiting_costs_no_processor_time() -> None:
    begun = time.process_time()
    with child.working(lambda send: send(b"X", b"")) as frames:
        assert next(frames).kind == b"X"
    assert time.process_time() - begun < 5.0


def test_bounds_are_duckdbs_settings_and_words() -> None:
    """DuckDB gets less memory than the query, since it does not count all that it takes."""
    assert Bounds(threads=3, timeout_s=1.0).settings() == {"threads": 3}
    assert Bounds(threads=1, memory_bytes=10 * MIB, disk_bytes=3 * MIB).settings() == {
        "threads": 1,
        "memory_limit": "6144KiB",
        "max_temp_directory_size": "3072KiB",
    }


BOUNDED, FREE = Bounds(threads=1, memory_bytes=512 * MIB, disk_bytes=MIB), Bounds(threads=1)


@pytest.mark.parametrize(
    ("error", "bounds", "said"),
    [
        (duckdb.Error("set max_temp_directory_size"), BOUNDED, "more temporary disk than 1 MiB; "),
        (duckdb.Error("set max_temp_directory_size"), FREE, "more temporary disk; "),
        (OSError("No space left on device"), BOUNDED, "more temporary disk than 1 MiB; "),
        (duckdb.OutOfMemoryException("no"), BOUNDED, "more memory than 512 MiB; "),
        (MemoryError(), FREE, "more memory; "),
        (OSError("Out of Memory Error: no"), BOUNDED, "more memory than 512 MiB; "),
    ],
)
def test_a_query_that_wants_too_much_is_told_of_what(error: Exception, bounds: Bounds, said: str) -> None:
    found = named_error(error, about(bounds))
    assert isinstance(found, QueryTooGreedy)
    assert str(found).startswith(f"the query needs {said}narrow it down")


def test_an_error_of_another_kind_is_no_query_s_whatever_it_says() -> None:
    assert named_error(ValueError("Invalid Input Error: no"), about(FREE)) is None


def about(bounds: Bounds) -> SnapshotQuery:
    """A question of which only the bounds matter."""
    return SnapshotQuery(taken=None, ask=None, uses=lambda empty: None, bounds=bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (QueryError("mine"), "mine"),
        (
            duckdb.BinderException("Binder Error: no\nLINE 1: x\n   ^"),
            "no; the columns are shown by",
        ),
        (OSError("Conversion Error: no\nway"), "no way; correct the query and ask again"),
        (pa.ArrowInvalid("Invalid Input Error: no"), "no; correct the query and ask again"),
    ],
)
def test_an_error_of_the_query_crosses_to_the_parent_as_it_is(error: Exception, said: str) -> None:
    found = failure(described(error, about(FREE)))
    assert isinstance(found, QueryError)
    assert str(found).startswith(said)


@pytest.mark.parametrize("error", [OSError("no file"), pa.ArrowInvalid("no"), KeyError("Parser Error: no")])
def test_any_other_error_is_a_fault_of_ours(error: Exception) -> None:
    found = failure(described(error, about(FREE)))
    assert type(found) is RuntimeError
    assert type(error).__name__ in str(found)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"job-1"}, "^the answer is not whole: job job-1: it was retried, .*; run the query again$"),
        ({"job-2"}, "is gone; run: conserve check --repair$"),
        (set(), "is gone; run: conserve check --repair$"),
    ],
)
def test_an_answer_that_a_retry_ends_names_the_job(taken: Snapshot, changed: set[str], said: str) -> None:
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, "from results"),
        uses=lambda empty: None,
        bounds=FREE,
        changed=lambda: changed,
    )

    def frames() -> Iterator[child.Frame]:
        yield child.Frame(answer.ROWS, b"")
        raise StoreError("/home/jobs/job-1/results/a.parquet is gone; run: conserve check --repair")

    found = answer.by_cause(frames(), question)
    assert next(found).kind == answer.ROWS
    with pytest.raises(StoreError, match=said):
        next(found)


def test_a_child_that_ends_early_is_told_like_one_that_was_killed() -> None:
    with pytest.raises(QueryTooGreedy, match="process ended early, most likely for want of memory; narrow"):
        list(checked(iter([]), FREE))
    rows = child.Frame(b"R", b"")
    assert list(checked(iter([rows, child.Frame(b"D", b""), rows]), FREE)) == [rows]


@pytest.mark.parametrize(
    ("work", "how"),
    [
        (lambda send: os._exit(3), "with exit code 3"),
        (lambda send: os.kill(os.getpid(), signal.SIGTERM), "by SIGTERM"),
        (lambda send: send(b"X"), "with exit code 1"),
    ],
)
def test_how_a_child_died_is_said(work: Any, how: str) -> None:
    with child.working(work) as frames, pytest.raises(child.Died, match=how):
        list(frames)


def test_a_child_leaves_no_pipe_open() -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    for work in (working_forever, lambda send: send(b"X", b"")):
        with child.working(work) as frames:
            next(frames)
    assert opened() == before


def test_frames_of_any_size_arrive_whole_and_in_order() -> None:
    sent = [bytes([n]) * size for n, size in enumerate((0, 1, 1 << 20, 0, 100_000))]

    def work(send: child.Send) -> None:
        for payload in sent:
            send(b"X", payload)

    with child.working(work) as frames:
        assert [(frame.kind, bytes(frame.payload)) for frame in frames] == [(b"X", one) for one in sent]


def test_a_frame_of_which_a_part_is_missing_is_none() -> None:
    def work(send: child.Send) -> None:
        send(b"X", b"whole")
        pipe = send.__closure__[0].cell_contents  # type: ignore[attr-defined]
        os.write(pipe, child.HEADER.pack(b"X", 9) + b"a part")

    with child.working(work) as frames:
        assert [frame.payload for frame in frames] == [b"whole"]


def data_limit() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_DATA)


def said_by(work: Callable[[], object], **bounds: Any) -> Any:
    """Answer of a function that runs in a child."""
    with child.working(lambda send: send(b"X", repr(work()).encode()), **bounds) as frames:
        (frame,) = frames
    return ast.literal_eval(bytes(frame.payload).decode())


def test_the_memory_of_a_child_is_bounded_beyond_what_it_has() -> None:
    (soft, hard), taken = said_by(lambda: (data_limit(), child.taken_bytes()), memory_bytes=64 * MIB)
    assert 0 <= taken + (64 + 128) * MIB - soft < 16 * MIB, "it takes a little meanwhile"
    assert hard == data_limit()[1]
    assert said_by(data_limit) == data_limit()


def test_the_memory_of_a_child_stays_under_the_systems_bound() -> None:
    hard = child.taken_bytes() + 1024 * MIB

    def bounded() -> list[int]:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        found = []
        for bound in (
            lambda: child.bound_memory(4096 * MIB),
            lambda: child.bound_memory(MIB),
            child.unbound_memory,
        ):
            bound()
            found.append(data_limit()[0])
        return found

    most, less, lifted = said_by(bounded)
    assert most == lifted == hard
    assert less < hard


def test_a_child_ends_with_its_parent_and_is_alone_with_its_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is for its parent, and the terminal too."""

    def alone() -> tuple[object, ...]:
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
        os.write(1, b"noise")
        os.write(2, b"noise")
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return number.value, ignored, os.read(0, 1), os.umask(0)

    assert said_by(alone) == (signal.SIGKILL, True, b"", 0o077)
    assert capfd.readouterr() == ("", "")


class Ticking:
    """A clock that is as much later at each look."""

    def __init__(self, step_s: float = 1.0) -> None:
        self._now, self._step_s = 0.0, step_s

    def monotonic(self) -> float:
        self._now += self._step_s
        return self._now


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[..., child.WaitingReader], list[Any]]]:
    """Makes a reader of a pipe whose bytes come after two ticks each, and what it says meanwhile."""
    monkeypatch.setattr(child, "time", Ticking())
    monkeypatch.setattr(child, "TICK_S", 0.001)
    reader, writer = os.pipe()
    heard: list[Any] = []

    def on_wait(waited_s: float | None) -> None:
        heard.append(waited_s)
        if len(heard) % 3 == 2:
            os.write(writer, b"x")

    yield lambda timeout_s: child.WaitingReader(reader, timeout_s, on_wait), heard
    os.close(reader)
    os.close(writer)


def test_waits_add_up_and_the_time_between_them_does_not(slowly: Any) -> None:
    made, heard = slowly
    waiting = made(None)
    assert waiting.read(1) == b"x"
    child.time.monotonic()  # type: ignore[attr-defined]
    assert waiting.read(2) == b"xx"
    assert heard == [1.0, 2.0, None, 4.0, 5.0, None, 7.0, 8.0, None]


def test_a_wait_that_is_too_long_in_all_ends_it(slowly: Any) -> None:
    made, heard = slowly
    with pytest.raises(child.TookTooLong):
        made(7.0).read(3)
    assert heard == [1.0, 2.0, None, 4.0, 5.0, None, 7.0]
