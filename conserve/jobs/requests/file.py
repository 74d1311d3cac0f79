"""A job's rendered requests on disk: written once in execution order, read by position."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conserve.config import Settings
from conserve.errors import StoreDamaged, StoreError
from conserve.jobs.inputs.groups import GROUP_BYTES, ROWS_PER_GROUP
from conserve.jobs.requests.rendering import RenderedRow
from conserve.store.books import readings
from conserve.store.files import layout, os_errors
from conserve.store.files.objects import FilePath, source
from conserve.store.files.place import place_of

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


class StoredRequest(NamedTuple):
    """One rendered request; `payload` is None where rendering failed."""

    row_index: int
    custom_id: str | None
    url: str | None
    payload: str | None
    error_type: str | None
    error: str | None


def to_table(
    row_indexes: Iterable[int], custom_ids: Sequence[str | None], rendered: Sequence[RenderedRow]
) -> pa.Table:
    """Rendered rows as a table of `SCHEMA`."""
    columns: list[Iterable[Any]] = [
        row_indexes,
        custom_ids,
        [one.url for one in rendered],
        [one.payload for one in rendered],
        [one.error_type for one in rendered],
        [one.error for one in rendered],
    ]
    try:
        arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    except UnicodeEncodeError:
        return to_table(row_indexes, custom_ids, [in_utf8(one) for one in rendered])
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def in_utf8(rendered: RenderedRow) -> RenderedRow:
    """The row if UTF-8 can write its payload; a payload with half a surrogate pair becomes an error of the row."""
    try:
        (rendered.payload or "").encode()
    except UnicodeEncodeError:
        return RenderedRow(error_type="template", error="the prompt holds half of a surrogate pair")
    error = rendered.error and rendered.error.encode("utf-8", "backslashreplace").decode()
    return rendered._replace(error=error)


class RequestWriter:
    """Writes requests in execution order, in row groups that a claim can read whole."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetWriter(
            path, SCHEMA, compression="zstd", compression_level=1, write_page_checksum=True
        )
        self._rest = SCHEMA.empty_table()  # less than a row group
        self.rows = 0
        self.unrendered = 0
        self.first_error: str | None = None  # of the input's first row that could not be rendered
        self.first_row: int | None = None

    def write(self, table: pa.Table) -> None:
        """Append requests."""
        self.rows += table.num_rows
        if table["payload"].null_count:
            self._note_errors(table.filter(pc.is_null(table["payload"])))
        table = pa.concat_tables([self._rest, table])
        sizes = pc.fill_null(pc.binary_length(table["payload"]), 0).to_numpy()
        ends = np.cumsum(sizes, dtype=np.int64)  # bytes up to the end of each row
        start = 0
        while True:
            before = ends[start - 1] if start else 0
            full = int(np.searchsorted(ends, before + GROUP_BYTES)) + 1
            stop = min(start + ROWS_PER_GROUP, full)
            if stop > table.num_rows:
                break
            self._file.write_table(table.slice(start, stop - start))
            start = stop
        self._rest = table.slice(start)

    def _note_errors(self, failed: pa.Table) -> None:
        self.unrendered += failed.num_rows
        first = failed.take([pc.index(failed["row_index"], pc.min(failed["row_index"]))]).to_pylist()[0]
        if self.first_row is None or first["row_index"] < self.first_row:
            self.first_row, self.first_error = first["row_index"], first["error"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._rest.num_rows:
                self._file.write_table(self._rest)
        finally:
            self._file.close()


class RowGroup(NamedTuple):
    """One row group in memory, of which a claim takes a part: harvesters of one job share it."""

    number: int
    table: pa.Table

    def rows(self, offsets: Sequence[int]) -> list[StoredRequest]:
        """The rows at these ascending offsets."""
        first, count = offsets[0], len(offsets)
        neighbours = list(offsets) == list(range(first, first + count))
        part = self.table.slice(first, count) if neighbours else self.table.take(offsets)
        # `to_pylist` takes ten times as long.
        columns = [column.to_numpy().tolist() for column in part.columns]
        return list(map(StoredRequest._make, zip(*columns, strict=True)))


class RequestFile:
    """Reads requests by position; keeps the row group read last, since claims walk forward.

    Raises `StoreDamaged` for a file that is missing or damaged, `StoreForbidden` for one that is out of
    reach, and another `StoreError` if it can open no more files.
    """

    def __init__(self, path: FilePath) -> None:
        self._path = path
        with self._readable():
            self._file = pq.ParquetFile(source(path), page_checksum_verification=True)
        meta = self._file.metadata
        self._starts = [0]
        for group in range(meta.num_row_groups):
            self._starts.append(self._starts[-1] + meta.row_group(group).num_rows)
        self._last: RowGroup | None = None

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn pyarrow's errors about the file into `StoreDamaged` of the job, whose folder it is in."""
        try:
            with os_errors.damage_apart(self._path):
                yield
        except (OSError, pa.ArrowException, IndexError) as error:
            job_id = self._path.parent.name
            said = str(error).strip().splitlines()[0]
            raise StoreDamaged(
                f"the requests {self._path} cannot be read ({said})",
                step=f"run: conserve check {job_id}",
                job_id=job_id,
            ) from error

    def read(self, positions: Sequence[int]) -> list[StoredRequest]:
        """The requests at these positions, in the same order."""
        found: list[StoredRequest] = []
        in_order = sorted(positions)  # so that no row group is loaded twice
        while len(found) < len(in_order):
            number = bisect_right(self._starts, in_order[len(found)]) - 1
            group = self._load(number)
            start, stop = self._starts[number : number + 2]
            end = bisect_left(in_order, stop)
            found += group.rows([position - start for position in in_order[len(found) : end]])
        if in_order == positions:
            return found
        at = dict(zip(in_order, found, strict=True))
        return [at[position] for position in positions]

    def position_of(self, column: str, value: object) -> int | None:
        """Position of the one row with this value, None if absent; reads that column alone."""
        for group, start in enumerate(self._starts[:-1]):
            with self._readable():
                values = self._file.read_row_group(group, columns=[column])[column]
            found = pc.index(values, pa.scalar(value)).as_py()
            if found >= 0:
                return start + int(found)
        return None

    def earliest(self, returned: Sequence[int], start: int) -> int | None:
        """Smallest row index at these sorted positions and at all from `start` on; None if there are none.

        Of row groups that lie behind `start` only the statistics are read.
        """
        found = []
        for number, (first, stop) in enumerate(pairwise(self._starts)):
            if first >= start:
                found.append(self._file.metadata.row_group(number).column(0).statistics.min)
                continue
            wanted = [
                *returned[bisect_left(returned, first) : bisect_left(returned, stop)],
                *range(start, stop),
            ]
            if wanted:
                with self._readable():
                    column = self._file.read_row_group(number, columns=["row_index"])["row_index"]
                indexes = column.to_pylist()
                found.append(min(indexes[position - first] for position in wanted))
        return min(found, default=None)

    def unrendered(self, returned: Sequence[int], start: int) -> int:
        """Number of requests before `start`, and not at these sorted positions, that could not be rendered.

        Of row groups without such requests only the statistics are read.
        """
        found = 0
        payload = self._file.schema_arrow.names.index("payload")
        for number, (first, stop) in enumerate(pairwise(self._starts)):
            statistics = self._file.metadata.row_group(number).column(payload).statistics
            if first < start and (statistics is None or statistics.null_count != 0):
                with self._readable():
                    types = self._file.read_row_group(number, columns=["error_type"])["error_type"]
                failed = types.is_valid().to_numpy()[: start - first]
                back = returned[bisect_left(returned, first) : bisect_left(returned, min(stop, start))]
                found += int(failed.sum()) - sum(bool(failed[position - first]) for position in back)
        return found

    def _load(self, number: int) -> RowGroup:
        """The row group, from memory if it was the last one too."""
        if self._last is None or self._last.number != number:
            with self._readable():
                self._last = RowGroup(number, self._file.read_row_group(number))
        return self._last

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def first_waiting(settings: Settings, job_id: str) -> int | None:
    """Smallest row index of a job's waiting rows; None if no row waits, or the file cannot be read."""
    return looked_up(settings, job_id, RequestFile.earliest)


def unrendered_so_far(settings: Settings, job_id: str) -> int:
    """Number of a job's taken rows that could not be rendered at submit; 0 if the file cannot be read."""
    return looked_up(settings, job_id, RequestFile.unrendered) or 0


def looked_up(
    settings: Settings, job_id: str, look: Callable[[RequestFile, Sequence[int], int], int | None]
) -> int | None:
    """Number that a look at a job's requests gives with the rows that no run has taken; None without the file.

    `status` asks no bucket, since its answer would take long, and none would come from one that is out of reach.
    """
    data = readings.data(settings)
    if place_of(data).in_bucket:
        return None
    untaken = readings.untaken(settings, job_id)
    if not untaken:  # removed meanwhile
        return None
    *returned, start = untaken
    try:
        requests = RequestFile(layout.requests_file(data, job_id))
        try:
            return look(requests, returned, start)
        finally:
            requests.close()
    except StoreError:
        return None
