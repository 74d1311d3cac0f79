"""A restore: a backup becomes the store of an empty home.

The database is filled under a mark that names the backup, so that no command takes it for a store until all files
are there. A restore that was killed goes on when it is run again. Leases of the backup end, because harvesters of
another time hold them, and epochs go on from the present, so that none of these harvesters can commit here.
"""

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, select

from conserve.config import Settings, sqlite_url
from conserve.errors import SettingsError, StoreDamaged, StoreError
from conserve.store.books import leases
from conserve.store.copying import contents, filling, manifest, move
from conserve.store.copying.backup import closing_engine
from conserve.store.copying.filling import Told
from conserve.store.copying.manifest import DATABASE, MANIFEST, Manifest
from conserve.store.database import counters, data, guard, half_made, lineage, schema
from conserve.store.database.connection import address, engine_of, transaction
from conserve.store.database.migrations import migrate
from conserve.store.database.moves import MoveMark, MoveState
from conserve.store.files import layout, os_errors
from conserve.store.files.place import place_of

SCRATCH = ".restore"  # in the home: the database of the backup, and the contents of an archive


def restore(settings: Settings, backup: Path, *, now: float, copy: bool, told: Told) -> Manifest:
    """Put a backup into an empty home and an empty database; returns its manifest."""
    where = settings.home
    if data.normal(where, settings.data) is not None:
        raise SettingsError(
            f"a backup is restored into CONSERVE_HOME, and CONSERVE_DATA is {settings.data}; leave that out, "
            "here and for the restored store"
        )
    with os_errors.explained(where):
        place_of(where).make_private()
        with scratch(where) as folder, unpacked(backup, folder) as source:
            made = manifest.read(source)
            with closing_engine(engine_of(settings.store_url)) as target:
                claim(target, where, made, backup)
                put_files(source, where, copy=copy or source.parent == folder)
                fill(source / DATABASE, folder / DATABASE, target, told)
                half_made.forget(settings.sqlite_file)
                finish(target, now)
                lineage.note(where, lineage.place(where, target), made.store_id)
    return made


@contextmanager
def scratch(where: Path) -> Iterator[Path]:
    """Yield an empty folder in the home, which goes at the end."""
    folder = where / SCRATCH
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def unpacked(backup: Path, folder: Path) -> Iterator[Path]:
    """Yield the folder of a backup; an archive is unpacked into the scratch folder."""
    if not backup.exists():
        raise SettingsError(f"there is no backup {backup}")
    if backup.is_dir():
        yield backup
        return
    into = folder / "backup"
    try:
        with tarfile.open(backup) as archive:
            archive.extractall(into, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise StoreDamaged(f"the archive {backup} is damaged ({error}); name another backup") from error
    yield into


def claim(target: Engine, where: Path, made: Manifest, backup: Path) -> None:
    """Mark the target as being filled from this backup; raises `SettingsError` unless it and the home are empty."""
    mark = MoveMark(id=made.id, state=MoveState.ARRIVING, other=str(backup), store_id=made.store_id)

    def require(tx: Connection) -> None:
        if any(layout.jobs_folder(where).glob("[!.]*")):
            raise SettingsError(f"{where} has jobs; set CONSERVE_HOME to an empty folder")
        there = guard.mark_of(tx)
        if guard.tables(tx) and (not guard.is_store(tx) or there is not None or move.rows_in(tx)):
            raise SettingsError(f"{address(target)} is not empty; set CONSERVE_STORE to an empty database")

    filling.begin(target, mark, require)


def put_files(source: Path, where: Path, *, copy: bool) -> None:
    """Copy or link the files of a backup into the home."""
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    wanted = [name for name in names if name not in (DATABASE, MANIFEST)]
    if missing := contents.take(wanted, source, where, copy=copy):
        raise StoreError(f"{source / missing[0]} went while it was read; run this again")
    contents.sync_all(where)


def fill(path: Path, scratch: Path, target: Engine, told: Told) -> None:
    """Fill the target from the database of a backup, which is brought up to date in a copy, and compare."""
    shutil.copyfile(path, scratch)
    with closing_engine(engine_of(sqlite_url(scratch))) as engine, transaction(engine) as source:
        migrate(source)
        filling.fill(source, target, told)
        with transaction(target) as tx:
            filling.end(source, tx)


def finish(target: Engine, now: float) -> None:
    """End the leases of the backup, start epochs anew and open the store."""
    with transaction(target) as tx:
        leases.end(tx, list(tx.scalars(select(schema.lease.c.epoch))))
        counters.never_again(tx, now=now)
        guard.put_mark(tx, None)
