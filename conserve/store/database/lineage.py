"""Lineage: the ids that the databases at one place had, in HOME/stores.json.

A database that was emptied, replaced or restored from an older copy does not name all jobs whose folders are there.
The ids at its place tell its jobs from the jobs of another database over the same home, at another place.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Engine

from conserve.config import Settings
from conserve.errors import StoreError
from conserve.store.database.connection import address, masked
from conserve.store.files.layout import JOBS
from conserve.store.files.locks import alone
from conserve.store.files.os_errors import refuse_no_folder
from conserve.whole import write_whole

FILE = "stores.json"
STALE_AFTER_S = 3600.0


def place(home: Path, engine: Engine) -> str:
    """Place of a database: its path in the home, or its address."""
    path = engine.url.database
    if engine.dialect.name == "sqlite" and path and Path(path).is_relative_to(home):
        return str(Path(path).relative_to(home))
    return address(engine)


def ids(home: Path, at: str) -> list[str]:
    """Ids that databases at a place had, in the order in which they were first seen."""
    return listed(read(home), at)


def left(home: Path, at: str) -> list[str]:
    """Ids at a place, without those of databases that are at another place by now."""
    found = read(home)
    gone = {each for place in found if place != at for each in listed(found, place)[-1:]}
    return [one for one in listed(found, at) if one not in gone]


def elsewhere(home: Path) -> list[str]:
    """Addresses of databases outside of the home whose jobs' files it has."""
    found = read(home)
    return [at for at in found if "://" in at and listed(found, at)]


def require_store(settings: Settings) -> None:
    """Raise `StoreError` if nothing of a store is at the place of the settings, where a command would make one."""
    file, home = settings.sqlite_file, settings.home
    refuse_no_folder(home)
    try:
        if file is None or any(path.exists() for path in (file, home / FILE, home / JOBS)):
            return
    except OSError:  # a forbidden folder, of which whatever opens it tells
        return
    raise StoreError(
        f"there is no store in {settings.place}; check CONSERVE_HOME and CONSERVE_STORE (a first job makes one: "
        "conserve submit)"
    )


def listed(found: Mapping[str, object], at: str) -> list[str]:
    """Ids at a place, among the contents of the file."""
    known = found.get(at)
    return [str(each) for each in known] if isinstance(known, list) else []


def note(home: Path, at: str, store_id: str) -> None:
    """Add the id of the database at a place; if that cannot be written, the next command does it."""
    drop_scratch(home, now=time.time())
    if store_id in ids(home, at):
        return
    with suppress(OSError), alone(home):
        found = read(home)
        known = [one for one in listed(found, at) if one != store_id]
        write_whole(home / FILE, json.dumps({**found, at: [*known, store_id]}).encode())


def forget(home: Path, at: str, store_id: str) -> None:
    """Remove the id of a store that was moved: another store that is made at its place does not own its jobs."""
    with suppress(OSError), alone(home):
        found = read(home)
        known = listed(found, at)
        if store_id in known:
            others = [one for one in known if one != store_id]
            write_whole(home / FILE, json.dumps({**found, at: others}).encode())


def drop_scratch(home: Path, *, now: float) -> None:
    """Remove scratch files of processes that were killed while they wrote."""
    with suppress(OSError):
        for path in home.glob(f".{FILE}.*"):
            if path.stat().st_mtime < now - STALE_AFTER_S:
                path.unlink()


def read(home: Path) -> dict[str, object]:
    """Ids by place; none if the file is missing or damaged."""
    try:
        found = json.loads((home / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return {masked(at): known for at, known in found.items()} if isinstance(found, dict) else {}
