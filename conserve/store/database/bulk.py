"""Many rows at once, as each database takes them fastest."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Executable,
    Select,
    Table,
    any_,
    bindparam,
    insert,
)
from sqlalchemy.exc import DBAPIError

from conserve.store.database.connection import ENDS, chunks

T = TypeVar("T")

FEWEST = 16  # rows for which a COPY takes less time than single inserts


def insert_rows(tx: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that all name the same columns."""
    if not rows:
        return
    if tx.dialect.name == "postgresql" and len(rows) >= FEWEST:
        copy(tx, table, rows)
    else:
        tx.execute(insert(table), rows)


def copy(tx: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows by PostgreSQL's COPY: one statement, of which the server parses and plans nothing."""
    names = list(rows[0])
    into = f"copy {table.name} ({', '.join(names)}) from stdin (format binary)"
    with reported(tx, into), driver(tx).cursor() as cursor, cursor.copy(into) as stream:
        stream.set_types([postgresql_type(table, name) for name in names])
        for row in rows:
            stream.write_row([row[name] for name in names])


def read_rows(tx: Connection, statement: Select[Any]) -> Iterator[Any]:
    """Yield the rows of a statement, with their columns as attributes.

    PostgreSQL sends them in its binary form: as text, bytes are twice as long, and both sides convert them.
    """
    if tx.dialect.name != "postgresql":
        yield from tx.execute(statement)
        return
    from psycopg.rows import namedtuple_row

    compiled = statement.compile(dialect=tx.dialect)
    named: dict[str, Any] = {"binary": True, "row_factory": namedtuple_row}
    with reported(tx, compiled.string), driver(tx).cursor(**named) as cursor:
        cursor.execute(compiled.string, compiled.params)
        yield from cursor


def finish(tx: Connection, statement: Executable, *, ends: bool = True) -> Sequence[Any]:
    """Run a statement, and commit if it `ends` the transaction; returns its rows. SQLite commits later, as usual.

    PostgreSQL is sent both at once, so that it holds the statement's locks for its own time alone. Else it would
    hold them until this process has its turn and sends the commit. Statements behind this one are another
    transaction.
    """
    return tx.execute(statement, execution_options={ENDS: ends}).all()


def driver(tx: Connection) -> Any:
    """The driver's own connection."""
    return tx.connection.driver_connection


@contextmanager
def reported(tx: Connection, statement: str) -> Iterator[None]:
    """Report errors of the driver as SQLAlchemy reports those of its own statements."""
    failure: type[Exception] = tx.dialect.loaded_dbapi.Error
    try:
        yield
    except failure as error:
        raise DBAPIError(statement, None, error) from error


def slices(tx: Connection, values: Sequence[T]) -> Iterable[Sequence[T]]:
    """Cut values into parts that `among` takes."""
    return [values] if tx.dialect.name == "postgresql" else chunks(values)


def among(tx: Connection, column: "Column[Any]", values: Sequence[Any]) -> ColumnElement[bool]:
    """Condition that a column has one of these values.

    PostgreSQL gets them as one array: reading a list of a thousand parameters took it longer than the rows.
    """
    if tx.dialect.name == "postgresql":
        return column == any_(bindparam(None, values, ARRAY(column.type)))
    return column.in_(values)


def postgresql_type(table: Table, name: str) -> str:
    """Name of a column's type, which a binary COPY has to be told."""
    from sqlalchemy.dialects import postgresql

    said = table.c[name].type.compile(postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
    return "float8" if said == "float" else said  # psycopg knows the other names
