"""Rows of a query over a run's jobs."""

from collections.abc import Iterator, Sequence
from typing import Any

from conserve.api.queries import sql_query
from conserve.api.results import answered
from conserve.config import Settings


def rows_of(settings: Settings, select: str, job_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one SELECT over these jobs, as a child process computes them."""
    with answered(sql_query(settings, select, jobs=list(job_ids)), joins=False) as rows:
        for batch in rows.batches:
            yield from batch.to_pylist()
