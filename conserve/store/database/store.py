"""An open store: its folder, the place of its files, and its database."""

import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from conserve.config import Settings, is_backup, refuse_backup
from conserve.errors import StoreError
from conserve.store.database import data, half_made, lineage
from conserve.store.database.connection import (
    AFRESH,
    closed_on_error,
    connect,
    connect_to_copy,
    connect_to_read,
    transaction,
)
from conserve.store.database.migrations import store_id
from conserve.store.files.objects import FilePath
from conserve.store.files.os_errors import explained
from conserve.store.files.place import place_of

WORK = 0x434F4E53  # first half of the advisory locks of pieces of work
LOOK_S = 0.1  # between two tries to take one

Transaction: TypeAlias = Connection
"""An open transaction, by the name that rooms have for it which do not see SQLAlchemy."""


@dataclass(frozen=True, slots=True)
class Store:
    """An open store; pass `tx` from `write()` or `read()` to the functions of this package."""

    home: Path
    engine: Engine
    id: str
    """Made with the database; the mark of each job's folder carries it."""
    data: FilePath
    """Place of the jobs' files: `home`, another folder, or a bucket. Paths in the database are relative to it."""

    @classmethod
    def open(cls, settings: Settings) -> "Store":
        """Open the store that the settings name; make it if it is not there. Raises for a backup."""
        half_made.refuse(settings.sqlite_file)
        store = cls.opened(settings)
        refuse_half_made(store.engine, settings.sqlite_file)
        store.note_id()
        return store

    @classmethod
    def opened(cls, settings: Settings) -> "Store":
        """Open or make the store as `open` does, also one that is half made; its id is not noted."""
        refuse_backup(settings.home)
        with explained(settings.home):
            place_of(settings.home).make_private()
        engine = connect(settings.store_url)
        with closed_on_error(engine):
            store = cls.over(settings.home, engine, settings.data)
            if settings.data is not None:
                store.keep_place(settings.data)
        return store

    @classmethod
    def open_to_read(cls, settings: Settings) -> "Store":
        """Open the store for `read` alone, which works where nothing can be written."""
        half_made.refuse(settings.sqlite_file)
        engine = connect_to_read(settings.store_url)
        if engine is None and is_backup(settings.home) and settings.sqlite_file is not None:
            engine = connect_to_copy(settings.store_url)
        if engine is None:
            return cls.open(settings)
        refuse_half_made(engine, settings.sqlite_file)
        with closed_on_error(engine):
            return cls.over(settings.home, engine, settings.data)

    @classmethod
    def over(cls, home: Path, engine: Engine, place: str | None = None) -> "Store":
        """Store in `home` over an open database; `place` is that of its files, if the settings name one."""
        with transaction(engine, read_only=True) as tx:
            found = store_id(tx)
            return cls(home, engine, found, data.root_of(home, data.settled(tx, home, place), found))

    def note_id(self) -> None:
        """Note the store's id as one of a database at its place."""
        lineage.note(self.home, self.place, self.id)

    def keep_place(self, place: str) -> None:
        """Let the database name the place of the files, unless it does."""
        with self.read() as tx:
            if data.is_same(data.settled(tx, self.home, place), data.recorded(tx)):
                return
        with explained(self.data):
            place_of(self.data).make_private()
        with self.write() as tx:
            data.record(tx, data.settled(tx, self.home, place))

    def check_place(self, tx: Connection) -> None:
        """Raise if the database names another place by now: another process gave the new store one."""
        if not data.is_same(data.recorded(tx), data.text_of(self.home, self.data)):
            raise StoreError(
                "another process chose the place of this new store's files; run the command again"
            )

    @property
    def in_bucket(self) -> bool:
        """True if the files lie in a bucket."""
        return place_of(self.data).in_bucket

    @property
    def local(self) -> Path:
        """Folder of this machine in which files are made: beside the others, or the home if these are objects."""
        return self.data if isinstance(self.data, Path) else self.home

    @property
    def place(self) -> str:
        """Place of the database, as `lineage` names it."""
        return lineage.place(self.home, self.engine)

    def write(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that may write; on SQLite it is the only one."""
        return transaction(self.engine)

    def read(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that sees one moment and changes nothing."""
        return transaction(self.engine, read_only=True)

    @contextmanager
    def alone(self, work: str, *, wait: bool = False) -> Iterator[bool]:
        """Keep other processes from a piece of work; yields False if one is at it, unless the caller is to `wait`.

        SQLite keeps none from it: there two processes that do the same are rare, and harmless. On PostgreSQL the
        transaction that waits for the lock or holds it has no snapshot meanwhile. One would keep deleted rows of
        all tables from being cleared.
        """
        if self.engine.dialect.name != "postgresql":
            yield True
            return
        # Parameters or a prepared statement would leave a portal, and that a snapshot, until the next statement.
        lock = f"select pg_try_advisory_xact_lock({WORK}, {zlib.crc32(work.encode()) - 2**31})"
        with self.write() as tx:
            while not (alone := tx.exec_driver_sql(lock, execution_options={AFRESH: True}).scalar()) and wait:
                time.sleep(LOOK_S)
            yield bool(alone)

    def close(self) -> None:
        """Close the database connections."""
        self.engine.dispose()


def refuse_half_made(engine: Engine, path: Path | None) -> None:
    """Have new connections refuse the database while it is made anew, as of a process that waits out its damage."""

    def look(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        try:
            half_made.refuse(path)
        except StoreError:
            connection.close()
            raise

    if path is not None:
        event.listen(engine, "connect", look, insert=True)
