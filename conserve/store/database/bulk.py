"""Many rows at once, as each database takes them fastest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    CursorResult,
    Executable,
    Select,
    Table,
    bindparam,
    func,
    insert,
    text,
)
from sqlalchemy.exc import DBAPIError

from conserve.store.database.connection import AFRESH, ENDS, chunks

FEWEST = 16  # rows for which a COPY takes less time than single inserts


def insert_rows(tx: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that all name the same columns."""
    if not rows:
        return
    if tx.dialect.name == "postgresql" and len(rows) >= FEWEST:
        copy(tx, table, rows)
    else:
        tx.execute(insert(table), rows)


def upsert_into(tx: Connection, table: Table) -> Any:
    """The database's own INSERT, which says what becomes of a row that another process has added meanwhile."""
    from sqlalchemy.dialects import postgresql, sqlite

    own = postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert
    return own(table)


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


def along_indexes(tx: Connection) -> None:
    """Have PostgreSQL read rows that this transaction orders along an index, and not sort what it finds.

    For a sort it fetches the rows of a bitmap, deleted ones too until a vacuum. A reader of the first rows of a
    table whose first rows are always deleted would fetch all that ever were there, each time. An index notes which
    of its entries are dead where a reader finds out, and the next one passes over them.
    """
    if tx.dialect.name == "postgresql":
        tx.execute(text("set local enable_sort = off"))


def afresh(tx: Connection, statement: Executable) -> CursorResult[Any]:
    """Run a statement that PostgreSQL plans for its own values each time.

    The driver prepares a statement that comes again and again, and the server may keep one plan of it for all
    values. That plan takes an array of thousands for one of ten (docs/log.md, 2026-11-26).
    """
    return tx.execute(statement, execution_options={AFRESH: True})


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


def matching(
    tx: Connection, columns: "Sequence[Column[Any]]", rows: Sequence[Sequence[Any]]
) -> Iterator[list[ColumnElement[bool]]]:
    """Yield conditions that a row has, in these columns, the values of one of `rows`; several lists on SQLite.

    PostgreSQL joins one array for each column, so that it can hash them or find each row by an index, and need not
    parse thousands of parameters. The range of the first column spares it a look at the rest of the table. `afresh`
    has it plan a statement with these conditions for their number. Equal `rows` would select a row several times.
    SQLite gets them in parts, since an IN list has a largest length, and compares each column by itself. That
    suffices for one column, and beside a checksum over the others.
    """
    if tx.dialect.name != "postgresql":
        for part in chunks(rows):
            values = zip(*part, strict=True)
            yield [column.in_(of) for column, of in zip(columns, values, strict=True)]
    elif rows:
        yield in_arrays(columns, list(zip(*rows, strict=True)))


def in_arrays(columns: "Sequence[Column[Any]]", values: Sequence[Sequence[Any]]) -> list[ColumnElement[bool]]:
    """Conditions of `matching` on PostgreSQL; `values` are those of each column."""
    arrays = [
        bindparam(None, list(of), ARRAY(column.type)) for column, of in zip(columns, values, strict=True)
    ]
    wanted = func.unnest(*arrays).table_valued(*(c.name for c in columns)).render_derived(name="wanted")
    return [
        columns[0].between(min(values[0]), max(values[0])),
        *(column == wanted.c[column.name] for column in columns),
    ]


def postgresql_type(table: Table, name: str) -> str:
    """Name of a column's type, which a binary COPY has to be told."""
    from sqlalchemy.dialects import postgresql

    said = table.c[name].type.compile(postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
    return "float8" if said == "float" else said  # psycopg knows the other names
