"""Sort more rows than fit into memory: sorted runs on disk, then one merge.

Memory is bounded by bytes rather than rows: DuckDB's sort keeps 2,048 rows at a time whatever their size, and fails
on long ones (docs/log.md).
"""

import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

RUN_BYTES = 16 << 20  # of rows in memory until they become a run
BATCH_BYTES = 256 << 10  # of each run that a merge holds
FAN_IN = 64  # runs that one merge reads


class ExternalSort:
    """Sorts the rows of tables of one schema by one column: nulls last, rows of equal keys in their own order."""

    def __init__(self, folder: Path, key: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(dir=folder, prefix="sort-")
        self._key = key
        self._runs: list[Path] = []
        self._made = 0
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= RUN_BYTES:
            self._runs.append(self._spill([self._sorted_pending()]))

    def rows(self) -> Iterator[pa.Table]:
        """Yield all rows in order, some at a time."""
        if not self._runs:
            if self._pending:
                yield self._sorted_pending()
            return
        if self._pending:
            self._runs.append(self._spill([self._sorted_pending()]))
        while len(self._runs) > FAN_IN:
            together = [self._runs[n : n + FAN_IN] for n in range(0, len(self._runs), FAN_IN)]
            self._runs = [self._spill(self._merged(paths)) for paths in together]
        yield from self._merged(self._runs)

    def _sorted_pending(self) -> pa.Table:
        table = in_order(self._pending, self._key)
        self._pending, self._pending_bytes = [], 0
        return table

    def _spill(self, tables: Iterator[pa.Table] | Sequence[pa.Table]) -> Path:
        """Write sorted rows as a run, in batches that a merge can hold many of."""
        path = Path(self._scratch.name) / f"{self._made}.arrow"
        self._made += 1
        writer = None
        try:
            for table in tables:
                if writer is None:
                    options = pa.ipc.IpcWriteOptions(compression="lz4")
                    writer = pa.ipc.new_stream(path, table.schema, options=options)
                for part in small(table):
                    writer.write_table(part)
        finally:
            if writer is not None:
                writer.close()
        return path

    def _merged(self, paths: Sequence[Path]) -> Iterator[pa.Table]:
        """Yield the rows of sorted runs in order, then delete the runs."""
        # Rows up to the end of the batch that ends first are surely next: all others come after it.
        runs = [Run(path, self._key) for path in paths]
        try:
            while alive := [run for run in runs if run.rows]:
                first = min(range(len(alive)), key=lambda n: (*alive[n].end, n))
                is_null, bound = alive[first].end
                parts = [run.take(is_null, bound, equals=n <= first) for n, run in enumerate(alive)]
                yield in_order([part for part in parts if part.num_rows], self._key)
        finally:
            for run in runs:
                run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.cleanup()


class Run:
    """A sorted file that is read front to back, one batch in memory."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._file = pa.OSFile(str(path))
        self._reader = pa.ipc.open_stream(self._file)
        self._load()

    def _load(self) -> None:
        try:
            self._at_hand(self._reader.read_next_batch())
        except StopIteration:
            self._at_hand(pa.RecordBatch.from_pylist([], self._reader.schema))

    def _at_hand(self, batch: pa.RecordBatch) -> None:
        self._batch, self._keys = batch, batch.column(self._key)

    @property
    def rows(self) -> int:
        """Rows in memory; 0 once all were taken."""
        return int(self._batch.num_rows)

    @property
    def end(self) -> tuple[bool, Any]:
        """Last key in memory, to be compared: whether it is null, then the key, or 0 for a null."""
        last = self._keys[-1].as_py()
        return last is None, last if last is not None else 0

    def take(self, is_null: bool, bound: Any, *, equals: bool) -> pa.Table:
        """Take the rows before the bound, with `equals` also rows at it; then loads the next batch if need be."""
        known = self.rows - self._keys.null_count
        if is_null:
            count = self.rows if equals else known
        else:
            find = bisect_right if equals else bisect_left
            count = find(range(known), bound, key=lambda n: self._keys[n].as_py())
        taken = pa.Table.from_batches([self._batch.slice(0, count)])
        if count == self.rows:
            self._load()
        else:
            self._at_hand(self._batch.slice(count))
        return taken

    def close(self) -> None:
        """Close the file and delete it."""
        self._file.close()
        self._path.unlink()


def in_order(tables: Sequence[pa.Table], key: str) -> pa.Table:
    """Join tables and sort their rows by key."""
    table = pa.concat_tables(tables).combine_chunks()
    return table.take(pc.sort_indices(table, sort_keys=[(key, "ascending")]))


def small(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into parts of about `BATCH_BYTES`; a row that is longer is a part of its own."""
    ends = np.cumsum(row_bytes(table))
    start = 0
    while start < table.num_rows:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
        yield table.slice(start, stop - start)
        start = stop


def row_bytes(table: pa.Table) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """About how many bytes each row takes: its texts, and 64 for the rest."""
    total = np.full(table.num_rows, 64, np.int64)
    for column in table.columns:
        if pa.types.is_string(column.type):
            total += pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return total
