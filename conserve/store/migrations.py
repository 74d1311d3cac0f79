"""Numbered migrations; a store remembers the last one it has seen.

A released migration is never edited: add the next one, and when it changes a table that an earlier one makes
from `schema`, freeze that table's old definition here first. A test compares what all of them make with `schema`.
"""

from collections.abc import Callable

from sqlalchemy import Connection, func, insert, inspect, select, update

from conserve.errors import StoreTooNew
from conserve.store import schema
from conserve.store.versions import LATEST, too_new


def m001_first_tables(tx: Connection) -> None:
    """Jobs, leases, requests, journal and shards."""
    schema.metadata.create_all(tx)


MIGRATIONS: list[Callable[[Connection], None]] = [m001_first_tables]
assert len(MIGRATIONS) == LATEST, "a new migration also moves LATEST"


def version(tx: Connection) -> int:
    """The number of the last migration applied; 0 for an empty database."""
    if not inspect(tx).has_table("meta"):
        return 0
    value = tx.scalar(select(schema.meta.c.value).where(schema.meta.c.key == "version"))
    return int(value or 0)


def migrate(tx: Connection) -> None:
    """Bring the store to the latest version, or raise `StoreTooNew` for one from the future."""
    lock(tx)
    current = version(tx)
    if current > LATEST:
        raise StoreTooNew(too_new(current))
    for number, apply in enumerate(MIGRATIONS[current:], start=current + 1):
        apply(tx)
        remember(tx, number)


def lock(tx: Connection) -> None:
    """Keep two processes from migrating one PostgreSQL database at once; SQLite's transaction is a lock."""
    if tx.dialect.name == "postgresql":
        tx.execute(select(func.pg_advisory_xact_lock(0x434F4E53)))


def remember(tx: Connection, number: int) -> None:
    """Record `number` as the last migration applied."""
    changed = tx.execute(
        update(schema.meta).where(schema.meta.c.key == "version").values(value=str(number))
    ).rowcount
    if not changed:
        tx.execute(insert(schema.meta).values(key="version", value=str(number)))
