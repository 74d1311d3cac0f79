"""A trial of the store's database: a row that is written and removed, and the clock of its server."""

import uuid

from sqlalchemy import Connection, delete, insert, text

from conserve.store.database.schema import meta


def write_and_remove(tx: Connection) -> None:
    """Write a row and remove it again; an update that changes nothing would not reach the disk."""
    key = f"trial-{uuid.uuid4().hex}"
    tx.execute(insert(meta).values(key=key, value=""))
    tx.execute(delete(meta).where(meta.c.key == key))


def server_time_s(tx: Connection) -> float | None:
    """The database server's time, in seconds since 1970; None for SQLite, which has no server."""
    if tx.dialect.name != "postgresql":
        return None
    return float(tx.execute(text("select extract(epoch from clock_timestamp())")).scalar_one())
