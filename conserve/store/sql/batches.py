"""Rows of an answer as Arrow batches."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import duckdb
import pyarrow as pa

from conserve.store.files.row_groups import grouped
from conserve.store.sql.quoting import quoted
from conserve.units import count as count_of

CHANGED_BY_ARROW = {  # types of DuckDB's that Arrow lacks
    "UHUGEINT",
    "BIGNUM",
    "BIT",
    "TIME WITH TIME ZONE",
    "VARIANT",
}
UNKEPT_BY_PARQUET = {"INTERVAL"}
NESTED = {"list", "array", "map", "struct", "tuple", "union"}
UNKNOWN_TO_PYTHON = (ValueError, OverflowError, pa.ArrowException)
READ_ROWS = 32  # that DuckDB hands over at a time: Arrow holds at most 2 GiB of text in a column of them
BATCH_ROWS = 2048  # one vector of DuckDB's
BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RowBatches:
    """Arrow batches of one schema; `documents` are the columns that hold JSON text."""

    schema: pa.Schema
    documents: frozenset[str]
    batches: Iterable[pa.RecordBatch]

    def tuples(self) -> Iterator[tuple[Any, ...]]:
        """Yield each row as a tuple of Python values."""
        for batch in self.batches:
            yield from zip(*(values(column) for column in batch.columns), strict=True)


def rows_of(answer: duckdb.DuckDBPyRelation) -> RowBatches:
    """Rows of a relation; DuckDB computes no more than the first ones before they are read."""
    names = unique(answer.columns)
    answer = as_text(answer, CHANGED_BY_ARROW)
    documents = {name for name, kind in zip(names, answer.types, strict=True) if str(kind) == "JSON"}
    reader = streamed(answer)
    schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
    batches = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in reader)
    return RowBatches(schema, frozenset(documents), batches)


def streamed(answer: duckdb.DuckDBPyRelation) -> pa.RecordBatchReader:
    """Rows of a relation in batches of 2,048, or of fewer where rows are long."""
    reader = answer.to_arrow_reader(READ_ROWS)
    return pa.RecordBatchReader.from_batches(reader.schema, joined(reader, rows=BATCH_ROWS, size=BATCH_BYTES))


def joined(batches: Iterable[pa.RecordBatch], *, rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Join batches until they have so many rows or bytes."""
    return map(pa.concat_batches, grouped(batches, rows=rows, size=size))


def keepable(answer: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """The relation as rows of a job are kept: values that Arrow would change or Parquet lacks are text."""
    return as_text(answer, CHANGED_BY_ARROW | UNKEPT_BY_PARQUET)


def as_text(answer: duckdb.DuckDBPyRelation, kinds: Collection[str]) -> duckdb.DuckDBPyRelation:
    """The relation with values of these types as text, also those within lists and structures."""
    wanted = [text_kind(kind, kinds) for kind in answer.types]
    if not any(wanted):
        return answer
    columns = (
        f"#{number} as {quoted(name)}" if kind is None else f"cast(#{number} as {kind}) as {quoted(name)}"
        for number, (name, kind) in enumerate(zip(answer.columns, wanted, strict=True), 1)
    )
    return answer.project(", ".join(columns))


def text_kind(kind: Any, kinds: Collection[str]) -> str | None:
    """The type in SQL, with text in place of `kinds`; None if it has none of them."""
    if str(kind) in kinds:
        return "VARCHAR"
    if kind.id not in NESTED:
        return None
    parts = [(name, part) for name, part in kind.children if isinstance(part, type(kind))]
    wanted = [text_kind(part, kinds) for _, part in parts]
    if not any(wanted):
        return None
    said = [text or str(part) for text, (_, part) in zip(wanted, parts, strict=True)]
    if kind.id in ("list", "array"):
        return said[0] + str(kind)[len(str(parts[0][1])) :]  # `[]`, or the length in brackets
    if kind.id == "map":
        return f"MAP({', '.join(said)})"
    named = [
        f"{quoted(name or f'element{number}')} {text}"  # Arrow's name for a part of `row(1, 2)`
        for number, ((name, _), text) in enumerate(zip(parts, said, strict=True), 1)
    ]
    return f"UNION({', '.join(named[1:])})" if kind.id == "union" else f"STRUCT({', '.join(named)})"


def unique(names: Sequence[str]) -> list[str]:
    """Make column names unique: a second `a` becomes `a_1`."""
    taken = {name.lower() for name in names}
    found: list[str] = []
    for name in names:
        if name.lower() in {before.lower() for before in found}:
            numbered = (f"{name}_{number}" for number in count(1))
            name = next(other for other in numbered if other.lower() not in taken)
            taken.add(name.lower())
        found.append(name)
    return found


def values(column: pa.Array) -> list[Any]:
    """Values of a column as Python objects; text where Python has no type, as for dates beyond the year 9999."""
    if pa.types.is_interval(column.type):
        return [None if one is None else length_of(one) for one in column.to_pylist()]
    if holds_nanoseconds(column.type):  # where pandas is installed, Arrow gives objects of its own
        return [value_of(scalar) for scalar in column]
    named = pa.types.is_map(column.type) and pa.types.is_string(column.type.key_type)
    try:
        found: list[Any] = column.to_pylist(maps_as_pydicts="strict" if named else None)
    except (*UNKNOWN_TO_PYTHON, KeyError, TypeError):  # the last two of keys that no dictionary can have
        found = [map_of(scalar) if named else value_of(scalar) for scalar in column]
    return found


def map_of(scalar: pa.Scalar) -> Any:
    """A map as a dictionary, or as pairs if a key in it comes twice or is no key of Python's."""
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except (*UNKNOWN_TO_PYTHON, KeyError, TypeError):
        return value_of(scalar)


def length_of(interval: Any) -> timedelta | str:
    """An interval as a length of time, or as text if it has months, whose lengths differ."""
    length = timedelta(days=interval.days, microseconds=interval.nanoseconds // 1000)
    return f"{count_of(interval.months, 'month')} {length}" if interval.months else length


def value_of(scalar: pa.Scalar) -> Any:
    """Convert one value to Python, a nested one part by part."""
    try:
        return in_microseconds(scalar).as_py()
    except UNKNOWN_TO_PYTHON:
        if isinstance(scalar, pa.StructScalar):
            return {name: value_of(part) for name, part in scalar.items()}
        if isinstance(scalar, pa.ListScalar | pa.FixedSizeListScalar):
            return [value_of(part) for part in scalar.values]
        return scalar.cast(pa.string()).as_py()


def in_microseconds(scalar: pa.Scalar) -> pa.Scalar:
    """Time as Python holds it; raises `ArrowException` for one that is finer, and for a nested value with times."""
    kind = scalar.type
    if not scalar.is_valid or not holds_nanoseconds(kind):
        return scalar
    if pa.types.is_timestamp(kind):
        return scalar.cast(pa.timestamp("us", kind.tz))
    return scalar.cast(pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us"))


def holds_nanoseconds(kind: pa.DataType) -> bool:
    """True for a type of times in nanoseconds, and for a nested one with such a part."""
    parts = [kind.field(number).type for number in range(kind.num_fields)]
    return getattr(kind, "unit", None) == "ns" or any(map(holds_nanoseconds, parts))
