"""Tests that need PostgreSQL: transactions that see one moment, and locks of rows.

POSTGRES_URL=postgresql+psycopg://user@host/empty_database pytest tests/unit/test_postgresql.py
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from conserve.config import Settings, load
from conserve.jobs.hooks.courier import Courier
from conserve.store.books import batches, catalog, hooks, outbox, queue, shards
from conserve.store.books.events import Event
from conserve.store.books.readings import read_jobs
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import home
from conserve.store.sql.query import views
from conserve.store.upkeep.sweep import sweep
from tests.commands import until
from tests.receiver import receiving
from tests.store_rows import add_job, finish, job, leased, select

URL = os.environ.get("POSTGRES_URL", "")
ROWS = 100

pytestmark = pytest.mark.skipif(not URL, reason="POSTGRES_URL names no database")


@pytest.fixture
def postgres(tmp_path: Path) -> Settings:
    """An empty store."""
    engine = create_engine(URL)
    schema.metadata.drop_all(engine)
    engine.dispose()
    return load({"home": tmp_path / "home", "store": URL}, environ={})


@pytest.fixture
def store(postgres: Settings) -> Iterator[Store]:
    opened = Store.open(postgres)
    yield opened
    opened.close()


def finished_job(store: Store) -> None:
    add_job(store, rows=ROWS)
    finish(store, leased(store, limit=ROWS))


def test_a_read_sees_every_row_once_while_a_compaction_commits(store: Store, postgres: Settings) -> None:
    """Between the two statements of a read all rows move from the journal to a shard."""
    finished_job(store)
    with store.read() as tx:
        before = shards.files(tx)
        assert shards.compact(store, "job-1", now=0.0) == ROWS
        assert shards.files(tx) == before == []
        assert tx.scalar(text("select count(*) from journal")) == ROWS
        assert tx.scalar(text("show transaction_isolation")) == "repeatable read"
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select count(*) from results").fetchall() == [(ROWS,)]
    (reading,) = read_jobs(postgres, now=0.0)
    assert reading.done == ROWS


def test_a_read_may_not_write(store: Store) -> None:
    with pytest.raises(Exception, match="read-only"), store.read() as tx:
        tx.execute(text("delete from job"))


def test_looking_for_rows_to_claim_is_a_read(store: Store) -> None:
    add_job(store)
    with store.read() as tx:
        assert len(queue.runnable_jobs(tx, None, locked=False)) == 1


def test_a_sweep_and_a_registration_wait_for_each_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is swept before it is registered, or not at all: also where locks on files tell nothing."""
    finished_job(store)
    shards.compact(store, "job-1", now=0.0)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    (file,) = [store.home / file for (file,) in select(store, "select file from shard")]
    with store.write() as tx:
        tx.execute(text("delete from shard"))
    swept: list[int] = []
    with store.write() as tx:  # a registration under way
        catalog.lock_job(tx, "job-1")
        thread = threading.Thread(target=lambda: swept.append(sweep(store, now=4e9)))
        thread.start()
        until(lambda: swept != [] or tx.scalar(text("select count(*) from pg_locks where not granted")) > 0)
        assert swept == []
        tx.execute(
            text(
                "insert into shard (job_id, file, failed, num_rows, created_at) "
                "values ('job-1', :file, false, 100, 0)"
            ),
            {"file": str(file.relative_to(store.home))},
        )
    thread.join()
    assert swept == [0]
    assert file.is_file()


def test_an_orphan_is_swept(store: Store) -> None:
    finished_job(store)
    shards.compact(store, "job-1", now=0.0)
    left = home.job_folder(store.home, "job-1") / home.RESULTS / "left.parquet"
    left.write_bytes(b"")
    assert sweep(store, now=4e9) == 1
    assert not left.exists()


def test_a_retry_puts_failed_rows_back(store: Store) -> None:
    add_job(store, rows=4)
    finish(store, leased(store), failed=(1, 2))
    shards.compact(store, "job-1", now=0.0)
    assert shards.retry_failed(store, "job-1", now=0.0) == 2
    assert (job(store).succeeded, job(store).failed) == (2, 0)


def test_a_retry_leaves_rows_that_were_never_rendered(store: Store) -> None:
    add_job(store, rows=3)
    finish(store, leased(store), failed=(1, 2))
    requests = home.requests_file(store.home, "job-1")
    requests.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"row_index": range(3), "payload": ["a", None, "c"], "error": [None, "empty", None]})
    pq.write_table(rows, requests)
    shards.compact(store, "job-1", now=0.0)
    assert shards.retry_failed(store, "job-1", now=0.0) == 1
    assert select(store, "select position, failed from journal") == [(1, True)]
    assert (job(store).succeeded, job(store).failed) == (1, 1)


def test_deaths_of_an_engine_are_counted(store: Store) -> None:
    add_job(store, rows=1)
    for deaths, suspect in enumerate((False, True, True)):
        lease = leased(store, suspect=bool(deaths))
        assert lease.rows[0].deaths == max(0, deaths - 1)
        with store.write() as tx:
            queue.put_back(tx, epoch=lease.epoch, job_id="job-1", position=0, failed=suspect, suspect=True)
    assert select(store, "select failures, deaths from request") == [(2, 2)]


def test_two_stores_in_one_home_have_ids_of_their_own(store: Store, postgres: Settings) -> None:
    other = Store.open(load({"home": postgres.home}, environ={}))
    assert store.id != other.id
    assert store.place != other.place
    other.close()


def test_two_couriers_send_each_message_once(store: Store) -> None:
    with receiving() as receiver:
        with store.write() as tx:
            hooks.add(tx, receiver.url, events=tuple(Event), allow_private=True, now=0.0)
        for number in range(20):
            add_job(store, f"job-{number}")
            with store.write() as tx:
                batches.of_submitted(tx, f"job-{number}", now=0.0)
        threads = [threading.Thread(target=Courier(store).finish, args=[60.0]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with store.read() as tx:
            sent = outbox.page(tx, limit=100)
    assert {message.state for message in sent} == {"delivered"}
    assert sorted(got.id for got in receiver.got) == sorted(message.id for message in sent)
