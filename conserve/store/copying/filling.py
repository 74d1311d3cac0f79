"""Filling: an empty database gets the rows of another one, page by page, and is compared with it.

The mark in the database that is filled names the last row of each table, and is written in the transaction that
adds the rows. So a process that is killed leaves a beginning that the next one goes on from.
"""

from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import Connection, Engine, Table, delete, insert

from conserve.errors import StoreDamaged, StoreError
from conserve.store.copying import tables
from conserve.store.copying.tables import TableDigest
from conserve.store.database import counters, guard, schema
from conserve.store.database.connection import transaction
from conserve.store.database.migrations import lock, migrate
from conserve.store.database.moves import MoveMark, MoveState

Told = Callable[[str, int], None]
"""Is called with the name of a table and the number of rows that were added to it."""


def begin(target: Engine, mark: MoveMark, require: Callable[[Connection], None] | None = None) -> None:
    """Make the tables anew, empty, under a mark; goes on where an earlier process with the same mark was killed.

    `require` is called in the transaction that drops the tables, and raises if the target must not be emptied.
    """
    with transaction(target) as tx:
        alone(tx)
        before = guard.mark_of(tx, locked=True)
        if before is not None and before.id == mark.id and before.state is MoveState.ARRIVING:
            return
        if require is not None:
            require(tx)
        if before is not None:
            guard.drop(tx)
        schema.metadata.drop_all(tx)
        migrate(tx)
        tx.execute(delete(schema.meta))  # its facts are those of the source
        guard.put_mark(tx, mark)


def alone(tx: Connection) -> None:
    """Wait until no other process makes a store here or writes to one; on SQLite a writer is alone anyway."""
    lock(tx)
    if tx.dialect.name == "postgresql" and (there := guard.tables(tx)):
        names = ", ".join(guard.quoted(tx, table) for table in there)
        guard.run(tx, f"lock table {names} in access exclusive mode")


def fill(source: Connection, target: Engine, told: Told) -> None:
    """Add the rows that the target lacks."""
    for table in tables.in_order():
        while added := add_page(source, target, table):
            told(table.name, added)


def add_page(source: Connection, target: Engine, table: Table) -> int:
    """Add the next rows of a table; returns how many."""
    with transaction(target) as tx:
        mark = guard.mark_of(tx, locked=True)
        if mark is None:
            raise StoreError("the move was cancelled meanwhile; the store stays where it was")
        rows = tables.page(source, table, mark.after.get(table.name))
        if not rows:
            return 0
        tx.execute(insert(table), [dict(row._mapping) for row in rows])
        after = {**mark.after, table.name: tables.key_of(table, rows[-1])}
        guard.put_mark(tx, replace(mark, after=after))
        return len(rows)


def compare(source: Connection, target: Connection) -> dict[str, TableDigest]:
    """Digests of all tables; raises `StoreDamaged` unless each table has the same rows on both sides."""
    found = {}
    for table in tables.in_order():
        there, here = tables.digest(source, table), tables.digest(target, table)
        if there != here:
            raise StoreDamaged(differs(table.name, there, here))
        found[table.name] = there
    return found


def differs(name: str, there: TableDigest, here: TableDigest) -> str:
    """Sentence on a table that is not the same on both sides."""
    how = f"{here.rows:,} rows instead of {there.rows:,}" if here.rows != there.rows else "other rows"
    return (
        f"the copy of the table {name} has {how}; nothing was lost: the source is as it was. "
        "Run: conserve store move SOURCE TARGET --cancel"
    )


def end(source: Connection, tx: Connection) -> dict[str, TableDigest]:
    """Carry the counters and compare both sides; the mark stays, for the caller to remove."""
    counters.carry(source, tx)
    return compare(source, tx)


def discard(target: Engine, move_id: str) -> None:
    """Empty a database that a move has begun to fill; one of another move stays as it is."""
    with transaction(target) as tx:
        mark = guard.mark_of(tx, locked=True)
        if mark is not None and mark.id == move_id and mark.state is MoveState.ARRIVING:
            schema.metadata.drop_all(tx)
