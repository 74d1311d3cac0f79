"""Inputs: recognise the format, keep the files, and stream their rows in batches.

Parquet stays Parquet: a copy, a link or the file itself. Text has no types and no random access, and a query runs
only once. So their rows are copied into the job's folder as Parquet, where SQL can join them with the results.
"""

import glob
import select
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader, UnsupportedOperation
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa

from conserve.errors import InputError, TemplateError, UsageError, one_line
from conserve.jobs.inputs import remote
from conserve.jobs.inputs.files import (
    FileFormat,
    NamedInput,
    Partition,
    form_of,
    no_memory,
    partitions,
    spelled_out,
)
from conserve.jobs.inputs.fingerprint import fingerprint, stamp, together, written_meanwhile
from conserve.jobs.inputs.held_rows import keep_batches, spool_rows
from conserve.jobs.inputs.keeping import Keep, choice, keep
from conserve.jobs.inputs.parquet_rows import ParquetParts, ParquetRows
from conserve.jobs.inputs.text_rows import CsvRows, JsonLines, OpenAILines, TextRows, TsvRows
from conserve.jobs.task import Task
from conserve.store.books.catalog import InputFile, Source
from conserve.store.files import layout
from conserve.store.sql.scan import scanned

STDIN = "-"
SPOOLED = "stdin"  # standard input in the job's folder, until its rows are copied
LOOK_MS = 200  # how often signals are looked for while standard input has nothing
COPY_GIB = 1.0
TEXTS: dict[FileFormat, type[TextRows]] = {
    FileFormat.JSONL: JsonLines,
    FileFormat.CSV: CsvRows,
    FileFormat.TSV: TsvRows,
}


class InputRows(Protocol):
    """Rows of an input, whatever its format."""

    @property
    def columns(self) -> Sequence[str]:
        """The names that a template may use."""

    def check(self, task: Task) -> None:
        """Raise `InputError` if a column has not the type that the task needs."""

    def batches(self, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows in order, with only these columns, at most `ROWS_PER_GROUP` at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Input as the user gives it, and how to keep it: files, patterns and folders, a query, a table, or rows.

    A table and rows are read once.
    """

    names: Sequence[str] = ()
    several: bool = False  # the names are those of a folder or a pattern, even if it is one
    sql: str | None = None
    table: pa.RecordBatchReader | None = None
    rows: Iterable[Mapping[str, Any]] | None = None
    form: FileFormat | None = None
    copied_below: Path | None = None  # folder of copies from buckets; below it paths are those of objects
    keep: Keep | None = None  # None: a copy up to `copy_gib`, a link beyond
    copy_gib: float = COPY_GIB

    @property
    def label(self) -> str:
        """Name that the job's id begins with: of the file, or of the folder around a pattern's files."""
        if self.table is not None or self.rows is not None:
            return "table" if self.table is not None else "rows"
        if self.sql is not None or not self.names:
            return "sql"
        if list(self.names) == [STDIN]:
            return "stdin"
        path = Path(self.names[0])
        stem = path.name.partition(".")[0] or path.name
        return path.parent.name or "files" if glob.has_magic(stem) else stem

    @property
    def title(self) -> str:
        """Name of the input in messages."""
        if self.sql is not None:
            return "the answer to --sql"
        if self.table is not None or self.rows is not None:
            return f"the {self.label}"
        return "standard input" if list(self.names) == [STDIN] else " ".join(self.names)


@dataclass(frozen=True, slots=True)
class Opened:
    """A recognised input: its rows, its source for the catalog, and where the rows lie from now on."""

    rows: InputRows
    source: Source
    kept: Keep = Keep.COPY

    def copy_text(self, folder: Path) -> None:
        """Copy the rows of text files into the job's folder as Parquet, in which SQL finds their types."""
        if isinstance(self.rows, TextRows):
            self.rows.copy_to(folder / layout.INPUTS)
            (folder / SPOOLED).unlink(missing_ok=True)
            check_unwritten(self.source)
        remote.drop(folder)


def open_input(given: Input, folder: Path, *, openai: bool) -> Opened:
    """Recognise an input and keep it in the new job's folder; `openai`: its lines are OpenAI Batch requests."""
    if given.sql is not None:
        if given.names:
            raise UsageError("give files or --sql, not both")
        return open_query(given, given.sql, folder)
    if given.table is not None:
        if openai:
            raise unasked("a table holds no requests of its own")
        try:
            return kept_table(given.table, folder, given.title, "table")
        except MemoryError as error:
            raise no_memory(given.title, error) from error
        except pa.ArrowException as error:
            raise InputError(f"{given.title} cannot be read: {one_line(error)}") from error
    if given.rows is not None:
        spool_rows(given.rows, folder / SPOOLED, given.title)
        if not (folder / SPOOLED).stat().st_size:
            raise InputError("there are no rows; nothing was submitted")
        return open_text([folder / SPOOLED], given.title, FileFormat.JSONL, openai=openai)
    if any(map(remote.is_url, given.names)):
        return open_objects(given, folder, openai=openai)
    from_stdin = STDIN in given.names
    if from_stdin and len(given.names) > 1:
        raise UsageError("- is standard input and goes with no other file")
    named = (
        NamedInput([spool(cast("BufferedReader", sys.stdin.buffer), folder)], several=False)
        if from_stdin
        else spelled_out(given.names, several=given.several)
    )
    form = form_of_all(named, given, from_stdin=from_stdin)
    if form is FileFormat.PARQUET or (form is not FileFormat.JSONL and openai):
        if openai:
            raise unasked_file(named.paths[0], given.title, form)
        return open_parquet(named, given, folder, from_stdin=from_stdin)
    marks = [] if from_stdin else marks_of(named.paths)
    parts = partitions(named.paths, given.copied_below) if named.several else None
    opened = open_text(named.paths, given.title, form, openai=openai, parts=parts)
    return replace(opened, source=replace(source_of(named, marks, opened.source.format), copied=True))


def open_objects(given: Input, folder: Path, *, openai: bool) -> Opened:
    """Copy objects of buckets to this machine and open the copies; the source names the objects."""
    fetched = remote.fetch(given.names, folder)
    copies = replace(
        given,
        names=[str(path) for path in fetched.paths],
        several=given.several or fetched.several,
        copied_below=folder / remote.FETCHED,
        keep=Keep.COPY,
    )
    try:
        opened = open_input(copies, folder, openai=openai)
    except InputError as error:
        raise InputError(fetched.by_url(str(error))) from error
    parts = tuple(replace(part, path=fetched.urls[part.path]) for part in opened.source.parts)
    path = given.names[0] if copies.several else fetched.urls[copies.names[0]]
    return replace(opened, source=replace(opened.source, path=path, parts=parts))


def open_text(
    paths: Sequence[Path],
    title: str,
    form: FileFormat,
    *,
    openai: bool,
    parts: Sequence[Partition] | None = None,
) -> Opened:
    """Rows of text files, which are copied into the job's folder later."""
    lines = OpenAILines if openai else TEXTS[form]
    rows = lines(paths, title, parts)
    return Opened(rows, Source(path=None, format="openai" if openai else form, copied=True))


def form_of_all(named: NamedInput, given: Input, *, from_stdin: bool) -> FileFormat:
    """Format of all files; raises `InputError` if they differ in it."""
    title = given.title if not named.several else None
    forms = {
        path: form_of(path, title or str(path), given.form, from_stdin=from_stdin) for path in named.paths
    }
    first, form = next(iter(forms.items()))
    other = next((path for path, found in forms.items() if found is not form), None)
    if other is not None:
        raise InputError(
            f"{first} is {form} and {other} is {forms[other]}; submit files of one form at a time"
        )
    return form


def open_query(given: Input, sql: str, folder: Path) -> Opened:
    """Run the query once and keep its rows."""
    scratch = folder / "scratch"
    try:
        with scanned(sql, scratch) as reader:
            opened = kept_table(reader, folder, given.title, "sql")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return replace(opened, source=replace(opened.source, sql=sql))


def kept_table(reader: pa.RecordBatchReader, folder: Path, title: str, kind: str) -> Opened:
    """Keep the rows of a table, which is read once, in the job's folder."""
    path = folder / layout.INPUTS
    keep_batches(reader, path, title)
    mark = fingerprint(path)
    source = Source(
        path=None, format=kind, size=mark.size, mtime_ns=mark.mtime_ns, digest=mark.digest, copied=True
    )
    return Opened(ParquetRows(path, title), source)


def unasked_file(path: Path, title: str, form: FileFormat) -> InputError:
    """Error for a file of rows that no task asks anything; chats are offered where a column may hold them."""
    if form is FileFormat.PARQUET:
        schema = ParquetRows(path, title).schema
        columns, chats = schema.names, [field.name for field in schema if pa.types.is_list(field.type)]
        what = "a Parquet file"
    else:
        columns, chats = TEXTS[form]([path], title).columns, []  # a cell is text, and no list
        what = form.upper()
    said = f"{title} is {what} with the columns {', '.join(columns)}"
    return unasked(said, chats[0] if chats else None)


def unasked(rows: str, chats: str | None = "COLUMN") -> InputError:
    """Error for rows that are no OpenAI lines, and that no task asks anything; `chats`: a column for them."""
    other = f" or --messages {chats}" if chats else ""
    return InputError(f'{rows}; say what to ask: --prompt "... {{{{ COLUMN }}}}"{other}')


def open_parquet(named: NamedInput, given: Input, folder: Path, *, from_stdin: bool) -> Opened:
    """Keep Parquet files, and read them where they then are."""
    if from_stdin:
        path = named.paths[0].rename(folder / layout.INPUTS)
        rows = ParquetRows(path, given.title)
        mark = replace(fingerprint(path), path="")
        return Opened(rows, replace(source_of(named, [mark], FileFormat.PARQUET), path=None, copied=True))
    how = given.keep or choice(named.paths, given.copy_gib * 2**30)
    if named.several:
        return open_parts(named, given, folder, how)
    (path,) = named.paths
    ParquetRows(path, given.title)  # a damaged file is not copied first
    before = stamp(path)
    kept = keep(path, folder / layout.INPUTS, how)
    lies = path if kept is Keep.REFERENCE else folder / layout.INPUTS
    mark = replace(fingerprint(lies), path=str(path.absolute()))
    if stamp(path) != before:
        raise written_to(path)
    source = source_of(named, [mark], FileFormat.PARQUET)
    if kept is Keep.LINK:
        source = replace(source, linked=True, parts=(replace(mark, kept=layout.INPUTS),))
    return Opened(ParquetRows(lies, given.title), replace(source, copied=kept is not Keep.REFERENCE), kept)


def open_parts(named: NamedInput, given: Input, folder: Path, how: Keep) -> Opened:
    """Keep several Parquet files: copied as one, or each by itself."""
    marks = marks_of(named.paths)
    parts = ParquetParts(named.paths, given.title, partitions(named.paths, given.copied_below))
    if how is not Keep.COPY and (fault := parts.unjoined()) is not None:
        if given.keep is not None:
            raise InputError(f"{fault}; submit with --keep-input copy, which writes them as one file")
        how = Keep.COPY
    if how is Keep.COPY:
        parts.copy_to(folder / layout.INPUTS)
        source = source_of(named, marks, FileFormat.PARQUET)
        check_unwritten(source)
        return Opened(ParquetRows(folder / layout.INPUTS, given.title), replace(source, copied=True))
    (folder / layout.PARTS).mkdir()
    kept_parts = []
    for number, (path, mark) in enumerate(zip(named.paths, marks, strict=True)):
        name = f"{layout.PARTS}/{number:05}.parquet"
        kept = keep(path, folder / name, how)
        kept_parts.append(
            replace(
                mark,
                kept=None if kept is Keep.REFERENCE else name,
                first_row=parts.first_rows[number],
                partition=parts.partitions[number],
            )
        )
        how = kept if kept is Keep.REFERENCE else how  # one file system, one answer
    source = replace(source_of(named, marks, FileFormat.PARQUET), parts=tuple(kept_parts))
    check_unwritten(source)
    return Opened(parts, source, how)


def check_unwritten(source: Source) -> None:
    """Raise if a file was written to between its fingerprint and its last row."""
    if (path := written_meanwhile(source)) is not None:
        raise written_to(path)


def written_to(path: Path | str) -> InputError:
    """The error for a file that has rows of two moments."""
    return InputError(f"{path} was written to while it was read; submit it again")


def marks_of(paths: Sequence[Path]) -> list[InputFile]:
    """Take the fingerprints of files; raises `InputError` for one that cannot be read."""
    try:
        return [fingerprint(path) for path in paths]
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; check its permissions") from error


def source_of(named: NamedInput, marks: Sequence[InputFile], kind: str) -> Source:
    """Source of these files for the catalog; `marks` are their fingerprints, none for standard input."""
    if not marks:
        return Source(path=None, format=kind)
    size, mtime_ns, digest = together(marks)
    if not named.several:
        digest = marks[0].digest
    return Source(
        path=marks[0].path if not named.several else str(named.paths[0].parent.absolute()),
        format=kind,
        size=size,
        mtime_ns=mtime_ns,
        digest=digest,
        parts=tuple(marks) if named.several else (),
    )


def spool(stream: BufferedReader, folder: Path) -> Path:
    """Write standard input to a file, since it is read twice."""
    path = folder / SPOOLED
    with path.open("wb") as file:
        while content := awaited(stream).read1(1 << 20):
            file.write(content)
    return path


def awaited(stream: BufferedReader) -> BufferedReader:
    """The stream, once it can be read; the handlers of signals run while it is waited for.

    A signal that arrives just before a read that blocks is only handled behind that read: perhaps never.
    """
    with suppress(UnsupportedOperation):  # no file: its contents are in memory
        ready = select.poll()
        ready.register(stream, select.POLLIN)
        while not ready.poll(LOOK_MS):
            pass
    return stream


def check_columns(rows: InputRows, wanted: Sequence[str], *, what: str) -> None:
    """Raise if a column is missing; the error lists the columns that exist."""
    missing = [name for name in wanted if name not in rows.columns]
    if missing:
        names = " and ".join(repr(name) for name in missing)
        kind = TemplateError if what == "the template" else InputError
        hint = other_separator(rows)
        said = f"{what} names {names}, but the columns are: {', '.join(rows.columns)}"
        raise kind(f"{said}; {hint}" if hint else said)


def other_separator(rows: InputRows) -> str:
    """Hint on a CSV whose columns another sign separates; empty for every other input."""
    return rows.hint if isinstance(rows, CsvRows) else ""
