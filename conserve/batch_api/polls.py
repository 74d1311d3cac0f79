"""Polls: one batch, read by one statement, and encoded again only when it has changed (docs/adr/0031)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from conserve.batch_api import objects
from conserve.batch_api.foresight import Foresight
from conserve.batch_api.reads import Reads
from conserve.batch_api.refusals import Refused
from conserve.store.books import batches
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import BatchRecord
from conserve.store.database.plain import Row

MOST_KEPT = 1024


class Polled(NamedTuple):
    """A batch as its last poll found it, and the answer."""

    row: Row
    batch: BatchRecord
    forecast: Mapping[str, Any] | None
    body: bytes


class Polls:
    """Answers to polls. Each reads the store: no answer is older than its request."""

    def __init__(self, reads: Reads, foresight: Foresight) -> None:
        self._reads, self._foresight = reads, foresight
        self._kept: dict[tuple[str, str], Polled] = {}

    async def of(self, project: str, name: str) -> Polled:
        """The batch of this project with this id; raises `Refused` if there is none, and `StoreError`."""
        rows = await self._reads.rows(batches.POLLED, {"project": project, "id": name})
        kept = self._kept.pop((project, name), None)
        if not rows:
            raise Refused.missing("batch", name)
        batch = kept.batch if kept is not None and kept.row == rows[0] else batches.of_polled(rows[0])
        forecast = await self._forecast(batch)
        if kept is None or kept.batch is not batch or kept.forecast != forecast:
            body = bytes(JSONResponse(objects.batch_object(batch, forecast)).body)
            kept = Polled(rows[0], batch, forecast, body)
        if len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]  # polled the longest ago
        self._kept[project, name] = kept
        return kept

    async def _forecast(self, batch: BatchRecord) -> Mapping[str, Any] | None:
        """Forecast of a batch in progress, by a look at the queue that is at most a minute old."""
        if batch.state is not BatchState.IN_PROGRESS:
            return None
        return (await self._foresight.shared()).document(batch.job_id)
