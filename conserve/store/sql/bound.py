"""Mistakes in a SELECT that show before a row has an answer: syntax, names of views, columns and functions."""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from conserve.errors import QueryError
from conserve.store.books.results import to_arrow
from conserve.store.sql.input_columns import shown_names
from conserve.store.sql.query import ask, opened
from conserve.store.sql.quoting import quoted
from conserve.store.sql.snapshot import LIVE, Snapshot

MISSING = re.compile(r"does not have a column named|Referenced (column|table) ")
"""DuckDB's errors of binding about a name. Its others are about types, which the rows alone decide."""


def check_names(select: str, columns: Sequence[str]) -> None:
    """Bind a SELECT over views without rows, `inputs` with these columns; raises `QueryError` for a mistake."""
    if len({name.lower() for name in columns}) < len(columns):
        return  # DuckDB numbers such columns by the files that it reads
    own = [f"null as {quoted(name)}" for name in shown_names(columns).values()]
    shown = ", ".join(["null::varchar as job_id", "null::bigint as row_index", *own])
    with TemporaryDirectory() as place:
        folder = Path(place)
        empty = Snapshot(folder, folder, [], [], [], to_arrow([], [], []), LIVE.empty_table(), [])
        with opened(empty, spill=folder, sealed=False) as views:
            views.duck.execute(f"create or replace view inputs as select {shown}")
            try:
                ask(views.duck, select)
            except QueryError as error:
                if not isinstance(error.__cause__, duckdb.BinderException) or MISSING.search(str(error)):
                    raise
