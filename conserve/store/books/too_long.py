"""Failed rows that did not fit the model's context, which `retry` puts back and another attempt rejects."""

from collections.abc import Iterable, Sequence

import pyarrow.parquet as pq
from sqlalchemy import Connection, select

from conserve.store.books.results import decode
from conserve.store.database import schema
from conserve.store.database.bulk import read_rows
from conserve.store.files.objects import FilePath, source
from conserve.units import count

journal = schema.journal
TOO_LONG = "too_long"  # their error type


def too_long(tx: Connection, job_id: str, shards: Iterable[FilePath]) -> list[int]:
    """Row indexes of such rows of a job, in the journal and in these shards of failed rows."""
    failed = select(journal.c.payload).where(journal.c.job_id == job_id, journal.c.failed == True)  # noqa: E712
    results = (decode(row.payload) for row in read_rows(tx, failed))
    found = [result.row_index for result in results if result.error_type == TOO_LONG]
    for path in shards:
        of_type = [("error_type", "=", TOO_LONG)]
        found += pq.read_table(source(path), columns=["row_index"], filters=of_type)["row_index"].to_pylist()
    return found


def fails_again(job_id: str, row_indexes: Sequence[int]) -> str:
    """Sentence on such rows that go back into the queue."""
    rows = count(len(row_indexes), "row was", "rows were")
    they = "it" if len(row_indexes) == 1 else "they"
    return (
        f"{job_id}: {rows} too long for the model's context (row {min(row_indexes):,}), and {they} will fail "
        "again unless the next run's context is longer"
    )


def helps_too_long(job_id: str) -> str:
    """Sentence on what helps such a row."""
    return (
        f"the row fails again unless the context is longer: conserve retry {job_id}, then conserve run with a "
        "model of a longer context, or a larger --max-model-len behind --; or shorten the row and submit it anew"
    )
