"""Answers as relations of DuckDB, for programs that go on with SQL."""

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import duckdb
import pyarrow as pa

from conserve.errors import UsageError
from conserve.store.sql.batches import RowBatches
from conserve.store.sql.quoting import quoted

Relation: TypeAlias = duckdb.DuckDBPyRelation
MAKING = threading.Lock()  # a connection refuses a second call at a time
BUSY = getattr(duckdb, "ResourceInUseException", ())  # older versions of DuckDB wait by themselves
BUSY_S = 60.0  # after which a connection counts as never free
RETRY_S = 0.001


def relation(rows: RowBatches, connection: duckdb.DuckDBPyConnection | None = None) -> Relation:
    """Relation over all rows, which are in memory from now on; columns of JSON have that type.

    Times are in UTC, without a zone: to fetch times with one, DuckDB needs pytz. The relation belongs to DuckDB's
    default connection unless another is given. Raises `UsageError` if that is not free for a minute.
    """
    table = pa.Table.from_batches(rows.batches, schema=rows.schema)
    table = table.cast(pa.schema([field.with_type(without_zone(field.type)) for field in table.schema]))
    typed = [
        f"{quoted(name)}::json as {quoted(name)}" if name in rows.documents else quoted(name)
        for name in rows.schema.names
    ]
    return when_free(lambda: duckdb.from_arrow(table, connection=connection).project(", ".join(typed)))


def when_free(make: Callable[[], Relation]) -> Relation:
    """Make a relation as soon as no other thread calls its connection."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            with MAKING:
                return make()
        except BUSY as error:
            if time.monotonic() > until:
                raise UsageError(
                    f"DuckDB's connection was busy with another thread's calls for {BUSY_S:g} s; "
                    "make those on duckdb.cursor(), and query again"
                ) from error
        time.sleep(RETRY_S)


def without_zone(kind: pa.DataType) -> pa.DataType:
    """Type of times without their zone; any other type as it is."""
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
