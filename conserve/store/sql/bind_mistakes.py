"""Mistakes in a SELECT that show before a row has an answer: syntax, types, names of views, columns, functions."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb

from conserve.errors import QueryError
from conserve.store.books.results import to_arrow
from conserve.store.sql.batches import rows_of, unique
from conserve.store.sql.export import decoded
from conserve.store.sql.input_columns import shown_names
from conserve.store.sql.input_parts import InputPart
from conserve.store.sql.query import TROUBLE, Uses, Views, ask, opened, seal, views_of
from conserve.store.sql.quoting import quoted
from conserve.store.sql.snapshot import LIVE, Snapshot
from conserve.store.sql.views import add_inputs

MISSING = re.compile(r"does not have a column named|Referenced (column|table) ")
"""DuckDB's errors of binding about a name. Its others are about types, which the rows alone decide."""


def check_names(select: str, columns: Sequence[str]) -> None:
    """Bind a SELECT over views without rows, `inputs` with these columns; raises `QueryError` for a mistake."""
    if len({name.lower() for name in columns}) < len(columns):
        return  # DuckDB numbers such columns by the files that it reads
    own = [f"null as {quoted(name)}" for name in shown_names(columns).values()]
    shown = ", ".join(["null::varchar as job_id", "null::bigint as row_index", *own])
    with without_rows(lambda empty: views_of(empty, select)) as views:
        views.duck.execute(f"create or replace view inputs as select {shown}")
        try:
            ask(views.duck, select)
        except QueryError as error:
            cause = error.__cause__
            if not isinstance(cause, duckdb.BinderException) or MISSING.search(str(cause)):
                raise


def bound_columns(select: str, parts: Sequence[InputPart]) -> list[str] | None:
    """Columns of a SELECT that is bound, and not run, over these inputs and no results.

    None if the inputs cannot be read, which says nothing about the SELECT. Raises `QueryError` for a mistake in it.
    """
    with over_inputs(parts, lambda empty: views_of(empty, select)) as duck:
        if duck is None:
            return None
        try:
            return unique(ask(duck, select).columns)
        except QueryError as error:
            if isinstance(error.__cause__, TROUBLE):
                return None
            raise


def first_row(parts: Sequence[InputPart]) -> dict[str, Any] | None:
    """First row of these inputs by the names of the view `inputs`; None if they cannot be read."""
    with over_inputs(parts, lambda empty: {"inputs"}) as duck:
        if duck is None:
            return None
        found = duck.sql("select * exclude (job_id, row_index) from inputs order by row_index limit 1")
        return next(decoded(rows_of(found)), None)


@contextmanager
def over_inputs(parts: Sequence[InputPart], uses: Uses) -> Iterator[duckdb.DuckDBPyConnection | None]:
    """Yield the views of one job with these inputs, sealed as for a query; None if the inputs cannot be read."""
    with without_rows(uses) as views:
        views.duck.execute("drop view if exists inputs")
        left_out = add_inputs(views.duck, {"job": [*parts]})
        seal(views.duck, [part.path for part in parts])
        yield None if left_out else views.duck


@contextmanager
def without_rows(uses: Uses) -> Iterator[Views]:
    """Yield the views in use over a store without jobs, not yet sealed."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        empty = Snapshot(0.0, folder, folder, [], [], [], to_arrow([], [], []), LIVE.empty_table(), [])
        with opened(empty, spill=folder, sealed=False, uses=uses) as views:
            yield views
