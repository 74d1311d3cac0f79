"""Results of a job in the form that a program asks for."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conserve.api.display import table_html
from conserve.api.file_sink import file_sink
from conserve.api.queries import check_join, check_output, results_query
from conserve.api.twins import blocking
from conserve.config import Settings
from conserve.errors import PackageMissing, RowsLeftOut, UsageError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from conserve.store.books.catalog import JobRecord
    from conserve.store.sql.answer import SnapshotQuery
    from conserve.store.sql.batches import RowBatches
    from conserve.store.sql.readable import LeftOut
    from conserve.store.sql.relation import Relation

SHOWN_ROWS = 10
FORMATS = ("parquet", "jsonl", "csv")
SHOWN = ("row_index", "custom_id", "text", "finish_reason", "error")


class Results:
    """Results that a job has when they are asked for, in the order of its input.

    Rows without a result yet are left out. `with_inputs` adds the input's own columns, `with_prompts` the prompts.
    """

    def __init__(
        self, settings: Settings, job_id: str, *, with_inputs: bool = False, with_prompts: bool = False
    ) -> None:
        self._settings, self._job_id = settings, job_id
        self._with_inputs, self._with_prompts = with_inputs, with_prompts

    def __repr__(self) -> str:
        return f"<conserve.Results of {self._job_id}>"

    @blocking
    def arrow(self) -> "pa.Table":
        """All results as a pyarrow Table."""
        with self._read() as rows:
            return table_of(rows)

    @blocking
    def pandas(self) -> "pandas.DataFrame":
        """All results as a pandas DataFrame; raises `PackageMissing` without pandas."""
        require("pandas")
        with self._read() as rows:
            return table_of(rows).to_pandas()

    @blocking
    def polars(self) -> "polars.DataFrame":
        """All results as a polars DataFrame; raises `PackageMissing` without polars."""
        found = require("polars")
        with self._read() as rows:
            frame: polars.DataFrame = found.from_arrow(table_of(rows))
            return frame

    @blocking
    def duckdb(self) -> "Relation":
        """All results as a DuckDB relation, on DuckDB's default connection; times are in UTC, without a zone."""
        from conserve.store.sql.relation import relation

        with self._read() as rows:
            return relation(rows)

    @blocking
    def write(self, path: str | Path, *, format: str | None = None) -> int:
        """Write a file that appears whole or not at all; returns its number of rows.

        The format is "parquet", "jsonl" or "csv"; unless it is given, the file's ending says which.
        """
        from conserve.store.sql.export import Format, format_of, write

        if format is not None and format not in FORMATS:
            raise UsageError(f"format is parquet, jsonl or csv, not {format!r}")
        wanted = format_of(Path(path), None if format is None else Format(format))
        job, query = self._query()
        check_output(Path(path), job)
        with answered(query) as rows, file_sink(Path(path)) as stream:
            return write(rows, stream, wanted)

    def batches(self) -> "Iterator[pa.RecordBatch]":
        """Yield all results as Arrow batches of a few thousand rows, so that they need not fit into memory."""
        with self._read() as rows:
            yield from rows.batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each result as a dict; columns of JSON are parsed."""
        from conserve.store.sql.export import decoded

        with self._read() as rows:
            yield from decoded(rows)

    def _repr_html_(self) -> str:
        with self._read() as rows:
            first: pa.Table = table_of(rows, most=SHOWN_ROWS)
        shown = [name for name in first.column_names if name in SHOWN or self._with_inputs]
        return table_html(shown, list(zip(*(first[name].to_pylist() for name in shown), strict=True)))

    @contextmanager
    def _read(self) -> "Iterator[RowBatches]":
        _, query = self._query()
        with answered(query) as rows:
            yield rows

    def _query(self) -> "tuple[JobRecord, SnapshotQuery]":
        return results_query(
            self._settings, self._job_id, with_inputs=self._with_inputs, with_prompts=self._with_prompts
        )


@contextmanager
def answered(query: "SnapshotQuery", *, joins: bool = True) -> "Iterator[RowBatches]":
    """Yield the rows of a query; warns of rows that are left out, and raises if a join would drop others."""
    from conserve.store.sql import answer

    def warn(gap: "LeftOut") -> None:
        if joins:
            check_join(gap)
        warnings.warn(gap.sentence, RowsLeftOut, stacklevel=2)

    with answer.answered(query, warn=warn) as rows:
        yield rows


def table_of(rows: "RowBatches", *, most: int | None = None) -> "pa.Table":
    """Rows as one table; at most so many."""
    import pyarrow as pa

    batches, count = [], 0
    for batch in rows.batches:
        batches.append(batch)
        count += batch.num_rows
        if most is not None and count >= most:
            break
    return pa.Table.from_batches(batches, schema=rows.schema).slice(0, most)


def require(name: str) -> Any:
    """Import an optional package; raises `PackageMissing`."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise PackageMissing(
            f"{name} is not installed; install it beside ConServe, or use .arrow()"
        ) from error
