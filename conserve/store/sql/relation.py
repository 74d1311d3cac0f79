"""Answers as relations of DuckDB, for programs that go on with SQL."""

from typing import TypeAlias

import duckdb
import pyarrow as pa

from conserve.store.sql.batches import RowBatches
from conserve.store.sql.quoting import quoted

Relation: TypeAlias = duckdb.DuckDBPyRelation


def relation(rows: RowBatches, connection: duckdb.DuckDBPyConnection | None = None) -> Relation:
    """Relation over all rows, which are in memory from now on; columns of JSON have that type.

    It belongs to DuckDB's default connection unless another is given.
    """
    table = pa.Table.from_batches(rows.batches, schema=rows.schema)
    found = duckdb.from_arrow(table, connection=connection or duckdb.default_connection())
    typed = [
        f"{quoted(name)}::json as {quoted(name)}" if name in rows.documents else quoted(name)
        for name in rows.schema.names
    ]
    return found.project(", ".join(typed))
