"""Keeping a job's input: a copy in the store, a link to the file, or only its name."""

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

FICLONE = 0x40049409  # Linux: share the blocks of another file, which copies them once either is written to
UNLINKABLE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)


class Keep(StrEnum):
    """Place of an input's rows, once the job is queued."""

    COPY = "copy"
    """In the store; later changes of the file do not matter."""
    LINK = "link"
    """In the store as a second name of the same file: safe from deletion and replacement, not from overwriting."""
    REFERENCE = "reference"
    """In the file, which must stay as it is."""


def choice(paths: Sequence[Path], limit_bytes: float) -> Keep:
    """Default for files that the user gives no choice for: a copy up to `limit_bytes` in all, a link beyond."""
    size = sum(path.stat().st_size for path in paths)
    return Keep.COPY if size <= limit_bytes else Keep.LINK


def keep(path: Path, target: Path, how: Keep) -> Keep:
    """Keep one file at `target`, as well as its file system allows; returns how it is kept."""
    if how is Keep.REFERENCE:
        return how
    if cloned(path, target):
        return Keep.COPY
    if how is Keep.COPY:
        shutil.copyfile(path, target)
        return Keep.COPY
    return Keep.LINK if linked(path, target) else Keep.REFERENCE


def cloned(path: Path, target: Path) -> bool:
    """Copy a file by sharing its blocks (a reflink); False where the file system cannot."""
    try:
        with path.open("rb") as source, target.open("wb") as copy:
            fcntl.ioctl(copy.fileno(), FICLONE, source.fileno())
    except OSError as error:
        target.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def linked(path: Path, target: Path) -> bool:
    """Give a file a second name; False across file systems, and where it is not allowed."""
    try:
        os.link(path.resolve(), target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        return False
    return True
