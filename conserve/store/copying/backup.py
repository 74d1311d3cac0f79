"""A backup: a folder that is a home, with the database as one SQLite file, made while the store is in use.

The database is copied first, as it is at one moment: SQLite by its backup API, other databases by one repeatable
read into a new SQLite file. Then the files that the copy names are linked or copied. A file that went meanwhile,
because `retry` or `rm` took it, is not named by a copy that is made now. So the database is copied again until all
files are there. The folder gets its name at the end.
"""

import errno
import fcntl
import os
import shutil
import sqlite3
import tarfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from conserve import __version__
from conserve.config import sqlite_url
from conserve.errors import SettingsError, StoreInUse
from conserve.store.copying import contents, filling, manifest, tables
from conserve.store.copying.manifest import DATABASE, MANIFEST, Manifest
from conserve.store.database import guard
from conserve.store.database.connection import (
    NO_ROOM,
    address,
    code,
    engine_of,
    explain_driver,
    transaction,
)
from conserve.store.database.moves import MoveMark, MoveState
from conserve.store.database.reader import reader
from conserve.store.database.store import Store
from conserve.store.files import digests, nights, os_errors
from conserve.whole import sync

LOOKS = 5  # at the database, if files go meanwhile
TIMEOUT_S = 60.0
ARCHIVES = (".tar",)
PACKED = (".tgz", ".gz", ".zst", ".bz2", ".xz", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A database that was copied, the files it names, and those of them that are not there."""

    names: frozenset[str]
    missing: tuple[str, ...]


def backup(store: Store, to: Path, *, now: float, copy: bool, say: Callable[[str], None]) -> Manifest:
    """Make a backup as a folder, or as an archive if the name ends in `.tar`; returns its manifest."""
    archived = to.suffix in ARCHIVES
    require_new(to)
    if store.data != store.home:
        raise SettingsError(
            f"the files of this store lie in {store.data}, which a backup does not take; copy them by their own "
            "means, and the database by its own"
        )
    with os_errors.explained(to.parent), explained_sqlite(store, to.parent), scratch_folder(to) as folder:
        taken = take(store, folder, copy=copy, say=say)
        made = describe(store, folder, taken, now)
        contents.write_json(folder / MANIFEST, manifest.to_json(made))
        protect(store, folder)
        contents.sync_all(folder)
        if archived:
            archive(folder, to)
        else:
            folder.rename(to)
        sync(to.parent)
    return made


@contextmanager
def explained_sqlite(store: Store, where: Path) -> Iterator[None]:
    """Turn errors of SQLite's own API, which copies the database, into store errors."""
    try:
        yield
    except sqlite3.Error as error:
        if code(error).startswith(NO_ROOM):
            raise os_errors.no_space(where) from error
        raise explain_driver(error, address(store.engine)) from error


def protect(store: Store, folder: Path) -> None:
    """Give a backup's folder and database the modes of the store's, so that the same users may read both."""
    source = database_file(store)
    (folder / DATABASE).chmod(mode_of(source) if source else 0o600)
    folder.chmod(mode_of(store.home))


def mode_of(path: Path) -> int:
    """Permissions of a file or a folder."""
    return path.stat().st_mode & 0o777


def require_new(to: Path) -> None:
    """Raise `SettingsError` if the name is taken or that of a packed archive, or its folder is missing."""
    if to.suffix in PACKED:
        raise SettingsError(
            f"{to} would be packed, and a backup is a folder or a .tar; write a .tar, and pack it afterwards"
        )
    if to.exists() and (to.is_file() or any(to.iterdir())):
        raise SettingsError(f"{to} is there already; name a new folder or a new file")
    if not to.parent.is_dir():
        raise SettingsError(f"there is no folder {to.parent}; make it, or name another")


@contextmanager
def scratch_folder(to: Path) -> Iterator[Path]:
    """Yield an empty folder beside the backup, held by this process; removed unless it was renamed."""
    folder = to.parent / f".{to.name}.partial"
    held = own_folder(folder)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreInUse(f"another backup writes {to} now", step="name another folder") from error
        for path in folder.iterdir():  # of a backup that was killed
            remove(path)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def own_folder(folder: Path) -> int:
    """Make a folder, or take one that a backup of this user's left; returns its descriptor.

    Others may write beside the backup: a link to another folder would have that one emptied.
    """
    try:
        folder.mkdir(mode=0o700)
        made = True
    except FileExistsError:
        made = False
    in_the_way = SettingsError(
        f"{folder} is in the way: it is not a folder of this user's; remove it, or name another folder"
    )
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise in_the_way from error
        raise
    if made:  # whoever owns it: NFS and CIFS may map owners
        return held
    if os.fstat(held).st_uid != os.geteuid():
        os.close(held)
        raise in_the_way
    os.fchmod(held, 0o700)
    return held


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def take(store: Store, folder: Path, *, copy: bool, say: Callable[[str], None]) -> Taken:
    """Copy the database and take the files it names, again until all of them are there."""
    before: list[str] | None = None
    for _ in range(LOOKS):
        copy_database(store, folder / DATABASE)
        names, users = read_names(store, folder / DATABASE)
        missing = contents.take(sorted(names), store.home, folder, copy=copy, users=users)
        if not missing or missing == before:
            break
        before = missing
        say(f"{len(missing):,} files went meanwhile; the database is copied again")
    names -= set(missing)
    names |= take_beside(store.home, folder, copy=copy)
    contents.drop_others(folder, {DATABASE, *names})
    return Taken(names=frozenset(names), missing=tuple(missing))


def take_beside(source: Path, folder: Path, *, copy: bool) -> set[str]:
    """Take the files that no database names; what went meanwhile is no loss: an evaluation removes its old runs.

    Records of runs come first, since the files that a record names were there before it. A record goes with them.
    A run that begins after that is left out as a whole.
    """
    records = {name for name in contents.beside(source) if Path(name).name == nights.RECORD}
    contents.take(records, source, folder, copy=copy)
    listed = set(contents.beside(source))
    begun = {Path(name).parent for name in listed - records if Path(name).name == nights.RECORD}
    listed = {name for name in listed if Path(name).parent not in begun}
    gone = set(contents.take(listed, source, folder, copy=copy))
    lost = {str(Path(name).with_name(nights.RECORD)) for name in gone}
    return listed - gone - lost


def read_names(store: Store, path: Path) -> tuple[set[str], set[str]]:
    """Files that a copy of the database names, and those of them that are a user's too."""
    with closing_engine(engine_of(sqlite_url(path))) as engine, transaction(engine) as tx:
        return set(contents.named(tx, store.home)), set(contents.linked(tx, store.home))


@contextmanager
def closing_engine(engine: Engine) -> Iterator[Engine]:
    """Close the connections of an engine at the end."""
    try:
        yield engine
    finally:
        engine.dispose()


def copy_database(store: Store, path: Path) -> None:
    """Copy the database as it is at one moment to an SQLite file, in place of an earlier copy."""
    if source := database_file(store):
        copy_sqlite(source, path)
    else:
        export(store, path)


def database_file(store: Store) -> Path | None:
    """File of the database; None if that is not SQLite."""
    source = store.engine.url.database
    return Path(source) if store.engine.dialect.name == "sqlite" and source else None


def copy_sqlite(source: Path, path: Path) -> None:
    """Copy an SQLite database by its backup API in one step, which holds up no writer of a write-ahead log."""
    with closing(reader(source, timeout_s=TIMEOUT_S)) as read, closing(sqlite3.connect(path)) as written:
        read.backup(written)


def export(store: Store, path: Path) -> None:
    """Copy another database by one repeatable read, and compare."""
    mark = MoveMark(
        id=uuid.uuid4().hex,
        state=MoveState.ARRIVING,
        other=address(store.engine),
        store_id=store.id,
    )
    with closing_engine(engine_of(sqlite_url(path))) as engine:
        filling.begin(engine, mark)
        with store.read() as source:
            filling.fill(source, engine, lambda name, rows: None)
            with transaction(engine) as tx:
                filling.end(source, tx)
                guard.put_mark(tx, None)


def whole(path: Path) -> None:
    """Bring a database into one file without a log beside it, flushed."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma journal_mode = delete")
    sync(path)


def describe(store: Store, folder: Path, taken: Taken, now: float) -> Manifest:
    """Manifest of a backup whose files are all there."""
    with closing_engine(engine_of(sqlite_url(folder / DATABASE))) as engine, transaction(engine) as tx:
        rows = {name: found.rows for name, found in tables.digests(tx).items()}
    whole(folder / DATABASE)
    return Manifest(
        id=uuid.uuid4().hex,
        store_id=store.id,
        version=__version__,
        made_at=now,
        source=address(store.engine),
        database=digests.seal(folder / DATABASE),
        tables=rows,
        files=len(taken.names),
        file_bytes=contents.size_of(folder, taken.names),
        missing=taken.missing,
    )


def archive(folder: Path, to: Path) -> None:
    """Write a folder as an archive; the files in it are compressed already."""
    scratch = to.parent / f".{to.name}.tar-partial"
    try:
        scratch.unlink(missing_ok=True)  # of a backup that was killed; a link in its place is not followed
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
        with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as written:
            os.fchmod(descriptor, mode_of(folder) & mode_of(folder / DATABASE) & 0o666)
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    written.add(path, arcname=str(path.relative_to(folder)))
        sync(scratch)
        scratch.replace(to)
    finally:
        with suppress(OSError):
            scratch.unlink()
