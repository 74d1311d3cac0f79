"""Counters that number rows: no number is given twice, whatever became of the rows, and of the database."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, text

from conserve.config import load
from conserve.store.books import leases
from conserve.store.database import counters, schema
from conserve.store.database.store import Store
from tests.postgres import Databases
from tests.store_rows import add_job, claim, finish, leased, select

BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


def ended(store: Store) -> int:
    """Epoch of a lease whose row is gone."""
    lease = leased(store, limit=1)
    finish(store, lease)
    with store.write() as tx:
        leases.end_if_empty(tx, {lease.epoch})
    assert select(store, "select * from lease") == []
    return lease.epoch


def next_epoch(store: Store) -> int:
    return leased(store, limit=1).epoch


@BOTH
def test_the_last_number_is_known_after_its_row_is_gone(store: Store) -> None:
    add_job(store)
    with store.read() as tx:
        assert counters.last(tx, schema.lease) == 0
    epoch = ended(store)
    with store.read() as tx:
        assert counters.last(tx, schema.lease) == epoch == 1


@BOTH
def test_numbers_go_up_alone(store: Store) -> None:
    """Also if they are raised to the first one, or to one that was passed."""
    add_job(store, rows=9)
    with store.write() as tx:
        counters.raise_to(tx, schema.lease, 1)
    assert next_epoch(store) == 2
    for least, following in ((41, 42), (7, 43), (0, 44)):
        with store.write() as tx:
            counters.raise_to(tx, schema.lease, least)
        assert next_epoch(store) == following


@BOTH
def test_rows_that_were_copied_with_their_numbers_are_counted(store: Store) -> None:
    """PostgreSQL counts by itself only the rows that it numbers."""
    add_job(store)
    with store.write() as tx:
        owner = {"owner": "ann", "claimed_at": 0.0, "expires_at": 0.0}
        tx.execute(insert(schema.lease).values(epoch=9, job_id="job-1", **owner))
        counters.raise_to(tx, schema.lease, 0)
    assert next_epoch(store) == 10


@BOTH
def test_an_empty_table_begins_with_the_first_number(store: Store) -> None:
    with store.write() as tx:
        for table in counters.numbered():
            assert counters.last(tx, table) == 0
            counters.raise_to(tx, table, 0)
    add_job(store)
    assert select(store, "select seq from job") == [(1,)]


@BOTH
def test_epochs_after_a_restore_are_ahead_of_all_that_were_given_out(store: Store) -> None:
    add_job(store)
    with store.write() as tx:
        counters.never_again(tx, now=12.5)
    assert next_epoch(store) == 12_501
    with store.write() as tx:
        counters.never_again(tx, now=1.0)
    assert next_epoch(store) == 12_502


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_all_counters_go_across(store: Store, tmp_path: Path, databases: Databases) -> None:
    """To a database of the other kind and back, without a row that tells them."""

    def used(tx: Connection) -> None:
        for number, table in enumerate(counters.numbered(), start=5):
            counters.raise_to(tx, table, number)

    there = load({"home": tmp_path / "there"}, environ={})
    back = load({"home": tmp_path / "back", "store": databases.new()}, environ={})
    with store.write() as tx:
        used(tx)
    with closing(Store.open(there)) as other, closing(Store.open(back)) as again:
        for source, target in ((store, other), (other, again)):
            with source.read() as read, target.write() as tx:
                counters.carry(read, tx)
        with again.read() as tx:
            found = {table.name: counters.last(tx, table) for table in counters.numbered()}
        assert found == {table.name: n for n, table in enumerate(counters.numbered(), start=5)}
        add_job(again)
        assert claim(again) is not None
    databases.drop(back.store_url)


def test_the_tables_whose_rows_are_numbered() -> None:
    names = {table.name for table in counters.numbered()}
    assert names == {"job", "lease", "shard", "file", "batch", "api_key", "hook", "message"}


@pytest.mark.parametrize("table", ["lease", "job"])
def test_one_entry_of_sqlite_is_kept_for_each_table(store: Store, table: str) -> None:
    with store.write() as tx:
        for least in (3, 8):
            counters.raise_to(tx, schema.metadata.tables[table], least)
        query = text("select seq from sqlite_sequence where name = :name")
        assert tx.scalars(query, {"name": table}).all() == [8]
