"""Files of the Batch API: uploads of clients, and the answers and errors of batches.

A file is written under a scratch name, flushed and renamed, and then the database names it. A crash between the two
leaves a file that no record names, which `sweep_uploads` takes.
"""

import secrets
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, insert, not_, or_, select, update

from conserve.errors import StoreUnreachable
from conserve.store.books.lateness import has_passed
from conserve.store.books.mounted import require_folders
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import os_errors, trash
from conserve.store.files.objects import FilePath, below
from conserve.store.files.place import place_of

file, batch = schema.file, schema.batch

UPLOADS = "uploads"
DELIVERIES = "deliveries"  # within a job's folder
STALE_AFTER_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A row of the table `file`."""

    seq: int
    id: str
    project: str
    purpose: str  # "batch" or "batch_output"
    filename: str
    bytes: int
    num_lines: int
    digest: str
    path: str  # relative to the place of the store's files
    created_at: float
    expires_at: float | None
    job_id: str | None
    idempotency_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that lies at its place and has no record yet."""

    purpose: str
    filename: str
    bytes: int
    num_lines: int
    digest: str
    path: str
    expires_at: float | None = None
    job_id: str | None = None
    idempotency_key: str | None = None


def new_file_id() -> str:
    """Id of a file, which cannot be guessed: 128 random bits."""
    return f"file-{secrets.token_hex(16)}"


def folder(store: Store) -> FilePath:
    """Folder of this store's uploads; another store may share the home."""
    return store.data / UPLOADS / store.id


def make_folder(store: Store) -> FilePath:
    """The folder of uploads, which is made if it is missing."""
    with store.read() as tx:
        require_folders(tx, store.data)
    with os_errors.explained(store.data):
        place_of(folder(store)).make_with_parents()
    return folder(store)


def add(tx: Connection, project: str, file_id: str, new: NewFile, *, now: float) -> None:
    """Record a file."""
    values = {name: getattr(new, name) for name in NewFile.__slots__}
    tx.execute(insert(file).values(id=file_id, project=project, created_at=now, **values))


def get(tx: Connection, project: str, file_id: str, *, now: float) -> File | None:
    """The file of this project with this id; None if the project has none, or it has expired."""
    found = select(file).where(file.c.id == file_id, file.c.project == project, is_current(tx, now))
    row = tx.execute(found).one_or_none()
    return None if row is None else File(**row._mapping)


def of_idempotency_key(tx: Connection, project: str, key: str, *, now: float) -> File | None:
    """The file that an earlier request with this key uploaded; None if there was none, or it has expired."""
    found = select(file).where(file.c.project == project, file.c.idempotency_key == key, is_current(tx, now))
    row = tx.execute(found).one_or_none()
    return None if row is None else File(**row._mapping)


def free_idempotency_key(tx: Connection, project: str, key: str, *, now: float) -> None:
    """Take the key from a file that has expired and is still to be removed."""
    mine = file.c.project == project, file.c.idempotency_key == key
    tx.execute(update(file).where(*mine, not_(is_current(tx, now))).values(idempotency_key=None))


def page(
    tx: Connection,
    project: str,
    *,
    now: float,
    limit: int,
    purpose: str | None = None,
    beyond: int | None = None,
    oldest_first: bool = False,
) -> list[File]:
    """Files of a project in one order, from behind the file of the number `beyond`."""
    found = select(file).where(file.c.project == project, is_current(tx, now)).limit(limit)
    if purpose is not None:
        found = found.where(file.c.purpose == purpose)
    if beyond is not None:
        found = found.where(file.c.seq > beyond if oldest_first else file.c.seq < beyond)
    order = file.c.seq if oldest_first else file.c.seq.desc()
    return [File(**row._mapping) for row in tx.execute(found.order_by(order))]


def is_current(tx: Connection, now: float) -> ColumnElement[bool]:
    """Condition that a file has not expired."""
    return or_(file.c.expires_at.is_(None), not_(has_passed(tx.dialect.name, file.c.expires_at, now)))


def forget_deliveries(tx: Connection, job_id: str) -> list[str]:
    """Forget the files that an earlier delivery of a job made; returns their paths."""
    paths = list(tx.scalars(select(file.c.path).where(file.c.job_id == job_id)))
    tx.execute(delete(file).where(file.c.job_id == job_id))
    return paths


def remove(store: Store, found: File) -> None:
    """Forget a file, then delete it."""
    with store.write() as tx:
        tx.execute(delete(file).where(file.c.id == found.id))
    with suppress(OSError, StoreUnreachable):
        (store.data / found.path).unlink()


def remove_expired(store: Store, *, now: float) -> int:
    """Remove the files whose time is over; returns how many."""
    with store.read() as tx:
        expired = select(file).where(has_passed(tx.dialect.name, file.c.expires_at, now))
        found = [File(**row._mapping) for row in tx.execute(expired)]
    for one in found:
        remove(store, one)
    return len(found)


def sweep_uploads(store: Store, *, now: float) -> int:
    """Throw away uploads of a day ago and more that the database does not name; returns how many.

    A database that was rebuilt, or restored from a copy, may have forgotten them. Ages of objects are by
    the clock of their bucket.
    """
    now -= place_of(store.data).ahead_s()
    with store.read() as tx:
        known = set(tx.scalars(select(file.c.path)))
    swept = 0
    for path, modified_at in place_of(folder(store)).changes():
        with suppress(OSError):
            if modified_at < now - STALE_AFTER_S and below(path, store.data) not in known:
                trash.throw_away(store.data, path, now=now)
                swept += 1
    return swept
