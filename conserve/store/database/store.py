"""An open store: its folder and its database."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine

from conserve.config import Settings
from conserve.store.database import lineage
from conserve.store.database.connection import connect, connect_to_read, transaction
from conserve.store.database.migrations import store_id
from conserve.store.files.home import explained, make_with_parents


@dataclass(frozen=True, slots=True)
class Store:
    """An open store; pass `tx` from `write()` or `read()` to the functions of this package."""

    home: Path
    engine: Engine
    id: str
    """Made with the database; the mark of each job's folder carries it."""

    @classmethod
    def open(cls, settings: Settings) -> "Store":
        """Open the store that the settings name; make it if it is not there."""
        with explained(settings.home):
            make_with_parents(settings.home)
        store = cls.over(settings.home, connect(settings.store_url))
        lineage.note(store.home, store.place, store.id)
        return store

    @classmethod
    def open_to_read(cls, settings: Settings) -> "Store":
        """Open the store for `read` alone, which works where nothing can be written."""
        engine = connect_to_read(settings.store_url)
        return cls.open(settings) if engine is None else cls.over(settings.home, engine)

    @classmethod
    def over(cls, home: Path, engine: Engine) -> "Store":
        """Store in `home` over an open database."""
        with transaction(engine, read_only=True) as tx:
            return cls(home, engine, store_id(tx))

    @property
    def place(self) -> str:
        """Place of the database, as `lineage` names it."""
        return lineage.place(self.home, self.engine)

    def write(self) -> AbstractContextManager[Connection]:
        """Begin a transaction that may write; on SQLite it is the only one."""
        return transaction(self.engine)

    def read(self) -> AbstractContextManager[Connection]:
        """Begin a transaction that sees one moment and changes nothing."""
        return transaction(self.engine, read_only=True)

    def close(self) -> None:
        """Close the database connections."""
        self.engine.dispose()
