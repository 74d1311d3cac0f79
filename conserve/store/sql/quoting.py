"""Names, strings, files and Parquet scans as SQL text."""

import glob
from collections.abc import Sequence

from conserve.store.files.objects import FilePath


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """An SQL string."""
    return "'" + value.replace("'", "''") + "'"


def literals(paths: Sequence[FilePath]) -> str:
    """A list of files in SQL; glob characters in their names are escaped."""
    return "[" + ", ".join(literal(as_pattern(str(path))) for path in paths) + "]"


def as_pattern(path: str) -> str:
    """A path as a pattern that it alone matches.

    In a pattern DuckDB takes a backslash for a slash; the path itself it finds without one.
    """
    return path if "\\" in path else glob.escape(path)


def parquet(paths: Sequence[FilePath], *options: str) -> str:
    """A scan of Parquet files. A folder called `day=1` adds no column to them."""
    return f"read_parquet({', '.join([literals(paths), 'hive_partitioning = false', *options])})"
