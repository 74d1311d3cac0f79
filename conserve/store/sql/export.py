"""Rows as a file: Parquet, JSON lines, CSV, or OpenAI Batch output."""

import csv
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import UsageError
from conserve.store.files import layout
from conserve.store.files.objects import FilePath
from conserve.store.sql.batches import RowBatches, values
from conserve.store.sql.input_columns import RESULT_COLUMNS, ROW, shown_names
from conserve.store.sql.quoting import literal, parquet, quoted
from conserve.store.sql.views import columns_of

PROMPT = "prompt"


class Format(StrEnum):
    """Output format of `conserve results` and `conserve sql`."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    OPENAI = "openai"


SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
}


def ordered(
    duck: duckdb.DuckDBPyConnection, job_id: str, *, with_inputs: bool, with_prompts: bool = False
) -> duckdb.DuckDBPyRelation:
    """Results of a job in input order, followed by the prompts and the input's columns if asked for.

    An input column whose name is taken appears under its name in the view `inputs`.
    """
    chosen, joined, taken = ["r.*"], "results r", RESULT_COLUMNS
    if with_prompts:
        chosen, taken = [*chosen, f"q.{PROMPT}"], (*taken, PROMPT)
        joined += " join requests q using (job_id, row_index)"
    if with_inputs:
        theirs = [name for name in columns_of(duck, "inputs") if name not in ROW]
        chosen += [
            f"i.{quoted(name)} as {quoted(alias)}" for name, alias in shown_names(theirs, taken).items()
        ]
        joined += " join inputs i using (job_id, row_index)"
    where = f"r.job_id = {literal(job_id)}"
    return duck.sql(f"select {', '.join(chosen)} from {joined} where {where} order by r.row_index")


def with_urls(duck: duckdb.DuckDBPyConnection, data: FilePath, job_id: str) -> duckdb.DuckDBPyRelation:
    """Results of a job in input order, with the route of each row that names its own."""
    requests = parquet([layout.requests_file(data, job_id)])
    return duck.sql(
        f"select r.*, q.url from results r join (select row_index, url from {requests}) q "
        f"using (row_index) where r.job_id = {literal(job_id)} order by r.row_index"
    )


def unanswered(duck: duckdb.DuckDBPyConnection, data: FilePath, job_id: str) -> duckdb.DuckDBPyRelation:
    """Row index and custom id of each row of a job that has no result, in input order."""
    requests = parquet([layout.requests_file(data, job_id)])
    return duck.sql(
        f"select q.row_index, q.custom_id from {requests} q anti join results r "
        f"on r.job_id = {literal(job_id)} and r.row_index = q.row_index order by q.row_index"
    )


def write(
    rows: RowBatches,
    sink: BinaryIO,
    wanted: Format,
    convert: Callable[[dict[str, Any]], Any] = lambda row: row,
) -> int:
    """Write rows in a format; returns their number. `convert` changes a row before it becomes a line of JSON."""
    if wanted is Format.PARQUET:
        return write_parquet(rows, sink)
    return write_csv(rows, sink) if wanted is Format.CSV else write_lines(rows, sink, convert)


def write_parquet(rows: RowBatches, sink: BinaryIO) -> int:
    """Write one Parquet file; returns the number of rows. Types that Parquet lacks, as intervals, become text."""
    schema, batches = held(rows)
    count = 0
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def held(rows: RowBatches) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Rows as Parquet can hold them, and their schema: other types become text."""
    schema = pa.schema([field if storable(field) else field.with_type(pa.string()) for field in rows.schema])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.batches:
            columns = [
                column if column.type == field.type else as_text(column)
                for column, field in zip(batch.columns, schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return schema, batches()


def storable(field: pa.Field) -> bool:
    """True if Parquet can hold a column of this type."""
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except pa.ArrowException:
        return False
    return True


def as_text(column: pa.Array) -> pa.Array:
    """A column of any type as text."""
    return pa.array([None if value is None else str(cell(value)) for value in values(column)], pa.string())


def write_lines(
    rows: RowBatches, sink: BinaryIO, convert: Callable[[dict[str, Any]], Any] = lambda row: row
) -> int:
    """Write one JSON object a line; JSON columns come out as values, decimals and large integers as numbers."""
    encode = msgspec.json.Encoder(decimal_format="number").encode
    count = 0
    for row in documents_parsed(rows):
        sink.write(encode(convert(row)) + b"\n")
        count += 1
    return count


class LineOutput:
    """Output of a `csv.writer`, which writes one line a call; ends each in a newline alone."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def write(self, line: str) -> None:
        """Write one line."""
        self._sink.write(line.removesuffix("\r\n").encode() + b"\n")


def write_csv(rows: RowBatches, sink: BinaryIO) -> int:
    """Write CSV with a header; JSON columns, lists and structures are JSON text.

    The writer itself ends lines in `\\r\\n`, since it quotes only values that hold a character of its line end.
    """
    writer = csv.writer(LineOutput(sink))
    writer.writerow(rows.schema.names)
    count = 0
    for row in rows.tuples():
        writer.writerow([cell(value) for value in row])
        count += 1
    return count


def cell(value: Any) -> Any:
    """Value as `csv.writer` takes it."""
    if isinstance(value, list | dict | tuple):
        return msgspec.json.encode(value).decode()
    return msgspec.to_builtins(value) if isinstance(value, bytes) else value


def documents_parsed(rows: RowBatches) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries with their JSON columns parsed."""
    names = rows.schema.names
    documents = [name for name in names if name in rows.documents]
    for batch in rows.batches:
        for found in zip(*(values(column) for column in batch.columns), strict=True):
            row = dict(zip(names, found, strict=True))
            for name in documents:
                row[name] = parsed(row[name])
            yield row


def decoded(rows: RowBatches) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries for a program: JSON columns are Python's own values."""
    for row in documents_parsed(rows):
        yield {
            name: msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
            for name, value in row.items()
        }


def parsed(document: str | None) -> Any:
    """JSON text as a value that is written unchanged; text that is not JSON stays text."""
    if document is None:
        return None
    try:
        msgspec.json.decode(document)
    except (msgspec.DecodeError, RecursionError):
        return document
    return msgspec.Raw(on_one_line(document).encode())


def on_one_line(document: str) -> str:
    """JSON on one line. Strings hold no line break, since JSON escapes it, so every one stands between values."""
    return document.replace("\r", " ").replace("\n", " ")


def format_of(path: Path | None, wanted: Format | None) -> Format:
    """Format that was asked for, else that of the file's suffix.

    Standard output, pipes and devices get JSON lines. Raises `UsageError` for a file whose suffix names no
    format, or another one than was asked for.
    """
    named = None if path is None else SUFFIXES.get(path.suffix.lower())
    if wanted is not None:
        if named not in (None, Format.JSONL if wanted is Format.OPENAI else wanted):
            raise UsageError(
                f"{path} ends as {named} does, and the format is {wanted}; rename it, or leave one out"
            )
        return wanted
    if path is None:
        return Format.JSONL
    device = path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm")
    if named is None and (device or (path.exists() and not path.is_file())):
        return Format.JSONL
    if named is None:
        raise UsageError(
            f"{path} names no format; end it in {', '.join(SUFFIXES)}, or give --format: {', '.join(Format)}"
        )
    return named
