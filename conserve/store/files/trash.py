"""The trash: files of a store are moved there and deleted a week later.

DATA/trash/<seconds since the epoch>-<random>/<the file's path in the folder or bucket of data>
"""

import shlex
import uuid
from collections.abc import Iterator

from conserve.store.files.objects import FilePath, JoinablePath, P, below
from conserve.store.files.place import place_of

TRASH = "trash"
KEEP_S = 7 * 86_400.0


def folder(data: P) -> P:
    """Folder of the trash."""
    return data / TRASH


def throw_away(data: P, path: P, *, now: float, lay_at: P | None = None) -> P:
    """Move a file or a folder into the trash; returns its path there.

    `lay_at` is where a folder on disk lay before it was renamed, if it was.
    """
    thrown = folder(data) / f"{max(0, int(now))}-{uuid.uuid4().hex[:8]}"
    there = thrown / below(lay_at or path, data)
    place_of(path).move_to(there)
    return there


def empty(data: FilePath, *, now: float, older_than_s: float = KEEP_S) -> int:
    """Delete entries that came into the trash `older_than_s` seconds ago or earlier; returns the bytes freed."""
    return sum(
        place_of(thrown).delete() for thrown in contents(data) if thrown_at(thrown) <= now - older_than_s
    )


def is_left(path: P) -> bool:
    """True of a path on disk at which something is after it was deleted; object storage says so itself."""
    place = place_of(path)
    return not place.in_bucket and place.is_there()


def stays(path: JoinablePath) -> str:
    """Sentence on a path that is left."""
    return f"{path} cannot be deleted by this user; run: {shlex.join(['sudo', 'rm', '-r', str(path)])}"


def contents(data: P) -> list[P]:
    """Entries of the trash, oldest first."""
    try:
        return sorted(path for path in folder(data).iterdir() if path.name.partition("-")[0].isdigit())
    except OSError:
        return []


def thrown_at(thrown: FilePath) -> float:
    """Time at which an entry came into the trash, in seconds since the epoch."""
    return float(thrown.name.partition("-")[0])


def found(data: P, name: str) -> Iterator[P]:
    """Yield files in the trash that lay at this path in the folder or bucket of data, newest first."""
    for thrown in reversed(contents(data)):
        path = thrown / name
        if place_of(path).is_there():
            yield path
