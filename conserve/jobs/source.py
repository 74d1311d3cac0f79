"""Input files: recognise one, check that a task fits it, and stream its rows in batches.

Parquet files stay where they are and are fingerprinted. Lines of JSON come without types or random access, so
their rows are copied into the job's folder as Parquet, where SQL can join them with the results.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import InputError, TemplateError
from conserve.jobs.cells import python_rows
from conserve.jobs.nesting import MAX_DEPTH, is_deeper
from conserve.jobs.request_file import GROUP_BYTES, ROWS_PER_GROUP
from conserve.jobs.task import Kind, Task
from conserve.store.catalog import Source

STDIN = "-"
OPENAI_COLUMNS = ("custom_id", "method", "url", "body")


class Rows(Protocol):
    """An input file that has been recognised."""

    @property
    def columns(self) -> Sequence[str]:
        """The names that a template may use."""

    def check(self, task: Task) -> None:
        """Raise `InputError` if a column has not the type that the task needs."""

    def batches(self, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """The rows in file order, with only these columns, at most `ROWS_PER_GROUP` at a time."""


def fingerprint(path: Path) -> Source:
    """Size, time and digest of a file's contents (format still to be filled in)."""
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        stat = path.stat()
        while block := file.read(1 << 22):
            digest.update(block)
    return Source(
        path=str(path.absolute()),
        format="",
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        digest=digest.hexdigest(),
    )


def changed(source: Source) -> bool:
    """Whether the input file is no longer what it was at submit; a file that is gone has not changed."""
    if source.path is None:
        return False
    path = Path(source.path)
    try:
        stat = path.stat()
    except OSError:
        return False
    if (stat.st_size, stat.st_mtime_ns) == (source.size, source.mtime_ns):
        return False
    return stat.st_size != source.size or fingerprint(path).digest != source.digest


def spool(stream: BinaryIO, folder: Path) -> Path:
    """Standard input as a file, since it is read twice."""
    path = folder / "stdin"
    with path.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    return path


@dataclass(frozen=True, slots=True)
class Opened:
    """A recognised input: its rows, and what the catalogue keeps of it."""

    rows: Rows
    source: Source


def open_input(path: Path, *, from_stdin: bool, openai: bool) -> Opened:
    """Recognise a file by its first bytes; `openai` says that its lines should be OpenAI Batch requests."""
    check_path(path)
    try:
        with path.open("rb") as file:
            head = file.read(4)
        source = fingerprint(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    name = "standard input" if from_stdin else str(path)
    rows: Rows
    if head != b"PAR1" and path.suffix == ".parquet" and not from_stdin:
        raise InputError(
            f"{name} is not a Parquet file; write it again, or name it .jsonl if it holds JSON lines"
        )
    if head == b"PAR1":
        if openai:
            raise InputError(
                f"{name} is a Parquet file; say what to ask: --prompt TEMPLATE or --messages COLUMN"
            )
        rows, kind = ParquetRows(path, name), "parquet"
    elif openai:
        rows, kind = OpenAILines(path, name), "openai"
    else:
        rows, kind = JsonLines(path, name), "jsonl"
    copied = from_stdin or kind != "parquet"
    source = replace(source, format=kind, copied=copied, path=None if from_stdin else source.path)
    return Opened(rows, source)


def check_path(path: Path) -> None:
    """Raise unless this is a file whose name the store can keep."""
    try:
        str(path).encode()
        if not path.exists():
            raise InputError(f"there is no file {path}; check the path")
    except UnicodeEncodeError as error:
        raise InputError(f"the name of the file {path!s:.200} is not UTF-8; rename it") from error
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"cannot read {path!s:.200}: {error.strerror}; check the path") from error
    if not path.is_file():
        raise InputError(f"{path} is not a file; submit one Parquet or JSONL file at a time")


class ParquetRows:
    """Rows of a Parquet file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        try:
            self.file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid, pa.ArrowException) as error:
            raise InputError(
                f"{name} is damaged or truncated ({first_line(error)}); write it again"
            ) from error
        self.schema = self.file.schema_arrow

    @property
    def columns(self) -> Sequence[str]:
        return list(self.schema.names)

    def check(self, task: Task) -> None:
        if task.kind is Kind.MESSAGES:
            assert task.column is not None
            kind = self.schema.field(task.column).type
            if not is_messages(kind):
                raise InputError(
                    f"column {task.column!r} of {self.name} is {kind}, not list<struct<role, content>>; "
                    'use --prompt "{{ ' + task.column + ' }}" to send it as text'
                )

    def batch_rows(self) -> int:
        """How many rows to read at once: fewer where they are long."""
        meta = self.file.metadata
        size = sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))
        fitting = int(GROUP_BYTES * meta.num_rows / max(1, size))
        return max(1, min(ROWS_PER_GROUP, fitting))

    def batches(self, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        try:
            for batch in self.file.iter_batches(self.batch_rows(), columns=list(names)):
                yield python_rows(batch)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self.name} is damaged ({first_line(error)}); write it again") from error


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column type is list<struct<role: string, content: string, ...>>."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= fields.keys() and is_text(fields["role"])


def is_text(kind: pa.DataType) -> bool:
    """Whether a column type is text, of any of Arrow's widths."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


class JsonLines:
    """Rows of a JSONL file: one object a line."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.bytes_read = 0  # by `lines`, over all passes
        self.kinds = column_kinds(self.lines())
        if not self.kinds:
            raise InputError(f"{name} has no rows; nothing was submitted")

    @property
    def columns(self) -> Sequence[str]:
        return list(self.kinds)

    def check(self, task: Task) -> None:
        if task.kind is Kind.MESSAGES:
            assert task.column is not None
            if not self.kinds[task.column] <= {"list", "null"}:
                found = ", ".join(sorted(self.kinds[task.column]))
                raise InputError(
                    f"{task.column!r} in {self.name} is {found}, not a list of messages; "
                    'use --prompt "{{ ' + task.column + ' }}" to send it as text'
                )

    def lines(self) -> Iterator[dict[str, Any]]:
        """Every line as an object; a line that is none is an error that names it."""
        decode = msgspec.json.Decoder().decode
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                self.bytes_read += len(line)
                if line.isspace():
                    continue
                try:
                    row = decode(line)
                except (msgspec.DecodeError, ValueError) as error:  # not UTF-8, or a number of 5,000 digits
                    raise InputError(
                        f"line {number} of {self.name} is not JSON ({error}); correct it and submit again"
                    ) from error
                except RecursionError as error:
                    raise too_deep(f"line {number} of {self.name}") from error
                if not isinstance(row, dict):
                    raise InputError(
                        f"line {number} of {self.name} is not a JSON object; write one object a line"
                    )
                if line.count(b"{") + line.count(b"[") > MAX_DEPTH and is_deeper(row, MAX_DEPTH):
                    raise too_deep(f"line {number} of {self.name}")
                self.check_line(row, number)
                yield row

    def check_line(self, row: dict[str, Any], number: int) -> None:
        """What else must hold of a line."""

    def batches(self, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        batch: list[dict[str, Any]] = []
        full_at = self.bytes_read + GROUP_BYTES
        for row in self.lines():
            batch.append({name: row.get(name) for name in names})
            if len(batch) == ROWS_PER_GROUP or self.bytes_read >= full_at:
                yield batch
                batch = []
                full_at = self.bytes_read + GROUP_BYTES
        if batch:
            yield batch

    def copy_to(self, path: Path) -> None:
        """Write the rows as Parquet: plain columns keep their type, nested or mixed ones become JSON text."""
        schema = pa.schema([(name, arrow_type(kinds)) for name, kinds in self.kinds.items()])
        settings = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}
        with pq.ParquetWriter(path, schema, **settings) as writer:
            for batch in self.batches(self.columns):
                arrays = [column_array(batch, field) for field in schema]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


class OpenAILines(JsonLines):
    """Lines of an OpenAI Batch file: custom_id, method, url, body."""

    def check_line(self, row: dict[str, Any], number: int) -> None:
        where = f"line {number} of {self.name}"
        hint = "an OpenAI Batch line has custom_id, method, url and body; for other rows add --prompt or --messages"
        for name, kind in zip(OPENAI_COLUMNS, (str, str, str, dict), strict=True):
            if not isinstance(row.get(name), kind):
                raise InputError(f"{where} has no valid {name!r}; {hint}")
        if row["method"] != "POST":
            raise InputError(f"{where} has method {row['method']!r}; only POST is possible")

    @property
    def columns(self) -> Sequence[str]:
        return OPENAI_COLUMNS


KINDS = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    list: "list",
    dict: "object",
}


def too_deep(what: str) -> InputError:
    """The error for JSON that clients and servers would give up on."""
    return InputError(f"{what} nests more than {MAX_DEPTH} levels deep; flatten it and submit again")


def column_kinds(rows: Iterator[dict[str, Any]]) -> dict[str, set[str]]:
    """The JSON kinds that occur under each name, over all rows."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).add(kind_of(value))
    return kinds


def kind_of(value: Any) -> str:
    """The JSON kind of a value; an integer that no column can hold counts as text."""
    kind = KINDS[type(value)]
    return "string" if kind == "int" and not -(2**63) <= value < 2**63 else kind


def arrow_type(kinds: set[str]) -> pa.DataType:
    """The column type for these JSON kinds."""
    kinds = kinds - {"null"}
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds == {"int"}:
        return pa.int64()
    if kinds and kinds <= {"int", "float"}:
        return pa.float64()
    return pa.string()


def column_array(batch: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    """One column of a batch; what is no string becomes JSON text where the column is text."""
    values = [row[field.name] for row in batch]
    if pa.types.is_string(field.type):
        values = [v if v is None or isinstance(v, str) else msgspec.json.encode(v).decode() for v in values]
    elif pa.types.is_floating(field.type):
        values = [None if v is None else float(v) for v in values]  # Arrow takes no integer beyond 2**53 here
    return pa.array(values, field.type)


def check_columns(rows: Rows, wanted: Sequence[str], *, what: str) -> None:
    """Raise if a column is missing; lists those that do exist."""
    missing = [name for name in wanted if name not in rows.columns]
    if missing:
        names = " and ".join(repr(name) for name in missing)
        kind = TemplateError if what == "the template" else InputError
        raise kind(f"{what} names {names}, but the columns are: {', '.join(rows.columns)}")


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
