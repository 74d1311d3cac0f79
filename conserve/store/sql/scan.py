"""Rows of a user's own query or relation, over anything that DuckDB can read, streamed as Arrow batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from conserve.errors import InputError
from conserve.store.sql.batches import keepable, streamed
from conserve.store.sql.mistakes import one_line
from conserve.store.sql.read_only import only_reads


@contextmanager
def scanned(sql: str, scratch: Path) -> Iterator[pa.RecordBatchReader]:
    """Stream the rows of one SELECT in its order; data beyond memory goes to the folder `scratch`.

    The connection is not sealed, since the query reads the user's own files. It must be a SELECT, so that a submit
    changes nothing outside the store. Raises `InputError`.
    """
    try:
        with duckdb.connect(":memory:", config={"temp_directory": str(scratch)}) as duck:
            duck.execute("set python_enable_replacements = false")
            duck.execute("set timezone = 'UTC'")
            yield streamed(selected(duck, sql))
    except (duckdb.Error, pa.ArrowException, UnicodeError) as error:
        raise InputError(f"--sql fails: {in_one_line(error)}; correct it and submit again") from error


def relation_rows(source: object) -> pa.RecordBatchReader | None:
    """Stream the rows of a relation, with types as those of a query; None for anything else.

    Raises `InputError` for a relation that fails.
    """
    if not isinstance(source, duckdb.DuckDBPyRelation):
        return None
    try:
        return streamed(keepable(source))
    except duckdb.Error as error:
        raise InputError(f"the relation fails: {in_one_line(error)}; correct it and submit again") from error


def selected(duck: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    """Bind the one SELECT in the text; raises `InputError` for anything else."""
    sql.encode()  # DuckDB takes nothing but UTF-8, and says so at length
    statements = duck.extract_statements(sql)
    if len(statements) != 1 or not only_reads(duck, statements[0].query):
        raise InputError("--sql takes one SELECT, as in --sql \"select text from 'data.parquet'\"")
    return keepable(duck.sql(statements[0].query))


def in_one_line(error: Exception) -> str:
    """Message of an error of DuckDB's, or of text that is not UTF-8, on one line."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    return one_line(str(error)) or type(error).__name__
