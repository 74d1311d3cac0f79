"""Sources of a job as Python hands them over: paths, tables of any library, rows."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from conserve.api.asking import make_input
from conserve.errors import InputError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

    from conserve.jobs.inputs.source import Input


class ArrowStream(Protocol):
    """A table of any library that speaks Arrow: pyarrow, pandas, polars, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class Scannable(Protocol):
    """A pyarrow dataset."""

    def scanner(self) -> Any: ...


Source: TypeAlias = (
    str
    | PathLike[str]
    | Sequence[str | PathLike[str]]
    | ArrowStream
    | Scannable
    | Iterable[Mapping[str, Any]]
)
"""A path, pattern or folder, or several; a table, frame, relation or dataset; or rows as mappings."""


def input_of(source: Source, *, form: str | None, keep: str | None, copy_gib: float) -> "Input":
    """Input for a source; raises `InputError` for anything else."""
    from conserve.jobs.inputs.source import Input

    if (names := names_of(source)) is not None:
        return make_input(names, sql=None, form=form, keep=keep, copy_gib=copy_gib)
    if form is not None or keep is not None:
        raise InputError("format and keep_input are for files; a table and rows are copied into the store")
    if (table := table_of(source)) is not None:
        return Input(table=table)
    if isinstance(source, Iterable) and not isinstance(source, bytes | bytearray | Mapping):
        return Input(rows=cast("Iterable[Mapping[str, Any]]", source))
    raise InputError(
        f"a job cannot be made of a value of type {type(source).__name__}; "
        "give a path, a table, a frame, a relation, or dicts"
    )


def names_of(source: object) -> list[str] | None:
    """Names of files; None if the source is something else."""
    if isinstance(source, str | PathLike):
        return [path_text(source)]
    if isinstance(source, list | tuple) and source and all(isinstance(one, str | PathLike) for one in source):
        return [path_text(one) for one in source]
    return None


def path_text(path: "str | PathLike[str]") -> str:
    """Path as text; the home folder's sign is spelled out, which no shell has done here."""
    return str(Path(path).expanduser()) if str(path).startswith("~") else str(path)


def table_of(source: Any) -> "pa.RecordBatchReader | None":
    """Batches of a table, a frame, a relation or a dataset; None if the source is something else."""
    import pyarrow as pa

    from conserve.store.sql.scan import relation_rows

    if (rows := relation_rows(source)) is not None:
        return rows
    library = type(source).__module__.partition(".")[0]
    framed = hasattr(type(source), "columns")  # a value of a Series may have that name
    if library == "pandas" and framed:
        return pandas_table(source).to_reader()
    if library == "polars" and framed:
        return polars_batches(source.collect() if hasattr(source, "collect") else source)
    if isinstance(source, pa.Table):
        return source.to_reader()
    if hasattr(source, "__arrow_c_stream__"):
        try:
            return pa.RecordBatchReader.from_stream(source)
        except pa.ArrowInvalid as error:
            if framed:
                raise unheld(error) from error
            return None  # one column is no table
    if hasattr(source, "scanner"):
        return source.scanner().to_reader()
    return None


def pandas_table(frame: Any) -> "pa.Table":
    """Table of a pandas frame; raises `InputError` for columns of no one type, sparse or of the same name."""
    import pyarrow as pa

    named = any(name is not None for name in frame.index.names)  # else it says nothing
    try:
        return periods_as_text(pa.Table.from_pandas(frame, preserve_index=named))
    except (pa.ArrowException, ValueError, TypeError) as error:  # the last of sparse columns
        raise unheld(error) from error


def periods_as_text(table: "pa.Table") -> "pa.Table":
    """The table with pandas' periods as text, such as 2020-01; Arrow's own values of them are ordinals."""
    import pyarrow as pa

    for number, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType) and field.type.extension_name == "pandas.period":
            text = table.column(number).to_pandas().astype("string")
            table = table.set_column(number, field.name, pa.array(text))
    return table


def polars_batches(frame: Any) -> "pa.RecordBatchReader":
    """Batches of a polars frame; raises `InputError` for a column of a type that Arrow lacks."""
    import pyarrow as pa

    try:
        reader = pa.RecordBatchReader.from_stream(frame)
    except pa.ArrowInvalid as error:
        raise unheld(error, unheld_column(frame)) from error
    if any("dictionary<" in str(kind) for kind in reader.schema.types):
        return frame.to_arrow().to_reader()  # a copy; Parquet's writer takes no categories of the stream
    return reader


def unheld_column(frame: Any) -> str:
    """The first column of a polars frame whose type Arrow lacks, with its type; empty if Arrow has all."""
    import pyarrow as pa

    for name, kind in frame.schema.items():
        try:
            pa.RecordBatchReader.from_stream(frame[[name]])
        except pa.ArrowInvalid:
            return f"column {name!r} of type {kind}"
    return ""


def unheld(error: Exception, column: str = "") -> InputError:
    """The error for a frame that Arrow cannot hold, with the column if it is known."""
    why = one_line("; ".join(filter(None, [column, *map(str, error.args)])))
    return InputError(f"Arrow cannot hold the frame ({why}); cast or rename the column and submit again")
