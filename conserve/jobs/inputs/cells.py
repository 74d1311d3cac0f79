"""Arrow's values as Python's, for templates; a value that Python cannot hold fails its row alone."""

from typing import Any, NamedTuple

import pyarrow as pa


class Unreadable(NamedTuple):
    """Stands for a value that Python cannot hold, such as text that is not UTF-8 or a date after the year 9999."""

    reason: str
    escaped: str | None = None  # text with escapes in place of what UTF-8 cannot write


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as dictionaries; times finer than a microsecond are cut, and bytes are read as text."""
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    columns = [python_values(column) for column in batch.columns]
    names = batch.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def python_values(column: pa.Array) -> list[Any]:
    """The values of a column; `Unreadable` for each that Python cannot hold."""
    kind = for_python(column.type)
    try:
        plain = column if kind == column.type else column.cast(kind, safe=False)
    except pa.ArrowException:  # a nested type that Arrow does not cast
        plain = column
    try:
        values: list[Any] = plain.to_pylist()
    except Exception:  # each type fails with an error of its own
        values = [python_value(scalar) for scalar in plain]
    return values


def python_value(scalar: pa.Scalar) -> Any:
    """Convert one value; `Unreadable` if Python cannot hold it."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unreadable("text that is not UTF-8")
    except (ValueError, OverflowError) as error:
        if holds_times(scalar.type):
            return Unreadable(f"a {scalar.type} that is infinite or outside of the years 1 to 9999")
        return Unreadable(f"a {scalar.type} that cannot be read ({error})")
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        return Unreadable(f"a {scalar.type} that cannot be read ({said or type(error).__name__})")


def holds_times(kind: pa.DataType) -> bool:
    """True for a type of dates or times, and for a nested one with such a part."""
    parts = [kind.field(n).type for n in range(kind.num_fields)]
    return bool(pa.types.is_temporal(kind)) or any(holds_times(part) for part in parts)


def for_python(kind: pa.DataType) -> pa.DataType:
    """Type that Python reads: microseconds for nanoseconds, which it lacks, and text for bytes, at any depth."""
    types = pa.types
    if types.is_nested(kind):
        return nested_for_python(kind)
    if types.is_dictionary(kind):
        inner = for_python(kind.value_type)
        return kind if inner == kind.value_type else inner
    if types.is_large_binary(kind):
        return pa.large_string()
    if types.is_binary(kind) or types.is_binary_view(kind):  # text of writers that do not annotate it
        return pa.string()
    if getattr(kind, "unit", None) != "ns":
        return kind
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind):
        return pa.time64("us")
    return pa.duration("us") if types.is_duration(kind) else kind


def nested_for_python(kind: pa.DataType) -> pa.DataType:
    """`for_python` for lists, structs and maps."""
    types = pa.types
    if types.is_list(kind):
        return pa.list_(field_for_python(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(field_for_python(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(field_for_python(kind.value_field), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([field_for_python(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(field_for_python(kind.key_field), field_for_python(kind.item_field))
    return kind


def field_for_python(field: pa.Field) -> pa.Field:
    """`for_python` for a part of a nested type."""
    return field.with_type(for_python(field.type))
