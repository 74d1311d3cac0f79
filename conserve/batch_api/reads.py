"""Small reads of the store for requests that come often: in the event loop where they cannot wait."""

from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from conserve.store.database.plain import PlainReader, Row
from conserve.store.database.store import Store


class Reads:
    """Plain statements over a store, for one event loop."""

    def __init__(self, store: Store) -> None:
        self._reader = PlainReader(store)
        self.close = self._reader.close

    async def rows(self, sql: str, parameters: Mapping[str, Any]) -> list[Row]:
        """Rows of a statement; raises `StoreError`."""
        found = self._reader.at_once(sql, parameters)
        return await run_in_threadpool(self._reader.read, sql, parameters) if found is None else found
