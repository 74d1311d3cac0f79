"""An open store: its folder and its database."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine

from conserve.config import Settings
from conserve.store.database import connect, transaction
from conserve.store.home import explained


@dataclass(frozen=True, slots=True)
class Store:
    """Pass `tx` from `write()` or `read()` to the functions of this package."""

    home: Path
    engine: Engine

    @classmethod
    def open(cls, settings: Settings) -> "Store":
        """Open the store that the settings name; make it if it is not there."""
        with explained(settings.home):
            settings.home.mkdir(parents=True, exist_ok=True)
        return cls(settings.home, connect(settings.store_url))

    def write(self) -> AbstractContextManager[Connection]:
        """A transaction that may change things; on SQLite it is alone."""
        return transaction(self.engine)

    def read(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one moment and changes nothing."""
        return transaction(self.engine, read_only=True)

    def close(self) -> None:
        """Give the database connections back."""
        self.engine.dispose()
