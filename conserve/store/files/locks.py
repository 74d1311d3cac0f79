"""Locks between processes. The operating system ends a lock with its process."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# First byte that SQLite locks in a file, as long as a process has it open with its log.
SQLITE_SHARED = 0x40000002
SQLITE_SHARED_BYTES = 510


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a file or a folder against other processes that hold it so; a file system without locks lets all in."""
    held = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@contextmanager
def unopened(path: Path) -> Iterator[bool]:
    """Keep other processes from opening an SQLite file; yields False if one has it open.

    This process must have closed it. A file that is gone, and a file system without locks, count as not open.
    """
    try:
        held = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        free = True
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB, SQLITE_SHARED_BYTES, SQLITE_SHARED)
        except (BlockingIOError, PermissionError):  # either may be said of a lock that another holds
            free = False
        except OSError:
            pass
        yield free
    finally:
        os.close(held)
