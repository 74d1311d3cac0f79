"""Rows by SQL from whatever DuckDB can read: the user's own query, streamed as Arrow batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from conserve.errors import InputError
from conserve.store.sql.quoting import quoted

BATCH_ROWS = 2048


@contextmanager
def scanned(sql: str, scratch: Path) -> Iterator[pa.RecordBatchReader]:
    """The rows of one SELECT, in its order; `scratch` takes what memory does not hold.

    Nothing is sealed away, since the query is the user's and reads the user's files; it is a SELECT all the same,
    so that a submit changes nothing outside the store.
    """
    try:
        with duckdb.connect(":memory:", config={"temp_directory": str(scratch)}) as duck:
            duck.execute("set python_enable_replacements = false")
            duck.execute("set timezone = 'UTC'")
            yield selected(duck, sql).to_arrow_reader(BATCH_ROWS)
    except (duckdb.Error, pa.ArrowException, UnicodeError) as error:
        raise InputError(f"--sql fails: {in_one_line(error)}; correct it and submit again") from error


def selected(duck: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    """The one SELECT that the text holds; raises for anything else."""
    sql.encode()  # DuckDB takes nothing but UTF-8, and says so at length
    statements = duck.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise InputError("--sql takes one SELECT, as in --sql \"select text from 'data.parquet'\"")
    found = duck.sql(statements[0].query)
    unkept = [name for name, kind in zip(found.columns, found.types, strict=True) if "INTERVAL" in str(kind)]
    if not unkept:
        return found
    as_text = ", ".join(f"cast({quoted(name)} as varchar) as {quoted(name)}" for name in unkept)
    return found.project(f"* replace ({as_text})")  # Parquet has no such type


def in_one_line(error: Exception) -> str:
    """DuckDB's message without the picture of where it is."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "^" not in line]
    return " ".join(lines) or type(error).__name__
