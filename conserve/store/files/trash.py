"""The trash: files of a store are moved there and deleted a week later.

DATA/trash/<seconds since the epoch>-<random>/<the file's path in the folder or bucket of data>
"""

import os
import shlex
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

from conserve.store.files.objects import FilePath, ObjectPath

TRASH = "trash"
KEEP_S = 7 * 86_400.0

P = TypeVar("P", bound=FilePath)


def folder(data: P) -> P:
    """Folder of the trash."""
    return cast("P", data / TRASH)


def throw_away(data: P, path: P, *, now: float, lay_at: P | None = None) -> P:
    """Move a file or a folder into the trash; returns its path there.

    `lay_at` is where a folder on disk lay before it was renamed, if it was.
    """
    thrown = folder(data) / f"{max(0, int(now))}-{uuid.uuid4().hex[:8]}"
    if isinstance(path, ObjectPath):
        assert isinstance(data, ObjectPath)
        there = thrown / path.relative_to(data)
        assert isinstance(there, ObjectPath)
        throw_objects(path, there)
        return cast("P", there)
    kept = Path(str(thrown)) / Path(str(lay_at or path)).relative_to(str(data))
    kept.parent.mkdir(parents=True)
    try:
        shutil.move(path, kept)  # not by renaming alone: the jobs may be on a disk of their own
    except OSError:
        with suppress(OSError):  # half of a copy stays
            os.removedirs(kept.parent)
        raise
    return cast("P", kept)


def throw_objects(path: ObjectPath, there: ObjectPath) -> None:
    """Move an object, or all below a path; each is deleted once its copy is there."""
    if path.is_file():
        path.copy_to(there)
        path.unlink()
        return
    for entry in path.entries():
        entry.path.copy_to(there / entry.path.relative_to(path))
        entry.path.unlink(missing_ok=True)
    path.remove_tree()  # what object storage keeps of a folder


def empty(data: FilePath, *, now: float, older_than_s: float = KEEP_S) -> int:
    """Delete entries that came into the trash `older_than_s` seconds ago or earlier; returns the bytes freed."""
    return sum(deleted(thrown) for thrown in contents(data) if thrown_at(thrown) <= now - older_than_s)


def deleted(thrown: FilePath) -> int:
    """Delete an entry, or what of it can be deleted; returns the bytes freed."""
    used = size(thrown)
    if isinstance(thrown, ObjectPath):
        thrown.remove_tree()
        return used
    shutil.rmtree(thrown, ignore_errors=True)
    return used - size(thrown)


def is_left(path: FilePath) -> bool:
    """True of a path on disk at which something is after it was deleted; object storage says so itself."""
    return isinstance(path, Path) and os.path.lexists(path)


def stays(path: FilePath) -> str:
    """Sentence on a path that is left."""
    return f"{path} cannot be deleted by this user; run: {shlex.join(['sudo', 'rm', '-r', str(path)])}"


def contents(data: P) -> list[P]:
    """Entries of the trash, oldest first."""
    try:
        found = [
            path
            for path in cast("Iterator[P]", folder(data).iterdir())
            if path.name.partition("-")[0].isdigit()
        ]
    except OSError:
        return []
    return sorted(found)


def thrown_at(thrown: FilePath) -> float:
    """Time at which an entry came into the trash, in seconds since the epoch."""
    return float(thrown.name.partition("-")[0])


def size(path: FilePath) -> int:
    """Bytes of a file, or of all files in a folder; those in a folder that may not be entered do not count."""
    if isinstance(path, ObjectPath):
        return path.stat().st_size if path.is_file() else sum(entry.bytes for entry in path.entries())
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(map(length, (path, *files)))


def length(path: FilePath) -> int:
    """Bytes of one file; a folder, and a file that has just gone, has none."""
    try:
        if isinstance(path, ObjectPath):
            return path.stat().st_size
        return path.lstat().st_size if not path.is_dir() else 0
    except OSError:
        return 0


def found(data: P, name: str) -> Iterator[P]:
    """Yield files in the trash that lay at this path in the folder or bucket of data, newest first."""
    for thrown in reversed(contents(data)):
        path = thrown / name
        if path.exists() if isinstance(path, ObjectPath) else os.path.lexists(path):
            yield cast("P", path)
