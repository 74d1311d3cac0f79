"""Stores of earlier versions open, with all that is in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, insert, inspect, text

from conserve.config import Settings
from conserve.store.books import shards
from conserve.store.books.readings import read_harvested, read_jobs, read_task, untaken
from conserve.store.books.results import encode
from conserve.store.books.states import JobState, OnLate
from conserve.store.database import first_schema, migrations, schema
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from conserve.store.sql.query import views
from tests.store_rows import claim, finish, job, leased, positions, result, select


@contextmanager
def first_version(settings: Settings) -> Iterator[Connection]:
    """The database that the first version would have made."""
    settings.home.mkdir(parents=True)
    engine = create_engine(settings.store_url)
    with engine.begin() as tx:
        migrations.m001_first_tables(tx)
        migrations.remember(tx, 1)
        yield tx
    engine.dispose()


def add(tx: Connection, table: str, **values: Any) -> None:
    tx.execute(insert(first_schema.metadata.tables[table]).values(**values))


def add_old_job(tx: Connection) -> None:
    """Four rows: one in a journal, one under a lease, two never leased."""
    add(tx, "job", id="job-1", state="queued", submitted_at=0.0, task="{}", num_rows=4, next_position=2,
        succeeded=1, source='{"path": null, "format": "jsonl"}')  # fmt: skip
    add(tx, "lease", job_id="job-1", owner="ann", claimed_at=0.0, expires_at=10.0)
    add(tx, "request", job_id="job-1", position=1, epoch=1, attempts=1)
    add(tx, "journal", job_id="job-1", position=0, failed=False, payload=encode(result(0)))


def test_a_store_of_the_first_version_goes_on(settings: Settings) -> None:
    with first_version(settings) as tx:
        add_old_job(tx)
    (settings.home / "jobs" / "job-1").mkdir(parents=True)
    store = Store.open(settings)
    assert store.id
    lease = leased(store)
    assert positions(lease) == [2, 3]
    finish(store, lease)
    finish(store, lease_of(1), of=[1])
    assert job(store).state is JobState.COMPLETED
    assert shards.compact(store, "job-1", now=0.0) == 4
    with views(store, now=0.0) as opened:
        assert opened.duck.execute("select row_index from results order by 1").fetchall() == [
            (0,),
            (1,),
            (2,),
            (3,),
        ]
    assert claim(store) is None
    store.close()


def lease_of(epoch: int) -> Any:
    """A lease that the first version gave out."""
    from conserve.store.books.leases import Lease, LeasedRow

    return Lease(epoch, "job-1", 10.0, (LeasedRow(1, 1, 0, 0.0),))


@pytest.mark.parametrize("number", range(LATEST))
def test_every_earlier_version_arrives_at_the_schema(settings: Settings, number: int) -> None:
    settings.home.mkdir(parents=True)
    engine = create_engine(settings.store_url)
    apply: list[Callable[[Connection], None]] = migrations.MIGRATIONS[:number]
    with engine.begin() as tx:
        for count, migration in enumerate(apply, start=1):
            migration(tx)
            migrations.remember(tx, count)
    engine.dispose()
    store = Store.open(settings)
    found = inspect(store.engine)
    for name, table in schema.metadata.tables.items():
        assert {column["name"] for column in found.get_columns(name)} == set(table.columns.keys())
    assert select(store, "select value from meta where key = 'version'") == [(str(LATEST),)]
    store.close()


@pytest.mark.parametrize("number", range(1, LATEST + 1))
def test_a_store_of_every_earlier_version_is_read_as_it_is(settings: Settings, number: int) -> None:
    """`conserve status` shows what the version knew, and changes nothing."""
    known = {
        "model": 3,
        "tags": 3,
        "deadline": 6,
        "on_late": 8,
    }  # columns, and the versions that brought them
    values = {"model": "m", "tags": '{"a":"b"}', "deadline": 7.0, "on_late": "push"}
    with first_version(settings) as tx:
        add_old_job(tx)
        for count, migration in enumerate(migrations.MIGRATIONS[1:number], start=2):
            migration(tx)
            migrations.remember(tx, count)
        for column in [name for name, since in known.items() if number >= since]:
            tx.execute(text(f"update job set {column} = :value"), {"value": values[column]})
        if number >= 8:
            tx.execute(text("insert into harvested values (2, 3.0, 4.0, 5.0)"))
    (found,) = read_jobs(settings, now=9.0)
    assert (found.id, found.state, found.row_order) == ("job-1", JobState.RUNNING, "input")
    assert (found.rows, found.waiting, found.running, found.succeeded) == (4, 2, 1, 1)
    has = {name for name, since in known.items() if number >= since}
    assert found.model == ("m" if "model" in has else None)
    assert found.tags == ({"a": "b"} if "tags" in has else {})
    assert found.deadline == (7.0 if "deadline" in has else None)
    assert found.on_late is (OnLate.PUSH if "on_late" in has else None)
    assert read_harvested(settings) == ([(2, 3.0, 4.0)] if number >= 8 else [])
    assert (untaken(settings, "job-1"), read_task(settings, "job-1")) == ([2], "{}")


def test_the_tables_of_the_first_version_are_not_edited() -> None:
    """The first version's tables are a matter of record: the number of columns of each."""
    tables = first_schema.metadata.tables
    assert {name: len(table.columns) for name, table in tables.items()} == {
        "meta": 2,
        "job": 19,
        "lease": 5,
        "request": 10,
        "journal": 4,
        "shard": 6,
    }
