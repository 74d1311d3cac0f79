"""Values in input files that DuckDB cannot hold: one of them ends every query that reads its column."""

import json
from collections.abc import Collection
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import first_line
from conserve.store.files.objects import FilePath, source
from conserve.store.sql.batches import streamed
from conserve.store.sql.quoting import parquet, quoted
from conserve.store.sql.readable import BATCH_ROWS

SUBMIT_AGAIN = "mend the file and submit the file again, to join it; the view results has this job's answers"
NOT_UTF8, NOT_JSON = "that is not UTF-8", "that is not JSON"
PER_SECOND = {"milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
DAY_S = 24 * 3600
MOST = 2**63 - 1  # of a 64-bit number; DuckDB's times are such numbers of microseconds


def time_fault(path: FilePath) -> str | None:
    """Reason why DuckDB cannot read a time in a Parquet file; None if there is none.

    The file's statistics have the extremes of each column. A column of times without statistics is read.
    """
    described, unknown = pq.read_metadata(source(path)), set[str]()
    for at in range(described.num_columns):
        leaf = described.schema.column(at)
        held = held_range(json.loads(leaf.logical_type.to_json()))
        if held is None:
            continue
        column = leaf.path.partition(".")[0]
        for group in range(described.num_row_groups):
            extremes = extremes_of(described.row_group(group).column(at))
            if extremes is None:
                unknown.add(column)
            elif any(not held[0] <= extreme <= held[1] for extreme in extremes):
                return f"has a time in the column {column} that SQL cannot hold"
    return read_fault(path, unknown) if unknown else None


def text_fault(path: FilePath) -> str | None:
    """Reason why DuckDB cannot read a text in a Parquet file; None if there is none. Reads the whole file."""
    with pq.ParquetFile(source(path)) as file, duckdb.connect(":memory:") as duck:
        documents = document_columns(file.metadata)
        for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column.validate(full=True)
                except pa.ArrowInvalid:
                    return f"has a text in the column {name} {NOT_UTF8}"
                if name in documents and not all_json(duck, column):
                    return f"has a text in the column {name} {NOT_JSON}"
    return None


def document_columns(described: pq.FileMetaData) -> set[str]:
    """Columns of JSON, each text of which DuckDB parses as it reads it; not those within others."""
    leaves = (described.schema.column(at) for at in range(described.num_columns))
    return {leaf.path for leaf in leaves if leaf.logical_type.type == "JSON"}


def all_json(duck: duckdb.DuckDBPyConnection, column: pa.Array) -> bool:
    """True if DuckDB can parse each text of a column."""
    texts = column.storage if isinstance(column, pa.ExtensionArray) else column
    found = duck.from_arrow(pa.table({"text": texts.cast(pa.string())}))
    return not found.filter("not json_valid(text)").limit(1).fetchall()


def held_range(kind: dict[str, Any]) -> tuple[int, int] | None:
    """Least and greatest number that DuckDB reads as a time of this Parquet type; None for other types."""
    if kind["Type"] == "Time":
        return 0, DAY_S * PER_SECOND[kind["timeUnit"]]
    if kind["Type"] != "Timestamp":
        return None
    most = MOST // 1000 if kind["timeUnit"] == "milliseconds" else MOST
    return -most, most


def extremes_of(chunk: Any) -> Collection[int] | None:
    """Least and greatest value of a column in a row group, as stored; None if the file does not say."""
    statistics = chunk.statistics
    if statistics is not None and statistics.has_min_max:
        return statistics.min_raw, statistics.max_raw
    empty = statistics is not None and statistics.has_null_count and statistics.null_count == chunk.num_values
    return () if empty else None


def read_fault(path: FilePath, columns: Collection[str]) -> str | None:
    """Reason why DuckDB cannot read these columns of a Parquet file to their end; None if it can."""
    chosen = ", ".join(map(quoted, sorted(columns)))
    with duckdb.connect(":memory:") as duck:
        try:
            for _ in streamed(duck.sql(f"select {chosen} from {parquet([path])}")):
                pass
        except (duckdb.OutOfMemoryException, MemoryError):
            raise
        except (duckdb.Error, pa.ArrowException, OSError) as error:  # Arrow's and OSError once rows flow
            return f"has a value that SQL cannot hold ({first_line(error)})"
    return None


def fix_of(reason: str, fix: str) -> str:
    """Next command for a file that cannot be read: this one, unless the file has always been so."""
    return SUBMIT_AGAIN if reason.endswith((NOT_UTF8, NOT_JSON)) else fix
