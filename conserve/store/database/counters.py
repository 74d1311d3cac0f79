"""Counters that number rows: they never go back, so that no epoch of a lease is given twice."""

from sqlalchemy import Connection, Table, func, select, text

from conserve.store.database import schema


def numbered() -> list[Table]:
    """Tables whose rows the database numbers."""
    return [table for table in schema.metadata.sorted_tables if table.autoincrement_column is not None]


def last(tx: Connection, table: Table) -> int:
    """Last number that a table gave to a row, also if the row is gone as far as the database knows that."""
    column = table.autoincrement_column
    assert column is not None
    return max(tx.scalar(select(func.max(column))) or 0, counter(tx, table))


def counter(tx: Connection, table: Table) -> int:
    """Counter that the database keeps for a table; 0 if it keeps none.

    SQLite itself keeps that of leases alone; those of other tables come from a database that was moved.
    """
    if tx.dialect.name == "postgresql":
        return int(tx.scalar(text(f"select pg_sequence_last_value({SEQUENCE})"), named(table)) or 0)
    found = text("select seq from sqlite_sequence where name = :name")
    return int(tx.scalar(found, {"name": table.name}) or 0)


def carry(source: Connection, target: Connection) -> None:
    """Raise the counters of the target to those of the source."""
    for table in numbered():
        raise_to(target, table, last(source, table))


def never_again(tx: Connection, *, now: float) -> None:
    """Start epochs beyond all that a later state of this database gave out, so that late writers stay late.

    No store gives out a thousand leases a second for long, so milliseconds since 1970 are always ahead.
    """
    raise_to(tx, schema.lease, int(now * 1000))


def raise_to(tx: Connection, table: Table, least: int) -> None:
    """Have the next row numbered higher than `least`, and higher than every row before it."""
    least = max(least, last(tx, table))
    if least < 1:
        return
    if tx.dialect.name == "postgresql":
        tx.execute(text(f"select setval({SEQUENCE}, :least)"), {**named(table), "least": least})
    else:
        values = {"name": table.name, "least": least}
        tx.execute(text("delete from sqlite_sequence where name = :name"), values)
        tx.execute(text("insert into sqlite_sequence (name, seq) values (:name, :least)"), values)


SEQUENCE = "cast(pg_get_serial_sequence(:table, :column) as regclass)"


def named(table: Table) -> dict[str, str]:
    """Parameters of `SEQUENCE`."""
    column = table.autoincrement_column
    assert column is not None
    return {"table": table.name, "column": column.name}
