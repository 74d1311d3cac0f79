"""Files that a query reads beside the store, each under the name its user gave it."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb

from conserve.errors import QueryError
from conserve.store.sql.quoting import literals, parquet, quoted

COMPRESSED = (".gz", ".zst")
READERS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class NamedFile(NamedTuple):
    """A table name and the file behind it."""

    name: str
    path: Path
    kind: str  # "parquet", "csv", "json"


def named_file(text: str) -> NamedFile:
    """Parse NAME=PATH; raises `QueryError`. The path is one file, not a pattern; a link stands for its target."""
    name, equals, place = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise QueryError(
            f"--with takes NAME=PATH with a plain name, as in --with labels=labels.csv, not {text!r}"
        )
    path = Path(place).expanduser()
    if not path.is_file():
        raise QueryError(
            f"--with {name}: there is no file {place!r}; name one file, patterns are not expanded"
        )
    kind = kind_of(path)
    if kind is None:
        raise QueryError(
            f"--with {name}: {place!r} is none of {', '.join(READERS)} (csv and jsonl also as .gz, .zst)"
        )
    return NamedFile(name, path.resolve(), kind)


def kind_of(path: Path) -> str | None:
    """Kind of a file by its name: "parquet", "csv" or "json"; None if it cannot be read."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    kind = READERS.get(before if last in COMPRESSED else last)
    return None if kind == "parquet" and last in COMPRESSED else kind


def add_named(
    duck: duckdb.DuckDBPyConnection, files: Sequence[NamedFile], taken: Collection[str]
) -> list[Path]:
    """Create a view for each file; returns the paths. Raises `QueryError` if a name is taken, a file unreadable."""
    names = {name.lower() for name in taken}
    for file in files:
        if file.name.lower() in names:
            raise QueryError(f"--with {file.name}: there is a view of that name already; choose another")
        names.add(file.name.lower())
        try:
            duck.execute(f"create view {quoted(file.name)} as select * from {scan(file)}")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise QueryError(
                f"--with {file.name}: {file.path} cannot be read as {file.kind} ({reason})"
            ) from error
    return [file.path for file in files]


def scan(file: NamedFile) -> str:
    """The file as a table expression."""
    if file.kind == "parquet":
        return parquet([file.path])
    options = ", format = 'newline_delimited'" if file.kind == "json" else ""
    return f"read_{file.kind}({literals([file.path])}, hive_partitioning = false{options})"
