"""The trash: files of a home are moved there and deleted a week later.

HOME/trash/<seconds since the epoch>-<random>/<the file's path in the home>
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

TRASH = "trash"
KEEP_S = 7 * 86_400.0


def folder(home: Path) -> Path:
    """Folder of a home's trash."""
    return home / TRASH


def throw_away(home: Path, path: Path, *, now: float) -> Path:
    """Move a file or a folder of the home into the trash; returns its path there."""
    there = folder(home) / f"{max(0, int(now))}-{uuid.uuid4().hex[:8]}" / path.relative_to(home)
    there.parent.mkdir(parents=True)
    shutil.move(path, there)  # not by renaming alone: the jobs may be on a disk of their own
    return there


def empty(home: Path, *, now: float, older_than_s: float = KEEP_S) -> int:
    """Delete entries that came into the trash `older_than_s` seconds ago or earlier; returns the bytes freed."""
    freed = 0
    for thrown in contents(home):
        if thrown_at(thrown) <= now - older_than_s:
            freed += size(thrown)
            shutil.rmtree(thrown, ignore_errors=True)
    return freed


def contents(home: Path) -> list[Path]:
    """Entries of the trash, oldest first."""
    try:
        return sorted(path for path in folder(home).iterdir() if path.name.partition("-")[0].isdigit())
    except OSError:
        return []


def thrown_at(thrown: Path) -> float:
    """Time at which an entry came into the trash, in seconds since the epoch."""
    return float(thrown.name.partition("-")[0])


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(length(each) for each in (path, *path.rglob("*")))


def length(path: Path) -> int:
    """Bytes of one file; a folder, and a file that has just gone, has none."""
    try:
        return path.lstat().st_size if not path.is_dir() else 0
    except OSError:
        return 0


def found(home: Path, name: str) -> Iterator[Path]:
    """Yield files in the trash that lay at this path in the home, newest first."""
    for thrown in reversed(contents(home)):
        path = thrown / name
        if os.path.lexists(path):
            yield path
