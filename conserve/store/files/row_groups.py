"""Batches of rows put together until they are enough for a write. Pure."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def grouped(batches: "Iterable[pa.RecordBatch]", *, rows: int, size: int) -> "Iterator[list[pa.RecordBatch]]":
    """Yield batches in groups of so many rows or bytes, whichever comes first; the last one has what is left."""
    group: list[pa.RecordBatch] = []
    group_rows = group_bytes = 0
    for batch in batches:
        group.append(batch)
        group_rows += batch.num_rows
        group_bytes += batch.nbytes
        if group_rows >= rows or group_bytes >= size:
            yield group
            group, group_rows, group_bytes = [], 0, 0
    if group:
        yield group
