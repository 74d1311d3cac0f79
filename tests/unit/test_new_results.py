"""Results of a job as they become durable: each row once, wherever its result went meanwhile."""

from pathlib import Path

import pytest
from sqlalchemy import text

from conserve.errors import StoreDamaged
from conserve.store.books import shards
from conserve.store.books.new_results import NewResults
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.upkeep import mending
from tests.store_rows import add_job, finish, job, leased, result


@pytest.fixture
def new(store: Store) -> NewResults:
    """Reader of a job of twelve rows."""
    add_job(store, rows=12)
    return NewResults(store, job(store))


def look(new: NewResults) -> list[int]:
    return [found.row_index for found in new.look()]


def shard_of(store: Store) -> Path:
    (path,) = (layout.job_folder(store.home, "job-1") / layout.RESULTS).glob("*")
    return path


def test_each_row_is_seen_once_in_the_journal_or_in_a_shard(store: Store, new: NewResults) -> None:
    add_job(store, "job-2", rows=2)
    finish(store, leased(store, only=["job-2"]))
    assert new.look() == []
    lease = leased(store, limit=10)
    finish(store, lease, of=[0, 2], failed=[2])
    assert new.look() == [result(0), result(2, failed=True)]
    finish(store, lease, of=[1, 3])
    shards.compact(store, "job-1", now=0.0)
    assert new.look() == [result(1), result(3)], "of shards that have rows which were seen in the journal"
    finish(store, lease, of=[4])
    shards.compact(store, "job-1", now=0.0)
    finish(store, lease, of=[5])
    assert look(new) == [5, 4]
    assert new.look() == []


def test_a_row_that_is_asked_again_is_not_new(store: Store, new: NewResults) -> None:
    lease = leased(store, limit=2)
    finish(store, lease, failed=[0, 1])
    assert look(new) == [0, 1]
    shards.retry_failed(store, "job-1", now=0.0)
    finish(store, leased(store, limit=2), of=[0])
    shards.compact(store, "job-1", now=0.0)
    finish(store, leased(store, limit=1), of=[2])
    assert look(new) == [2]


def test_more_rows_than_a_list_takes_come_at_one_look(store: Store) -> None:
    add_job(store, rows=1101)
    new = NewResults(store, job(store))
    finish(store, leased(store, limit=1101))
    assert look(new) == list(range(1101))


def test_a_damaged_result_is_left_out_until_it_is_repaired(
    store: Store, new: NewResults, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, and comes as soon as the row was answered again."""
    finish(store, leased(store, limit=3))
    with store.write() as tx:
        tx.execute(text("update journal set checksum = checksum + 1 where position = 1"))
    assert (look(new), look(new)) == ([0, 2], [])
    assert caplog.messages == ["row 1 of job job-1 is damaged in the journal; run: conserve check"]
    mending.mend_rows(store, "job-1", now=0.0)
    assert look(new) == []
    finish(store, leased(store, limit=1))
    assert look(new) == [1]


def test_a_shard_that_is_gone_is_read_where_it_comes_back(store: Store, new: NewResults) -> None:
    """A retry deletes files between two statements of a look, and the rows get other results."""
    finish(store, leased(store, limit=2))
    shards.compact(store, "job-1", now=0.0)
    path = shard_of(store)
    kept = path.rename(path.with_suffix(".kept"))
    assert new.look() == []
    kept.rename(path)
    assert look(new) == [0, 1]


def test_a_damaged_shard_ends_the_reading(store: Store, new: NewResults) -> None:
    finish(store, leased(store, limit=2))
    shards.compact(store, "job-1", now=0.0)
    path = shard_of(store)
    path.write_bytes(path.read_bytes()[:100])
    said = rf"^jobs/job-1/results/{path.name} cannot be read; run: conserve check --repair job-1$"
    with pytest.raises(StoreDamaged, match=said) as raised:
        new.look()
    assert raised.value.job_id == "job-1"
