"""Rows that a program holds: tables in batches, and mappings one by one, kept as files."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import InputError, one_line
from conserve.jobs.inputs.files import no_memory

LISTS, BYTES = (list, tuple, set, frozenset), (bytes, bytearray, memoryview)


def keep_batches(reader: pa.RecordBatchReader, path: Path, title: str) -> None:
    """Write the batches of a table as Parquet; raises `InputError` for types that Parquet lacks."""
    with storable(title, reader.schema):
        writer = pq.ParquetWriter(path, reader.schema, compression="zstd", write_page_checksum=True)
    with writer:
        for batch in readable(reader, title):
            with storable(title, reader.schema, batch):
                writer.write_batch(batch)


def readable(reader: pa.RecordBatchReader, title: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a table; raises `InputError` for an error that another library has in making one."""
    try:
        yield from reader
    except OSError as error:
        if error.errno is not None:  # the system's own, as of a full disk
            raise
        raise InputError(
            f"{title} cannot be read ({one_line(error)}); correct it and submit again"
        ) from error


@contextmanager
def storable(title: str, schema: pa.Schema, batch: pa.RecordBatch | None = None) -> Iterator[None]:
    """Explain errors of writing a table, or one batch of it, as Parquet."""
    try:
        yield
    except MemoryError as error:
        raise no_memory(title, error) from error
    except pa.ArrowException as error:
        column = refused_column(schema, batch)
        where = "" if column is None else f"column {column!r}: "
        said = f"{title} cannot be kept as Parquet ({where}{one_line(error)})"
        raise InputError(f"{said}; cast the column and submit again") from error


def refused_column(schema: pa.Schema, batch: pa.RecordBatch | None) -> str | None:
    """Name of the first column that cannot be written as Parquet; None if each can by itself."""
    for number, field in enumerate(schema):
        try:
            with pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])) as writer:
                if batch is not None:
                    writer.write_batch(batch.select([number]))
        except pa.ArrowException:
            return str(field.name)
    return None


def spool_rows(rows: Iterable[object], path: Path, title: str) -> None:
    """Write mappings as lines of JSON; raises `InputError` for a row that is none, or has a value without JSON."""
    with path.open("wb") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                kind = type(row).__name__
                raise InputError(f"row {number:,} of {title} is of type {kind}; give a dict of its columns")
            try:
                file.write(line_of(as_text(dict(row))) + b"\n")
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                said = f"row {number:,} of {title} has no JSON ({one_line(error)})"
                raise InputError(f"{said}; give text, numbers, lists and dicts") from error


def line_of(row: Mapping[Any, Any]) -> bytes:
    """JSON of a row, in which half of a surrogate pair is an escape: the row fails alone once the line is read."""
    try:
        return ENCODE(row)
    except UnicodeEncodeError:
        ENCODE(list(row))  # a name with such a half is refused
        return json.dumps(msgspec.to_builtins(row, str_keys=True, enc_hook=plain), allow_nan=False).encode()


def as_text(value: Any) -> Any:
    """A value with text in place of bytes at any depth, as in tables; JSON would have them in base64."""
    if type(value) is str:  # as most are
        return value
    if isinstance(value, dict):
        return {name: as_text(part) for name, part in value.items()}
    if isinstance(value, LISTS):
        return [as_text(part) for part in value]
    return bytes(value).decode() if isinstance(value, BYTES) else value


def plain(value: object) -> object:
    """Value of Python for one of NumPy; raises `TypeError` for any other that JSON lacks."""
    convert = getattr(value, "tolist", None)
    if convert is None:
        raise TypeError(f"a value of type {type(value).__name__}")
    return as_text(convert())


ENCODE = msgspec.json.Encoder(enc_hook=plain).encode
