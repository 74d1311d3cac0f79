"""Files that appear whole or not at all."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from conserve.errors import UsageError

if TYPE_CHECKING:
    from conserve.store.files.objects import ObjectPath


@contextmanager
def file_sink(path: Path) -> Iterator[BinaryIO]:
    """Open the file at this path for writing; a pipe or a device is written as it is, a URL names an object."""
    from conserve.store.files.objects import object_at
    from conserve.store.files.os_errors import explained

    if (there := object_at(path)) is not None:
        with uploaded(there) as stream:
            yield stream
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} to write {path.name} to; make it first")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"no file can be made in {folder}: permission denied; name a file in another folder")
    with explained(path):
        if path.exists() and not path.is_file():  # a pipe or a device takes no renaming
            with path.open("wb") as stream:
                yield stream
        else:
            with whole(path) as stream:
                yield stream


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of `path` once it is complete and on the disk.

    A link stays one to its file, and a file that is replaced hands on its mode.
    """
    from conserve.store.files.place import place_of
    from conserve.store.sql import scratch

    target = Path(os.path.realpath(path))  # `resolve` raises for links in a circle
    with scratch.place(target.parent) as temporary:
        with temporary.open("xb") as stream:
            if target.exists():
                os.fchmod(stream.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield stream
        place_of(target).write(temporary)


@contextmanager
def uploaded(there: "ObjectPath") -> Iterator[BinaryIO]:
    """Open a temporary file that is uploaded once it is complete."""
    from conserve.store.sql import scratch

    with scratch.place() as temporary:
        with temporary.open("xb") as stream:
            yield stream
        there.replace_by(temporary)
