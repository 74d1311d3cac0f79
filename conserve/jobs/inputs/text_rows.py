"""Rows of text files, packed or not, one after the other: lines of JSON, OpenAI Batch lines, CSV and TSV."""

import codecs
import csv
import io
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import InputError
from conserve.installation import quoted
from conserve.jobs.inputs.cells import Unreadable
from conserve.jobs.inputs.files import Partition, opened
from conserve.jobs.inputs.groups import GROUP_BYTES, ROWS_PER_GROUP
from conserve.jobs.inputs.nesting import MAX_DEPTH, is_deeper
from conserve.jobs.inputs.openai_line import INVALID_METHOD, fault_of
from conserve.jobs.task import Kind, Task, in_template

KINDS = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    list: "list",
    dict: "object",
    Unreadable: "null",  # in the copy
}

SEPARATORS = {";": "';'", "\t": r"'\t'", "|": "'|'"}
"""Signs that separate columns in files that are called CSV, as SQL writes them."""


class TextRows:
    """Rows of text files, read front to back any number of times; `name` is the input's name in messages."""

    def __init__(
        self, paths: Sequence[Path], name: str, partitions: Sequence[Partition] | None = None
    ) -> None:
        self.paths, self.name = paths, name
        self.partitions = partitions or [{} for _ in paths]
        self.bytes_read = 0  # by all passes
        self.kinds = column_kinds(self.rows())
        if not self.kinds:
            what = "rows" if next(self.rows(), None) is None else "columns: each of its rows is empty"
            raise InputError(f"{name} has no {what}; nothing was submitted")

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
                    f"use --prompt {quoted(in_template(task.column))} to send it as text"
                )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row of every file; raises `InputError`, which names the line, for one that cannot be read."""
        for path, partition in zip(self.paths, self.partitions, strict=True):
            name = self.name if len(self.paths) == 1 else str(path)
            for row in self.rows_of(path, name):
                yield {**partition, **row} if partition else row

    def rows_of(self, path: Path, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one file."""
        raise NotImplementedError

    def batches(self, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        batch: list[dict[str, Any]] = []
        full_at = self.bytes_read + GROUP_BYTES
        for row in self.rows():
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
        with pq.ParquetWriter(
            path, schema, compression="zstd", compression_level=1, write_page_checksum=True
        ) as writer:
            for batch in self.batches(self.columns):
                arrays = [column_array(batch, field) for field in schema]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


class JsonLines(TextRows):
    """Rows of JSONL files: one object a line."""

    def rows_of(self, path: Path, name: str) -> Iterator[dict[str, Any]]:
        decode = msgspec.json.Decoder().decode
        first = True
        with opened(path, name) as file:
            for number, line in enumerate(file, start=1):
                self.bytes_read += len(line)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line or line.isspace():
                    continue
                where = f"line {number} of {name}"
                try:
                    row = decode(line)
                except (msgspec.DecodeError, ValueError) as error:  # not UTF-8, or a number of 5,000 digits
                    if first and b"\0" in line:
                        raise no_text(name) from error
                    if first and line.lstrip().startswith(b"["):
                        raise one_array(path, name) from error
                    row = row_with_halves(line)
                    if row is None:
                        if (constant := constant_in(line)) is not None:
                            raise no_number(where, constant) from error
                        other = first and not line.lstrip().startswith((b"{", b"["))
                        fix = (
                            "if it is CSV or TSV, say so: --format csv"
                            if other
                            else "correct it and submit again"
                        )
                        raise InputError(f"{where} is not JSON ({error}); {fix}") from error
                except RecursionError as error:
                    raise too_deep(where) from error
                if first and holds_rows(row) and all(map(bytes.isspace, file)):
                    raise one_array(path, name)
                if not isinstance(row, dict):
                    raise InputError(f"{where} is not a JSON object; write one object a line")
                if line.count(b"{") + line.count(b"[") > MAX_DEPTH and is_deeper(row, MAX_DEPTH):
                    raise too_deep(where)
                self.check_line(row, where)
                first = False
                yield row

    def check_line(self, row: dict[str, Any], where: str) -> None:
        """Raise `InputError` for an object that is not a row of this kind of file."""


class OpenAILines(JsonLines):
    """Lines of OpenAI Batch files: custom_id, method, url, body."""

    def check_line(self, row: dict[str, Any], where: str) -> None:
        if (fault := fault_of(row)) is None:
            return
        if fault.code == INVALID_METHOD:
            raise InputError(f"{where} has method {row['method']!r}; only POST is possible")
        hint = "an OpenAI Batch line has custom_id, method, url and body; for other rows add --prompt or --messages"
        raise InputError(f"{where} has no valid {fault.param!r}; {hint}")


class CsvRows(TextRows):
    """Rows of CSV files. Every value stays text, so that 007 stays 007.

    Python's own reader is used, since it names the line of a mistake and takes rows of any length.
    """

    delimiter = ","

    @property
    def hint(self) -> str:
        """Hint on columns that another sign seems to separate; empty if they look sound."""
        return separator_hint(self.columns, in_sql(self.paths[0], self.name))

    def rows_of(self, path: Path, name: str) -> Iterator[dict[str, Any]]:
        with opened(path, name) as file, closing(self._lines(file, name)) as lines:
            _, names = next(lines, (0, []))
            header = header_of(names, name)
            hint = separator_hint(header, in_sql(path, name)) or "correct it and submit again"
            for number, values in lines:
                if len(values) != len(header):
                    raise InputError(
                        f"line {number} of {name} has {len(values)} values and the header {len(header)}; {hint}"
                    )
                yield dict(zip(header, values, strict=True))

    def _lines(self, file: BinaryIO, name: str) -> Generator[tuple[int, list[str]], None, None]:
        """Yield the number of the line on which each row ends, and the row's values."""
        csv.field_size_limit(sys.maxsize)
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=self.delimiter, strict=True)
        try:
            for values in reader:
                self.bytes_read += len("".join(values).encode())
                if values:
                    yield reader.line_num, values
        except csv.Error as error:
            said = f"line {reader.line_num} of {name} is not CSV ({error})"
            raise InputError(f"{said}; correct it and submit again") from error
        except UnicodeEncodeError as error:  # a byte that was none of UTF-8's
            said = f"line {reader.line_num} of {name} is not UTF-8"
            fix = "if it is Latin-1, as old spreadsheets write it, convert it: iconv -f latin1 -t utf-8 FILE"
            raise InputError(f"{said}; {fix}") from error
        finally:
            text.detach()


class TsvRows(CsvRows):
    """Rows of TSV files: CSV with tabs between values."""

    delimiter = "\t"


def header_of(names: list[str], file: str) -> list[str]:
    """The columns of a CSV file; one without a name, as pandas writes its index, is called by its number."""
    header = [name or f"column_{number}" for number, name in enumerate(names)]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{file} has two columns called {twice!r}; rename one")
    return header


def row_with_halves(line: bytes) -> dict[str, Any] | None:
    """The row of a line with half of a surrogate pair, `Unreadable` in place of such values; None if it has none.

    Other encoders write such halves for text that was cut within an emoji, and msgspec takes none.
    """
    try:
        row = json.loads(line.decode(), parse_constant=no_json)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not is_utf8(list(row)):
        return None
    marked = {name: value if is_utf8(value) else half(value) for name, value in row.items()}
    return marked if Unreadable in map(type, marked.values()) else None


def half(value: object) -> Unreadable:
    """Mark for a value with half of a surrogate pair."""
    escaped = value.encode(errors="backslashreplace").decode() if isinstance(value, str) else None
    return Unreadable("text with half of a surrogate pair", escaped)


def no_json(constant: str) -> None:
    """Raise `ValueError` for NaN and Infinity, which JSON lacks."""
    raise ValueError(constant)


def constant_in(line: bytes) -> str | None:
    """The first NaN or Infinity of a line that is JSON but for such constants; None for any other line."""
    found: list[str] = []
    try:
        json.loads(line.decode(), parse_constant=found.append)
    except (ValueError, RecursionError):
        return None
    return found[0] if found else None


def no_number(where: str, constant: str) -> InputError:
    """The error for a constant that Python's `json.dumps` writes and JSON lacks."""
    return InputError(
        f"{where} is not JSON: it has {constant}, which is no number of JSON; write null in its place "
        "(json.dumps with allow_nan=False finds such values) and submit again"
    )


def is_utf8(value: object) -> bool:
    """True if UTF-8 can write every text of a JSON value."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return False
    return True


def holds_rows(value: object) -> bool:
    """True if a line's value is a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def one_array(path: Path, name: str) -> InputError:
    """The error for a file that is one array of rows instead of lines, which a query reads nevertheless."""
    query = f"from read_json({in_sql(path, name)})"
    return InputError(
        f"{name} is one JSON array; write one object a line, or submit a file of this machine with "
        f"--sql {quoted(query)}"
    )


def no_text(name: str) -> InputError:
    """The error for a file with bytes that no text in UTF-8 has."""
    return InputError(
        f"{name} is no text in UTF-8: it has bytes 0, as binary files and UTF-16 do; submit JSONL, CSV or Parquet"
    )


def in_sql(path: Path, name: str) -> str:
    """The file as SQL names it, or a word in its place for an input that is no file of the user's."""
    return "'" + (name if name == str(path) else "FILE").replace("'", "''") + "'"


def separator_hint(header: Sequence[str], file: str) -> str:
    """Hint on a header that another sign seems to separate, with the query to submit; empty if none does."""
    found = next((sign for sign in SEPARATORS if len(header) == 1 and sign in header[0]), None)
    if found is None:
        return ""
    query = f"from read_csv({file}, delim={SEPARATORS[found]}, all_varchar=true)"
    return f"they seem to be separated by {SEPARATORS[found]}; submit --sql {quoted(query)}"


def too_deep(where: str) -> InputError:
    """The error for JSON that clients and servers would give up on."""
    return InputError(f"{where} nests more than {MAX_DEPTH} levels deep; flatten it and submit again")


def column_kinds(rows: Iterator[dict[str, Any]]) -> dict[str, set[str]]:
    """The JSON kinds that occur under each name, over all rows."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).add(kind_of(value))
    return kinds


def kind_of(value: Any) -> str:
    """The JSON kind of a value; "long" is an integer that no float holds, and one that no column holds is text."""
    kind = KINDS[type(value)]
    if kind != "int" or -(2**53) <= value <= 2**53:
        return kind
    return "long" if -(2**63) <= value < 2**63 else "string"


def arrow_type(kinds: set[str]) -> pa.DataType:
    """The column type for these JSON kinds."""
    kinds = kinds - {"null"}
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds and kinds <= {"int", "long"}:
        return pa.int64()
    if kinds and kinds <= {"int", "float"}:
        return pa.float64()
    return pa.string()


def column_array(batch: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    """One column of a batch; in a text column, values that are not strings become JSON text."""
    values = [None if isinstance(value := row[field.name], Unreadable) else value for row in batch]
    if pa.types.is_string(field.type):
        values = [v if v is None or isinstance(v, str) else msgspec.json.encode(v).decode() for v in values]
    elif pa.types.is_floating(field.type):
        values = [None if v is None else float(v) for v in values]  # Arrow takes no integer beyond 2**53 here
    return pa.array(values, field.type)
