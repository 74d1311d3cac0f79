"""Answers as relations of DuckDB, for programs that go on with SQL."""

import threading
from typing import TypeAlias

import duckdb
import pyarrow as pa

from conserve.store.sql.batches import RowBatches
from conserve.store.sql.quoting import quoted

Relation: TypeAlias = duckdb.DuckDBPyRelation
MAKING = threading.Lock()  # the default connection refuses a second call at a time


def relation(rows: RowBatches, connection: duckdb.DuckDBPyConnection | None = None) -> Relation:
    """Relation over all rows, which are in memory from now on; columns of JSON have that type.

    Times are in UTC, without a zone: to fetch times with one, DuckDB needs pytz. The relation belongs to DuckDB's
    default connection unless another is given.
    """
    table = pa.Table.from_batches(rows.batches, schema=rows.schema)
    table = table.cast(pa.schema([field.with_type(without_zone(field.type)) for field in table.schema]))
    with MAKING:
        found = duckdb.from_arrow(table, connection=connection)
        typed = [
            f"{quoted(name)}::json as {quoted(name)}" if name in rows.documents else quoted(name)
            for name in rows.schema.names
        ]
        return found.project(", ".join(typed))


def without_zone(kind: pa.DataType) -> pa.DataType:
    """Type of times without their zone; any other type as it is."""
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
