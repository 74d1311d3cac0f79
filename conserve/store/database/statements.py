"""Compiled statements, which all engines of this process share.

SQLAlchemy keeps them for each engine alone. Compiling those of a command takes longer than running them on a small
store, and a program that looks at a job now and then opens the store each time.
"""

from typing import Any

from sqlalchemy.util import LRUCache

Key = tuple[Any, ...]
"""The dialect of an engine, and the rest of what SQLAlchemy tells statements apart by."""


class Statements(LRUCache[Key, Any]):
    """Statements that were compiled for any engine of the same kind of database, driver and version."""

    def get(self, key: Key, default: Any = None) -> Any:
        return super().get(of_any_engine(key), default)

    def __setitem__(self, key: Key, compiled: Any) -> None:
        super().__setitem__(of_any_engine(key), compiled)


def of_any_engine(key: Key) -> Key:
    """Key of a statement with what its engine's dialect is in place of that dialect."""
    dialect, *rest = key
    return dialect.name, dialect.driver, dialect.server_version_info, *rest


STATEMENTS = Statements(capacity=500)
