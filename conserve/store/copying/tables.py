"""Tables of a database, read page by page and compared by digests.

The list of tables is the schema's, so that a table that a later version adds is carried too.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, literal, select, tuple_

from conserve.store.database import moves, schema

PAGE_ROWS = 2_000
PAGE_BYTES = 16 << 20  # of a page's texts and payloads, unless its first row has more
FETCHED_ROWS = 100  # at a time, so that a page of long answers does not come into memory whole
DIGEST_BYTES = 16

Key = Sequence[str | int]


class TableDigest(NamedTuple):
    """Number of rows of a table, and the sum of their digests, which does not depend on their order."""

    rows: int
    digest: str


def in_order() -> list[Table]:
    """All tables of a store; a table comes after those that its rows refer to."""
    return list(schema.metadata.sorted_tables)


def rows_of(table: Table) -> Select[Any]:
    """Query for the rows of a table that are copied: the mark of a move belongs to one database alone."""
    found = select(table)
    return found.where(schema.meta.c.key != moves.KEY) if table is schema.meta else found


def page(tx: Connection, table: Table, after: Key | None) -> list[Row[Any]]:
    """The next rows of a table behind a key, or the first ones."""
    found = rows_of(table).order_by(*table.primary_key).limit(PAGE_ROWS)
    if after is not None:
        found = found.where(behind(table, after))
    rows: list[Row[Any]] = []
    size = 0
    with tx.execute(found, execution_options={"yield_per": FETCHED_ROWS}) as read:
        for row in read:
            rows.append(row)
            size += sum(len(value) for value in row if isinstance(value, (bytes, str)))
            if size >= PAGE_BYTES:
                break
    return rows


def behind(table: Table, after: Key) -> ColumnElement[bool]:
    """Condition for rows behind a key, in the order of the database that is read."""
    columns = list(table.primary_key)
    values = [literal(value, column.type) for column, value in zip(columns, after, strict=True)]
    if len(columns) == 1:
        return columns[0] > values[0]
    return tuple_(*columns) > tuple_(*values)


def key_of(table: Table, row: Row[Any]) -> Key:
    """Primary key of a row."""
    return [row._mapping[column.name] for column in table.primary_key]


def digest(tx: Connection, table: Table) -> TableDigest:
    """Read a whole table and take its digest."""
    number = total = 0
    for row in every(tx, table):
        number += 1
        total += int.from_bytes(hashlib.blake2b(as_bytes(row), digest_size=DIGEST_BYTES).digest())
    return TableDigest(number, f"{total % (1 << 8 * DIGEST_BYTES):0{2 * DIGEST_BYTES}x}")


def every(tx: Connection, table: Table) -> Iterator[Row[Any]]:
    """Yield the rows of a table in the database's own order."""
    with tx.execute(rows_of(table), execution_options={"yield_per": FETCHED_ROWS}) as read:
        yield from read


def as_bytes(row: Row[Any]) -> bytes:
    """A row as bytes, the same from every database."""
    return repr(tuple(row)).encode()


def digests(tx: Connection) -> dict[str, TableDigest]:
    """Digests of all tables, by name."""
    return {table.name: digest(tx, table) for table in in_order()}
