"""Columns of input files: the name under which each appears in SQL and beside results, and its type."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

import duckdb

from conserve.errors import first_line
from conserve.store.books.results import COLUMNS
from conserve.store.files.objects import FilePath
from conserve.store.sql.input_parts import BY_NAME, FILE, ROW_NUMBER, InputPart, relation
from conserve.store.sql.quoting import literal, literals, parquet, quoted

ROW = ("job_id", "row_index")  # names a row in the views `results`, `inputs` and `requests`
RESULT_COLUMNS = ("job_id", *COLUMNS)
FILE_ROW = "file_row_number"  # DuckDB's own column of a Parquet file
P = TypeVar("P", bound=FilePath)

EXACT_IN_FLOAT = {"TINYINT", "SMALLINT", "UTINYINT", "USMALLINT", "FLOAT"}
NUMBERS = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "FLOAT", "DOUBLE"}


def shown_names(names: Sequence[str], taken: Sequence[str] = RESULT_COLUMNS) -> dict[str, str]:
    """Name each input column beside the `taken` names: one that clashes gets `input_` in front, if need be twice.

    The view `inputs` and `conserve results --with-inputs` both use this function, so that a column has one name
    everywhere.
    """
    clashing = {name.lower() for name in taken}  # to SQL, `Text` is `text`
    occupied = clashing | {name.lower() for name in names}
    aliases = {name: name for name in names}
    for name in names:
        if name.lower() in clashing:
            while aliases[name].lower() in occupied:
                aliases[name] = f"input_{aliases[name]}"
            occupied.add(aliases[name].lower())
    return aliases


def column_types(duck: duckdb.DuckDBPyConnection, path: FilePath) -> dict[str, str]:
    """Columns of a Parquet file and their SQL types."""
    described = duck.execute(f"describe select * from {parquet([path])}").fetchall()
    return {name: kind for name, kind, *_ in described}


def with_columns(
    duck: duckdb.DuckDBPyConnection, files: Sequence[P], wanted: Collection[str]
) -> tuple[list[P], dict[P, str]]:
    """Parquet files that have all these columns, and for each other file the reason why not."""
    readable: list[P] = []
    others: dict[P, str] = {}
    for path in files:
        try:
            missing = sorted(set(wanted) - column_types(duck, path).keys())
        except duckdb.Error as error:
            others[path] = f"cannot be read ({first_line(error)})"
            continue
        if missing:
            others[path] = f"has no column {missing[0]}"
        else:
            readable.append(path)
    return readable, others


def casts(files: Sequence[dict[str, str]]) -> dict[str, str]:
    """Types to which columns are cast, by shown name in lower case, so that each has one type across the files.

    Numbers agree with numbers; other types that differ become text.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for types in files:
        aliases = shown_names(list(types))
        for name, kind in types.items():
            kinds[aliases[name].lower()].add(kind)
    as_text = [name for name, found in kinds.items() if len(found) > 1 and not found <= NUMBERS]
    wide = [name for name, found in kinds.items() if rounds(found)]
    return dict.fromkeys(wide, "DOUBLE") | dict.fromkeys(as_text, "VARCHAR")


def rounds(kinds: Set[str]) -> bool:
    """True for types that DuckDB makes a FLOAT together, which rounds numbers of one of them."""
    return "FLOAT" in kinds and "DOUBLE" not in kinds and not kinds <= EXACT_IN_FLOAT


class InputColumns(NamedTuple):
    """Columns of an input with their SQL types, and the option of a scan that brings its files to them."""

    types: dict[str, str]
    option: str = BY_NAME


def input_types(duck: duckdb.DuckDBPyConnection, parts: Sequence[InputPart]) -> InputColumns:
    """Columns of an input and their SQL types; columns read off the files' paths come last."""
    scan = parquet([part.path for part in parts], BY_NAME)
    described = duck.execute(f"describe select * from {scan}").fetchall()
    types, option = {name: kind for name, kind, *_ in described}, BY_NAME
    if wide := rounded(duck, parts, types):
        types |= dict.fromkeys(wide, "DOUBLE")
        option = schema(types)
    from_path = {
        key: "VARCHAR" if any(isinstance(part.partition[key], str) for part in parts) else "INTEGER"
        for key in parts[0].partition
    }
    return InputColumns(types | from_path, option)


def rounded(
    duck: duckdb.DuckDBPyConnection, parts: Sequence[InputPart], types: Mapping[str, str]
) -> list[str]:
    """Columns of an input of several files that would be a FLOAT, which rounds the numbers of some file."""
    floats = [name for name, kind in types.items() if kind == "FLOAT"]
    paths = [part.path for part in parts]
    if len(parts) == 1 or not floats or not differ(duck, paths, floats):
        return []
    found: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for name, kind in column_types(duck, path).items():
            found[name].add(kind)
    return [name for name in floats if rounds(found[name])]


def differ(duck: duckdb.DuckDBPyConnection, paths: Sequence[FilePath], floats: Sequence[str]) -> bool:
    """True if some of these columns is no FLOAT in every file; reads all files at once."""
    others = f"name in ({', '.join(map(literal, floats))}) and type <> 'FLOAT'"
    found = duck.execute(f"select 1 from parquet_schema({literals(paths)}) where {others} limit 1")
    return found.fetchone() is not None


def schema(types: Mapping[str, str]) -> str:
    """Option of a scan of files that have some of these columns, by name, whatever their types there."""
    columns = (
        f"{literal(name)}: {{name: {literal(name)}, type: {literal(kind)}, default_value: null}}"
        for name, kind in types.items()
    )
    return f"schema = map {{{', '.join(columns)}}}"


def input_select(
    job_id: str, parts: Sequence[InputPart], columns: InputColumns, wanted: Mapping[str, str]
) -> str:
    """SELECT of one job's input rows, each column under its shown name and of the type that is wanted."""
    source, row_index = numbered(parts, columns)
    chosen = [f"{literal(job_id)} as job_id", f"{row_index} as row_index", *columns_as(columns.types, wanted)]
    return f"select {', '.join(chosen)} from {source}"


def inputs_select(paths: Sequence[FilePath], types: dict[str, str], wanted: Mapping[str, str]) -> str:
    """SELECT of the rows of several jobs' copied inputs, which have the same columns, each in its job's folder."""
    scan = parquet(paths, f"filename = {literal(FILE[1:-1])}", f"{FILE_ROW} = true")
    chosen = [
        f"string_split({FILE}, '/')[-2] as job_id",
        f"{FILE_ROW} as row_index",
        *columns_as(types, wanted),
    ]
    return f"select {', '.join(chosen)} from {scan}"


def columns_as(types: dict[str, str], wanted: Mapping[str, str]) -> Iterator[str]:
    """Yield each column of an input under its shown name, cast if another type is wanted."""
    for name, alias in shown_names(list(types)).items():
        cast = f"::{wanted[alias.lower()]}" if alias.lower() in wanted else ""
        if cast == "::DOUBLE" and types[name] == "FLOAT":
            cast = "::VARCHAR::DOUBLE"  # 0.1 stays 0.1, where a plain cast makes it 0.10000000149
        yield f"{quoted(name)}{cast} as {quoted(alias)}"


def numbered(parts: Sequence[InputPart], columns: InputColumns) -> tuple[str, str]:
    """Table expression of an input, and the expression for the number of a row in it, from 0.

    DuckDB numbers rows of its own accord, except where a file has a column called `file_row_number`:
    there a window over the files as they lie counts them, which takes one thread.
    """
    clash = FILE_ROW in {name.lower() for name in columns.types}
    if len(parts) > 1 or parts[0].partition:
        return relation(parts, columns.option, counted=clash), ROW_NUMBER
    if clash:
        return parquet([parts[0].path]), "row_number() over () - 1"
    return parquet([parts[0].path], f"{FILE_ROW} = true"), FILE_ROW
