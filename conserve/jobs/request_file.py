"""A job's rendered requests on disk: written once in execution order, read by position."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import StoreError
from conserve.jobs.rendering import Rendered

ROWS_PER_GROUP = 8192  # a claim reads whole row groups; this many short requests parse in about 10 ms
GROUP_BYTES = 16 << 20  # of payload, whichever comes first: long requests must not fill the memory

SCHEMA = pa.schema(
    [
        ("row_index", pa.int64()),
        ("custom_id", pa.string()),
        ("url", pa.string()),
        ("payload", pa.string()),
        ("error_type", pa.string()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """One rendered request; `payload` is None where rendering failed."""

    row_index: int
    custom_id: str | None
    url: str | None
    payload: str | None
    error_type: str | None
    error: str | None


class RequestWriter:
    """Writes requests in execution order, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1)
        self.rows = 0
        self.unrendered = 0

    def write(self, rows: Sequence[tuple[int, str | None, Rendered]]) -> None:
        """Append (row index, custom id, rendered request) triples, at most `ROWS_PER_GROUP` a call."""
        start = size = 0
        for stop, (_, _, rendered) in enumerate(rows, start=1):
            size += len(rendered.payload or "")
            if size >= GROUP_BYTES or stop == len(rows):
                self._write_group(rows[start:stop])
                start, size = stop, 0

    def _write_group(self, rows: Sequence[tuple[int, str | None, Rendered]]) -> None:
        columns: list[Iterable[Any]] = [
            [index for index, _, _ in rows],
            [custom_id for _, custom_id, _ in rows],
            [rendered.url for _, _, rendered in rows],
            [rendered.payload for _, _, rendered in rows],
            [rendered.error_type for _, _, rendered in rows],
            [rendered.error for _, _, rendered in rows],
        ]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        self.rows += len(rows)
        self.unrendered += sum(rendered.payload is None for _, _, rendered in rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class Group(NamedTuple):
    """One row group in memory."""

    number: int
    rows: list[StoredRequest]


class RequestFile:
    """Reads requests by position; keeps the row group read last, since claims walk forward."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"the requests {path} cannot be read ({error}); submit the job again") from error
        meta = self._file.metadata
        self._starts = [0]
        for group in range(meta.num_row_groups):
            self._starts.append(self._starts[-1] + meta.row_group(group).num_rows)
        self._last: Group | None = None

    def read(self, positions: Sequence[int]) -> list[StoredRequest]:
        """The requests at these positions, in the same order."""
        from bisect import bisect_right

        found = []
        in_order = sorted(positions)  # so that no row group is loaded twice
        for position in in_order:
            number = bisect_right(self._starts, position) - 1
            if self._last is None or self._last.number != number:
                self._last = self._load(number)
            found.append(self._last.rows[position - self._starts[number]])
        if in_order == positions:
            return found
        at = dict(zip(in_order, found, strict=True))
        return [at[position] for position in positions]

    def _load(self, number: int) -> Group:
        table = self._file.read_row_group(number)
        columns = [column.to_pylist() for column in table.columns]
        return Group(number, [StoredRequest(*values) for values in zip(*columns, strict=True)])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
