"""Values that occur more than once in a Parquet column."""

from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.store.sql.quoting import parquet, quoted

FEW_ROWS = 10_000  # counted in memory: to start DuckDB takes 10 ms of a processor


class Duplicate(NamedTuple):
    """A value that occurs more than once."""

    value: str
    times: int


def first_duplicate(path: Path, column: str) -> Duplicate | None:
    """Find a value that occurs more than once in a Parquet column; None if there is none. May spill to disk."""
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows <= FEW_ROWS:
            return duplicate_of_few(file.read(columns=[column]).column(column))
    with duckdb.connect(":memory:") as duck:
        row = duck.execute(
            f"select {quoted(column)}, count(*) from {parquet([path])} "
            f"where {quoted(column)} is not null group by 1 having count(*) > 1 limit 1",
        ).fetchone()
    return Duplicate(*row) if row else None


def duplicate_of_few(values: pa.ChunkedArray) -> Duplicate | None:
    """Find a value that occurs more than once among those in memory; None if there is none."""
    import pyarrow.compute as pc  # which queries do not need, and takes 50 ms

    counted = values.drop_null().value_counts()
    times = counted.field("counts")
    place = pc.index(pc.greater(times, 1), True).as_py()
    return None if place < 0 else Duplicate(counted.field("values")[place].as_py(), times[place].as_py())
