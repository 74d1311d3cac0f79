"""Plain statements that read, for what is asked many times a second: on SQLite without SQLAlchemy (docs/adr/0031).

SQLAlchemy takes twenty times as long around a statement as SQLite takes to answer it.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import text

from conserve.store.database.reader import reader
from conserve.store.database.store import Store

Row = tuple[Any, ...]


class PlainReader:
    """Reads an open store, each statement by itself; an SQLite store on one connection that stays open."""

    def __init__(self, store: Store) -> None:
        self._store = store
        url = store.engine.url
        self._path = Path(url.database or "") if url.get_backend_name() == "sqlite" else None
        self._connection: sqlite3.Connection | None = None

    def at_once(self, sql: str, parameters: Mapping[str, Any]) -> list[Row] | None:
        """Rows, by a thread that must not wait; None if they are to be read by `read`, in another thread.

        A reader of SQLite's write-ahead log waits for no writer. Call this from one thread alone.
        """
        if self._path is None:
            return None
        try:
            if self._connection is None:
                self._connection = reader(self._path, timeout_s=0)
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error:
            return None

    def read(self, sql: str, parameters: Mapping[str, Any]) -> list[Row]:
        """Rows, for which the caller may have to wait; raises `StoreError`."""
        with self._store.read() as tx:
            return [tuple(row) for row in tx.execute(text(sql), dict(parameters))]

    def close(self) -> None:
        """Close the connection; the next statement opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
