"""A damaged record of a job is mended from the record at submit in the job's folder, which keeps what has moved."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.store.books import batches, catalog, hooks, places, shards
from conserve.store.books.events import Event
from conserve.store.database.store import Store
from conserve.store.files import layout, marks
from conserve.store.files.marks import Mark
from conserve.store.files.place import place_of
from conserve.store.upkeep import records
from tests.store_rows import (
    add_job,
    claim,
    finish,
    job,
    leased,
    positions,
    put_back,
    select,
    while_writing,
)

JOB = "job-1"
NOW = 50.0
FROM_FOLDER = f"the record of job {JOB} was taken from its folder"


def submitted(store: Store, *, marked: bool = True, rows: int = 4) -> dict[str, Any]:
    """A job with requests and a mark; returns its record at submit."""
    add_job(store, JOB, rows=rows, priority=3, tags={"by": "ann"}, files={}, now=5.0)
    pq.write_table(pa.table({"row_index": list(range(rows))}), layout.requests_file(store.home, JOB))
    with store.write() as tx:
        batches.of_submitted(tx, JOB, now=0.0)
        hooks.add(tx, "https://example.com/", events=tuple(Event), now=0.0)
    found = record(store)
    if marked:
        mark = Mark(store_id=store.id, registered=True, record=found)
        place_of(layout.job_folder(store.home, JOB)).set_mark(mark)
    return found


def record(store: Store) -> dict[str, Any]:
    with store.read() as tx:
        return catalog.record(tx, JOB)


def change(store: Store, what: str) -> None:
    with store.write() as tx:
        tx.exec_driver_sql("delete from message")
        tx.exec_driver_sql(f"update job set {what}")


def told(store: Store) -> list[Any]:
    return [event for (event,) in select(store, "select event from message")]


def test_what_was_submitted_comes_from_the_folder_and_what_has_moved_stays(store: Store) -> None:
    submitted(store)
    finish(store, leased(store, limit=2, model="small"), failed=[1], prompt_tokens=4)
    shards.compact(store, JOB, now=0.0)
    before = record(store)
    change(store, "task = '{', tags = '{', source = '{', submitted_at = 9, files = '{'")
    change(store, "priority = 7")
    assert records.mend(store, JOB, now=NOW) == FROM_FOLDER
    assert record(store) == before
    assert (before["succeeded"], before["failed"], before["model"]) == (1, 1, "small")
    assert told(store) == []


def test_columns_that_only_an_earlier_version_had_are_passed_over(store: Store) -> None:
    found = submitted(store)
    mark = Mark(store_id=store.id, registered=True, record={**found, "colour": "red"})
    place_of(layout.job_folder(store.home, JOB)).set_mark(mark)
    assert records.mend(store, JOB, now=NOW) == FROM_FOLDER
    assert record(store) == found


@pytest.mark.parametrize("marked", [True, False])
def test_a_state_that_is_none_becomes_queued_and_is_told(store: Store, marked: bool) -> None:
    submitted(store, marked=marked)
    change(store, "state = 'quexed', failed_by = 'damage'")
    said = FROM_FOLDER if marked else f"the record of job {JOB} was mended"
    assert records.mend(store, JOB, now=NOW) == said
    assert (job(store).state, told(store)) == ("queued", ["in_progress"])
    assert job(store).failed_by is None


@pytest.mark.parametrize("state", ["queued", "paused", "completed", "failed", "cancelled", "expired"])
def test_a_state_that_is_one_stays(store: Store, state: str) -> None:
    submitted(store)
    change(store, f"state = '{state}', task = '{{'")
    records.mend(store, JOB, now=NOW)
    assert (job(store).state, told(store)) == (state, [])


@pytest.mark.parametrize(("said", "kept"), [("damage", "damage"), ("chance", None)])
def test_a_cause_of_a_failure_that_is_none_is_forgotten(store: Store, said: str, kept: str | None) -> None:
    submitted(store)
    change(store, f"state = 'failed', failed_by = '{said}'")
    assert records.mend(store, JOB, now=NOW) == FROM_FOLDER
    assert (job(store).state, job(store).failed_by) == ("failed", kept)


COUNTERS = ("next_position", "retries", *catalog.COUNTERS)


def test_counters_that_are_no_numbers_become_0(store: Store) -> None:
    """They are counted again afterwards; the others stay."""
    submitted(store)
    change(store, ", ".join(f"{name} = 2" for name in COUNTERS))
    change(store, "succeeded = 'many', retries = 'x'")
    assert records.mend(store, JOB, now=NOW) == FROM_FOLDER
    wanted = dict.fromkeys(COUNTERS, 2) | {"succeeded": 0, "retries": 0}
    assert {name: record(store)[name] for name in COUNTERS} == wanted
    change(store, ", ".join(f"{name} = 'none'" for name in COUNTERS))
    records.mend(store, JOB, now=NOW)
    assert {record(store)[name] for name in COUNTERS} == {0}


@pytest.mark.parametrize("place", ["shard", "journal", "request", "span"])
def test_a_cursor_that_is_no_number_is_behind_the_last_row_in_a_place(store: Store, place: str) -> None:
    """A harvester may lease rows before they are counted."""
    submitted(store)
    lease = leased(store, limit=3)
    if place == "request":
        put_back(store, lease, 2, available_at=99.0)
        finish(store, lease, of=[0, 1])
    elif place != "span":
        finish(store, lease)
        if place == "shard":
            shards.compact(store, JOB, now=0.0)
    change(store, "next_position = 'x'")
    records.mend(store, JOB, now=NOW)
    assert record(store)["next_position"] == 3
    assert positions(claim(store)) == [3]


def test_shards_are_read_while_nobody_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(store)
    finish(store, leased(store, limit=3))
    shards.compact(store, JOB, now=0.0)
    change(store, "next_position = 'x'")
    read = while_writing(monkeypatch, (places, "content"))
    records.mend(store, JOB, now=NOW)
    assert (read, record(store)["next_position"]) == ([], 3)


def test_a_cursor_is_within_the_job(store: Store) -> None:
    submitted(store)
    finish(store, leased(store, limit=4))
    pq.write_table(pa.table({"row_index": [0, 1]}), layout.requests_file(store.home, JOB))
    change(store, "next_position = 'x'")
    records.mend(store, JOB, now=NOW)
    assert record(store)["next_position"] == 2


@pytest.mark.parametrize(
    ("said", "requests", "rows"),
    [("9", True, 4), ("'x'", True, 4), ("9", False, 9), ("1", False, 3), ("'x'", False, 3)],
)
def test_the_number_of_rows_is_that_of_the_requests_or_as_many_as_have_results(
    store: Store, said: str, requests: bool, rows: int
) -> None:
    submitted(store, marked=False)
    finish(store, leased(store, limit=3))
    shards.compact(store, JOB, now=0.0)
    change(store, f"num_rows = {said}")
    if not requests:
        layout.requests_file(store.home, JOB).unlink()
    records.mend(store, JOB, now=NOW)
    assert record(store)["num_rows"] == rows


@pytest.mark.parametrize(("lost", "rows"), [((), 4), ((0,), 4), ((1,), 3), ((0, 1), 0)])
def test_without_requests_the_last_answer_that_can_be_read_tells_how_many_rows(
    store: Store, lost: Sequence[int], rows: int
) -> None:
    submitted(store, marked=False)
    for limit in (3, 1):
        finish(store, leased(store, limit=limit))
        shards.compact(store, JOB, now=0.0)
    files = [store.home / file for (file,) in select(store, "select file from shard order by id")]
    for path in (layout.requests_file(store.home, JOB), *(files[number] for number in lost)):
        path.unlink()
    change(store, "num_rows = 'x'")
    records.mend(store, JOB, now=NOW)
    assert record(store)["num_rows"] == rows


def test_without_requests_and_results_the_record_says_how_many_rows(store: Store) -> None:
    submitted(store, marked=False)
    layout.requests_file(store.home, JOB).unlink()
    change(store, "num_rows = 'x'")
    records.mend(store, JOB, now=NOW)
    assert record(store)["num_rows"] == 0


def test_a_record_that_is_lost_is_cancelled_and_tells_why(store: Store) -> None:
    submitted(store, marked=False)
    finish(store, leased(store, limit=3))
    change(store, "task = '{', source = '{', files = '{', state = 'failed', failed_by = 'damage'")
    said = f"the record of job {JOB} is lost; the results it has stay, and nothing of it is run any more"
    assert records.mend(store, JOB, now=NOW) == said
    found = job(store)
    assert (found.state, found.error, found.finished_at) == ("cancelled", said, NOW)
    assert found.failed_by is None
    assert (found.task, found.source.path, found.source.format) == ('{"kind":"prompt"}', None, "unknown")
    assert (found.files, found.succeeded, told(store)) == ({}, 3, ["cancelled"])


def test_differences_name_the_columns_that_do_not_move(store: Store) -> None:
    then = submitted(store)
    mark = Mark(store_id=store.id, record={**then, "colour": "red"})

    def differences(mark: Mark) -> list[str]:
        with store.read() as tx:
            return records.differences(tx, JOB, mark)

    assert differences(mark) == []
    moving = "state = 'paused', error = 'x', started_at = 1, finished_at = 1, model = 'm', files = null"
    change(
        store,
        moving
        + ", priority = 1, seq = 9, deadline = 1, on_late = 'push', bound_by_run = true, failed_by = 'loss'"
        + "".join(f", {name} = 3" for name in COUNTERS),
    )
    assert differences(mark) == []
    change(store, "submitted_at = 1, tags = 'x', num_rows = 5")
    assert differences(mark) == ["submitted_at", "num_rows", "tags"]
    assert differences(Mark(store_id=store.id)) == []


def test_a_mark_is_written_anew_from_the_record(store: Store) -> None:
    """Also where the folder is gone."""
    found = submitted(store)
    folder = layout.job_folder(store.home, JOB)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert records.mend_mark(store, JOB) == f"jobs/{JOB}/{marks.MARK} was written anew"
    assert place_of(folder).mark() == Mark(store_id=store.id, registered=True, record=found)
