"""Rows that could not be rendered at submit, which another attempt ends with the same error."""

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.errors import one_line
from conserve.store.files.objects import FilePath, source
from conserve.units import count


class Unrendered(NamedTuple):
    """A row of a job's requests that is no request."""

    row_index: int
    error: str


def unrendered(requests: FilePath, positions: Collection[int]) -> dict[int, Unrendered]:
    """Find the rows at these positions that could not be rendered; none if the requests cannot be read."""
    found: dict[int, Unrendered] = {}
    try:
        with pq.ParquetFile(source(requests)) as file:
            meta = file.metadata
            groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
            starts = [0, *accumulate(group.num_rows for group in groups)]
            payload = file.schema_arrow.names.index("payload")
            for number, group in enumerate(groups):
                statistics = group.column(payload).statistics
                if statistics is None or statistics.null_count != 0:
                    table = file.read_row_group(number, columns=["row_index", "payload", "error"])
                    found |= nulls(table, starts[number])
    except (OSError, pa.ArrowException, ValueError):
        return {}
    return {position: found[position] for position in sorted(found.keys() & set(positions))}


def nulls(table: pa.Table, first: int) -> dict[int, Unrendered]:
    """Rows without a payload, by their positions; the table begins at position `first`."""
    rows = zip(table["row_index"].to_pylist(), table["payload"], table["error"].to_pylist(), strict=True)
    return {
        position: Unrendered(row_index, error or "")
        for position, (row_index, payload, error) in enumerate(rows, start=first)
        if not payload.is_valid
    }


def stays_failed(job_id: str, stuck: Mapping[int, Unrendered]) -> str:
    """Sentence on rows that `retry` leaves as they are."""
    first = min(stuck.values())
    rows = count(len(stuck), "row")
    return (
        f"{job_id}: {rows} could not be rendered at submit and would fail again (row {first.row_index:,}: "
        f"{one_line(first.error)}); correct the prompt or the input and submit it again"
    )
