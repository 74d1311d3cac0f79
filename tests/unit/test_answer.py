"""A query computes in a child within bounds, and fails alone."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from conserve.errors import QueryError, QueryTooGreedy
from conserve.jobs.requests.submit import submit
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.sql import answer, child, scratch
from conserve.store.sql.answer import SnapshotQuery
from conserve.store.sql.bounds import Bounds, size_text
from conserve.store.sql.query import ask
from conserve.store.sql.snapshot import Snapshot, snapshot
from tests.conftest import WriteInput

MIB = 1 << 20
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
        uses=lambda: None,
        bounds=Bounds(**({"threads": 2, "memory_bytes": 512 * MIB} | bounds)),
    )
    with answer.answered(question, warn=lambda found: None) as rows:
        return list(rows.tuples())


def test_rows_arrive_in_order_over_many_batches(taken: Snapshot) -> None:
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
def test_a_mistake_found_at_any_time_is_one_line(taken: Snapshot, sql: str) -> None:
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


def test_time_that_the_reader_takes_does_not_count(taken: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 1000))  # each look at the clock is a thousand seconds after the last
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, "from range(5000)"),
        uses=lambda: None,
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
        uses=lambda: None,
        bounds=Bounds(threads=1, memory_bytes=512 * MIB),
    )
    with (
        pytest.raises(QueryTooGreedy, match=r"ended by SIGKILL, .* want of memory \(it may take 512 MiB\); "),
        answer.answered(question, warn=lambda found: None),
    ):
        pass


def test_our_own_mistakes_are_not_hidden(taken: Snapshot) -> None:
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: {}["nowhere"],  # type: ignore[index,return-value]
        uses=lambda: None,
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
    def interrupted(waited_s: float | None) -> None:
        raise KeyboardInterrupt

    pids = []

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
    assert all(waited_s is not None and waited_s > 0 for waited_s in heard[:-1])


def test_a_query_that_spills_leaves_nothing(taken: Snapshot, tmp_path: Path) -> None:
    question = SnapshotQuery(
        taken=taken,
        ask=lambda duck: ask(duck, "select range % 2000000, count(*) from range(4000000) group by 1"),
        uses=lambda: None,
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


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (512 * MIB, "512 MiB"),
        (1536 * MIB, "1.5 GiB"),
        (1024 * MIB, "1 GiB"),
        (1000 * MIB, "1000 MiB"),
        (1024 * MIB - 1, "1024 MiB"),
        (MIB // 2, "0.5 MiB"),
    ],
)
def test_a_size_is_said_in_its_unit(number: int, text: str) -> None:
    assert size_text(number) == text
