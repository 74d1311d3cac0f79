"""Files that hold a job's input rows: one in the store, or one or several of the user's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from conserve.store.books.catalog import InputFile, Source
from conserve.store.files import digests, layout
from conserve.store.files.objects import FilePath
from conserve.store.sql.quoting import literal, parquet, quoted

# Names that no column of the user's has.
FILE, FIRST, COUNT, ROW_NUMBER = (
    f'"{what} of conserve"' for what in ("file", "first row", "count", "row number")
)

# Option of a scan: a column may be missing in some files, and DuckDB chooses its type.
BY_NAME = "union_by_name = true"


class InputPart(NamedTuple):
    """One file of an input. Its rows count from `first_row` and share the values of its partition."""

    path: FilePath
    first_row: int
    partition: Mapping[str, int | str | None]


def parts_of(data: FilePath, job_id: str, source: Source) -> list[InputPart]:
    """The files with the rows of an input, in order."""
    if source.copied:
        return [InputPart(layout.inputs_file(data, job_id), 0, {})]
    if not source.parts:
        return [InputPart(Path(source.path or ""), 0, {})]
    folder = layout.job_folder(data, job_id)
    return [
        InputPart(folder / part.kept if part.kept else Path(part.path), part.first_row, part.partition)
        for part in source.parts
    ]


def is_in_folder_of(job_id: str, parts: Sequence[InputPart]) -> bool:
    """True for an input of one file in its job's folder, by whose path a scan of many knows the job."""
    (first, *others) = parts
    return not others and not first.partition and str(first.path).split("/")[-2:-1] == [job_id]


def changed(source: Source, parts: Sequence[InputPart], known: digests.Memory) -> str | None:
    """Reason why these files cannot be joined with results; None if they can, as copied rows always can.

    `known` remembers files that were touched and found to have the contents of the submit.
    """
    if source.copied and not source.linked:
        return None
    if not source.files:
        return "where its input lay is not known"
    for part, mark in zip(parts, source.files, strict=True):
        path = Path(str(part.path))  # of a bucket all rows are copied
        try:
            stat = path.stat()
        except OSError:
            return f"its input {part.path} is gone"
        if (stat.st_size, stat.st_mtime_ns) != (mark.size, mark.mtime_ns) and is_other(path, mark, known):
            return f"its input {mark.path} changed after submit"
    return None


def is_other(path: Path, mark: InputFile, known: digests.Memory) -> bool:
    """True if the contents of a file differ from its fingerprint, whatever its times say."""
    return digests.fault(path, digests.Seal(bytes=mark.size, digest=mark.digest), known) is not None


def value(found: int | str | None) -> str:
    """Value of a partition as SQL."""
    if found is None:
        return "null"
    return str(found) if isinstance(found, int) else literal(found)


def relation(parts: Sequence[InputPart], columns: str, *, counted: bool) -> str:
    """An SQL table of the columns of several files, or of one with a partition, and `ROW_NUMBER`.

    `columns` is the option of the scan that makes the files' columns alike.
    With `counted` a window function numbers the rows: the user's files have a column `file_row_number` of their
    own.
    """
    keys = list(parts[0].partition)
    values = ", ".join(f"({', '.join(row_of(part, keys))})" for part in parts)
    names = ", ".join([FILE, FIRST, *map(quoted, keys)])
    options = [columns, f"filename = {literal(FILE[1:-1])}"]
    if not counted:
        options.append("file_row_number = true")
    scan = parquet([part.path for part in parts], *options)
    if counted:
        scan = f"(select *, row_number() over () - 1 as {COUNT} from {scan})"
    number, hidden = (COUNT, COUNT) if counted else (f"p.{FIRST} + f.file_row_number", "file_row_number")
    chosen = [f"f.* exclude ({hidden}, {FILE})", *(f"p.{quoted(key)}" for key in keys)]
    return (
        f"(select {', '.join(chosen)}, {number} as {ROW_NUMBER} "
        f"from {scan} f join (values {values}) p({names}) using ({FILE}))"
    )


def row_of(part: InputPart, keys: Sequence[str]) -> list[str]:
    """A part in SQL: its path, its first row, and the values of its partition."""
    return [
        literal(str(part.path)),
        str(part.first_row),
        *(value(part.partition[key]) for key in keys),
    ]
