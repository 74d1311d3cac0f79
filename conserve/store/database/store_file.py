"""The file of an SQLite store, which may be deleted or replaced while connections are open."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from conserve.errors import StoreError
from conserve.store.database.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFile:
    """The SQLite file behind the store's connections. (Other databases report that they are gone.)

    A connection to a file that was deleted or replaced goes on working, but what it writes is lost.
    """

    path: Path
    inode: int

    @classmethod
    def of(cls, store: Store) -> Self | None:
        """The store's file as it is now, None if not SQLite; raises `StoreError` if it is gone."""
        url = store.engine.url
        if url.get_backend_name() != "sqlite" or not url.database:
            return None
        path = Path(url.database)
        return cls(path=path, inode=inode(path))

    def check(self) -> None:
        """Raise `StoreError` if the file is not there any more, or is another one."""
        if inode(self.path) != self.inode:
            raise StoreError(f"{self.path} was replaced by another file")


def inode(path: Path) -> int:
    """Inode of a file, which tells it from another one of its name; raises `StoreError` if it is gone."""
    try:
        return path.stat().st_ino
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}; check CONSERVE_HOME") from error
