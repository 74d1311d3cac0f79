"""The files that hold a job's input rows: one of the store's own, or the user's, of which there may be several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from conserve.store import home
from conserve.store.catalog import Source

FILE, FIRST = '"file of conserve"', '"first row of conserve"'  # names that no column of the user's has


class InputPart(NamedTuple):
    """One file of an input; its rows count from `first_row`, and share the values of its partition."""

    path: Path
    first_row: int
    partition: Mapping[str, int | str | None]


def parts_of(store_home: Path, job_id: str, source: Source) -> list[InputPart]:
    """The files with the rows of an input, in order."""
    if source.copied:
        return [InputPart(home.inputs_file(store_home, job_id), 0, {})]
    if not source.parts:
        return [InputPart(Path(source.path or ""), 0, {})]
    folder = home.job_folder(store_home, job_id)
    return [
        InputPart(folder / part.kept if part.kept else Path(part.path), part.first_row, part.partition)
        for part in source.parts
    ]


def fault(source: Source, parts: Sequence[InputPart]) -> str | None:
    """Why these files cannot be joined with results, if they cannot; copied rows always can."""
    if source.copied and not source.linked:
        return None
    for part, mark in zip(parts, source.files, strict=True):
        try:
            stat = part.path.stat()
        except OSError:
            return f"its input {part.path} is gone"
        if (stat.st_size, stat.st_mtime_ns) != (mark.size, mark.mtime_ns):
            return f"its input {mark.path} changed after submit"
    return None


def literal(value: int | str | None) -> str:
    """A value in SQL."""
    if value is None:
        return "null"
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def relation(parts: Sequence[InputPart], files: str) -> str:
    """An SQL table of the input's columns and `file_row_number`, the row's place in the whole input.

    `files` is the list of the parts' paths in SQL.
    """
    if len(parts) == 1 and not parts[0].partition:
        return f"read_parquet({files}, file_row_number = true, hive_partitioning = false)"
    keys = list(parts[0].partition)
    values = ", ".join(f"({', '.join(row_of(part, keys))})" for part in parts)
    names = ", ".join([FILE, FIRST, *map(quoted, keys)])
    chosen = [f"f.* exclude (file_row_number, {FILE})", *(f"p.{quoted(key)}" for key in keys)]
    options = "file_row_number = true, union_by_name = true, hive_partitioning = false"
    return (
        f"(select {', '.join(chosen)}, p.{FIRST} + f.file_row_number as file_row_number "
        f"from read_parquet({files}, {options}, filename = {literal(FILE[1:-1])}) f "
        f"join (values {values}) p({names}) using ({FILE}))"
    )


def row_of(part: InputPart, keys: Sequence[str]) -> list[str]:
    """A part in SQL: its path, its first row, and the values of its partition."""
    return [
        literal(str(part.path)),
        str(part.first_row),
        *(literal(part.partition[key]) for key in keys),
    ]
