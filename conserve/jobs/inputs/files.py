"""Files of an input: expands patterns and folders, reads partitions off paths, recognises formats."""

import codecs
import glob
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import unquote

import pyarrow as pa

from conserve.errors import InputError, first_line

Partition = Mapping[str, int | str | None]


class FileFormat(StrEnum):
    """Format of a file of rows."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"


SUFFIXES = {
    ".parquet": FileFormat.PARQUET,
    ".pq": FileFormat.PARQUET,
    ".jsonl": FileFormat.JSONL,
    ".ndjson": FileFormat.JSONL,
    ".csv": FileFormat.CSV,
    ".tsv": FileFormat.TSV,
    ".tab": FileFormat.TSV,
}
PACKED = {".gz": "gzip", ".zst": "zstd"}
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
MAGIC |= {bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)}  # a frame to be skipped
PARQUET_MAGIC = b"PAR1"
WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # .xlsx and .ods, which are ZIPs; .xls
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
HIDDEN = ("_", ".")  # begins names that are no data
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")


class NamedInput(NamedTuple):
    """The files of an input; `several` where it was given as a pattern, a folder or more than one name."""

    paths: list[Path]
    several: bool


def spelled_out(names: Sequence[str], *, several: bool = False) -> NamedInput:
    """Expand names, patterns and folders into files, in order; raises `InputError` if one stands for none."""
    found: list[Path] = []
    several = several or len(names) > 1
    for name in names:
        paths = files_of(name)
        several = several or paths != [Path(name)]
        found += paths
    refuse_no_text(found)
    refuse_twice(found)
    return NamedInput(found, several)


def refuse_no_text(paths: Sequence[Path]) -> None:
    """Raise for a path that is not UTF-8, at any part: the store keeps paths as text, and DuckDB takes no other."""
    for path in paths:
        whole = str(path.absolute())
        try:
            whole.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the path {whole} is not UTF-8; rename the file, or its folder") from error


def refuse_twice(paths: Sequence[Path]) -> None:
    """Raise for two names of one file, whose rows would be asked twice."""
    known: dict[str, Path] = {}
    for path in paths:
        other = known.setdefault(os.path.realpath(path), path)
        if other is not path:
            fault = f"{path} is named twice" if other == path else f"{other} and {path} are one file"
            raise InputError(f"{fault}; name each file once")


def files_of(name: str) -> list[Path]:
    """Expand one name into files."""
    path = Path(name)
    if not name:  # an empty variable of a shell, which `Path` takes for this folder
        raise InputError("the name of an input is empty; name a file, a pattern or a folder")
    try:
        name.encode()
        if path.is_dir():
            return files_below(path)
        if not path.exists() and glob.has_magic(name):
            return files_like(name)
        if not path.exists():
            raise InputError(f"there is no file {name}; check the path")
    except UnicodeEncodeError as error:
        raise InputError(f"the name of the file {name:.200} is not UTF-8; rename it") from error
    except OSError as error:  # a name that is too long, a folder that may not be entered
        where = str(error.filename or name)
        raise InputError(f"cannot read {where:.200}: {error.strerror}; check the path") from error
    if not path.is_file():
        raise InputError(f"{name} is neither a file nor a folder; submit files of rows")
    return [path]


def files_below(folder: Path) -> list[Path]:
    """The files of a folder that hold rows, at any depth; names that begin with _ or . are not data."""
    found = once(row_files(folder))
    if not found:
        kinds = ", ".join(SUFFIXES)
        raise InputError(
            f"the folder {folder} holds no file of rows ({kinds}; .gz and .zst too); check the path"
        )
    return found


def once(paths: Iterable[Path]) -> list[Path]:
    """Paths in order, each file by one of its names: its own rather than that of a link to it."""
    named: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (path.is_symlink(), path)):
        named.setdefault(os.path.realpath(path), path)
    return sorted(named.values())


def row_files(folder: Path) -> Iterator[Path]:
    """Files of rows in a folder, at any depth; raises `InputError` for a link to one that is not there."""
    for path in not_hidden(folder):
        if form_of_name(path) is None:
            continue
        if path.is_file():
            yield path
        elif path.is_symlink() and not path.exists():
            raise InputError(f"{path} is a link to a file that is not there; mend it, or remove it")


def not_hidden(folder: Path) -> Iterator[Path]:
    """Walk through a folder, past what is hidden in it, as `.git` and `.venv` are; yields what is no folder.

    Links to folders are followed last, and each folder is read once. Raises `OSError` for a folder that cannot be
    read, whose files would be missing unnoticed.
    """
    left, read = [folder], set[str]()
    for top in left:
        for place, folders, names in os.walk(top, onerror=not_read):
            real = os.path.realpath(place)
            shown = [] if real in read else [name for name in folders if not name.startswith(HIDDEN)]
            folders[:] = shown
            left += [path for name in shown if (path := Path(place, name)).is_symlink()]
            if real not in read:
                yield from (Path(place, name) for name in names if not name.startswith(HIDDEN))
            read.add(real)


def not_read(error: OSError) -> None:
    """Raise the error of a folder that is no further read."""
    raise error


def files_like(pattern: str) -> list[Path]:
    """The files that match a pattern, and the files of rows in folders that match it."""
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
    found: set[Path] = set()
    for path in shown_by(pattern, map(Path, matches)):
        found.update(row_files(path) if path.is_dir() else [path] if path.is_file() else [])
    if not found:
        raise InputError(
            f"no file matches {pattern}; check the pattern (names that begin with _ or . are skipped)"
        )
    return once(found)


def shown_by(pattern: str, matches: Iterable[Path]) -> Iterator[Path]:
    """Yield a pattern's matches, but those with a hidden name for which no part of the pattern asks."""
    parts = Path(pattern).parts
    fixed = sum(1 for _ in itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    asked = [part for part in parts if part.startswith(HIDDEN)]
    for match in matches:
        hidden = (part for part in match.parts[fixed:] if part.startswith(HIDDEN))
        if all(any(fnmatchcase(part, one) for one in asked) for part in hidden):
            yield match


def form_of_name(path: Path) -> FileFormat | None:
    """Format by a file's suffix, packed or not; None if it tells none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def form_of(path: Path, name: str, wanted: FileFormat | None, *, from_stdin: bool) -> FileFormat:
    """Format of a file: `wanted`, else by its first bytes, else by its name, else JSON lines."""
    named = None if from_stdin else form_of_name(path)
    with opened(path, name) as file:
        head = file.read(4)
    is_parquet = head == PARQUET_MAGIC
    if head.startswith(UTF_16):
        raise InputError(f"{name} is UTF-16; convert it: iconv -f utf-16 -t utf-8 FILE")
    if head in WORKBOOKS:
        raise InputError(
            f"{name} is a workbook, as Excel saves it, or a ZIP; save its sheet as CSV and submit that"
        )
    form = wanted or (FileFormat.PARQUET if is_parquet else named or FileFormat.JSONL)
    if form is FileFormat.PARQUET and not head:
        raise InputError(f"{name} is empty, which no Parquet file is; write it again")
    if form is FileFormat.PARQUET and not is_parquet:
        raise InputError(f"{name} is not a Parquet file; write it again, or say what it is: --format")
    if is_parquet and packing(path) is not None:
        raise InputError(f"{name} is a Parquet file that was packed; unpack it, Parquet compresses by itself")
    if is_parquet and form is not FileFormat.PARQUET:
        raise InputError(f"{name} is a Parquet file, not {form}; leave --format out")
    return form


def packing(path: Path) -> str | None:
    """Compression of a file by its first bytes; None if it is not compressed."""
    with path.open("rb") as file:
        head = file.read(4)
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)


@contextmanager
def opened(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a file to read its bytes, unpacked; raises `InputError` if it cannot be read."""
    try:
        kind = packing(path)
        if kind is None:
            with path.open("rb") as file:
                yield file
        else:
            with pa.input_stream(str(path), compression=kind) as packed:
                yield cast("BinaryIO", io.BufferedReader(packed, 1 << 20))
    except MemoryError as error:
        raise no_memory(name, error) from error
    except (pa.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None)
        if reason:
            raise InputError(f"cannot read {name}: {reason}; check its permissions") from error
        raise InputError(f"{name} is damaged or truncated ({error}); write it again") from error


def no_memory(name: str, error: MemoryError) -> InputError:
    """The error for an input that there is no memory to read, which says nothing about its files."""
    return InputError(
        f"there is no memory to read {name} ({first_line(error)}); free some and submit it again"
    )


def partitions(paths: Sequence[Path], below: Path | None = None) -> list[Partition]:
    """Partition of each file, from folders called key=value; empty unless all files have the same keys.

    With `below` only folders below that one count: the files are copies, and the others are this machine's.
    """
    found = [dict(pairs_of(path.relative_to(below) if below else path)) for path in paths]
    if len({tuple(one) for one in found}) != 1:
        return [{} for _ in paths]
    values = {key: [one[key] for one in found] for key in found[0]}
    whole = {key for key, texts in values.items() if all(t == HIVE_NULL or WHOLE.fullmatch(t) for t in texts)}
    return [{key: partition_value(text, key in whole) for key, text in one.items()} for one in found]


def pairs_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs key=value among the folders of a path."""
    for part in path.parent.parts:
        key, equals, value = part.partition("=")
        if equals and key:
            yield key, unquote(value)


def partition_value(text: str, whole: bool) -> int | str | None:
    """Parse a partition's value, as Hive writes it."""
    if text == HIVE_NULL:
        return None
    return int(text) if whole else text
