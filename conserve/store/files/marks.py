"""The mark of a job's folder: it names the store that owns the folder, and is locked by processes at work there.

Two databases may share one home, and a database may be moved aside. So a folder that this database does not name
may be another's. The mark is a file in the folder. A process that submits the job or writes shards holds an flock
on it. The operating system ends the lock with the process and not before: a process that was suspended for hours
still holds it. In a bucket the mark is an object, and there are no locks: age decides there (`sweep`). The mark
also carries the job's record, in case the database is damaged.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from conserve.errors import StoreUnreachable
from conserve.store.files.objects import FilePath, ObjectPath

MARK = "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Contents of a mark."""

    store_id: str
    registered: bool = False
    """True once a database has named the folder. A database that does not name it any more may be an older copy."""
    record: Mapping[str, Any] | None = None
    """The row of the table `job` as it was at submit."""


@contextmanager
def held(folder: FilePath, mark: Mark, *, alone: bool) -> Iterator[None]:
    """Hold a folder while working in it, beside other processes unless `alone`; writes the mark if it has none."""
    if isinstance(folder, ObjectPath):
        yield
        return
    file = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):  # a file system without locks: then nothing here is ever swept up
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not os.fstat(file).st_size:
            write(file, mark)
        yield
    finally:
        os.close(file)


def drop(folder: FilePath) -> None:
    """Remove a folder that holds its mark and nothing else."""
    if isinstance(folder, ObjectPath):
        return
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()


@contextmanager
def free(folder: FilePath) -> Iterator[None]:
    """Hold a folder once no other process works in it; a folder without a mark, or without locks, is free."""
    if isinstance(folder, ObjectPath):
        yield
        return
    with ExitStack() as opened:
        with suppress(OSError):
            file = os.open(folder / MARK, os.O_RDWR)
            opened.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def seized(folder: FilePath, store_id: str) -> Iterator[Mark | None]:
    """Hold a folder of this store in which no process works, and yield its mark; None for any other folder."""
    if isinstance(folder, ObjectPath):
        found = of(folder)
        yield found if found is not None and found.store_id == store_id != "" else None
        return
    try:
        file = os.open(folder / MARK, os.O_RDWR)
    except OSError:
        yield None
        return
    try:
        mark = read(file) if locked(file) else None
        yield mark if mark is not None and mark.store_id == store_id != "" else None
    finally:
        os.close(file)


def locked(file: int) -> bool:
    """Lock a file that no other process holds; False if one does, or if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def register(folder: FilePath, store_id: str, record: Mapping[str, Any]) -> None:
    """Mark a folder as named by the store's database; a full disk, or a bucket out of reach, is no error."""
    with suppress(OSError, StoreUnreachable):
        change(folder, Mark(store_id=store_id, registered=True, record=record))


def change(folder: FilePath, mark: Mark) -> None:
    """Rewrite the mark of a folder within the same file, since processes hold locks on that."""
    if isinstance(folder, ObjectPath):
        (folder / MARK).write_bytes(encoded(mark))
        return
    file = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        write(file, mark)
        os.fsync(file)
    finally:
        os.close(file)


def of(folder: FilePath) -> Mark | None:
    """Mark of a folder; None if it has none or a damaged one."""
    if isinstance(folder, ObjectPath):
        try:
            return decoded((folder / MARK).read_bytes())
        except FileNotFoundError:
            return None
    try:
        file = os.open(folder / MARK, os.O_RDONLY)
    except OSError:
        return None
    try:
        return read(file)
    finally:
        os.close(file)


def read(file: int) -> Mark | None:
    """Mark in an open file; None if its checksum is wrong."""
    try:
        return decoded(os.pread(file, os.fstat(file).st_size, 0))
    except OSError:
        return None


def decoded(content: bytes) -> Mark | None:
    """Inverse of `encoded`; None for a mark whose checksum is wrong."""
    try:
        outer = json.loads(content)
        body = outer["mark"]
        return Mark(**json.loads(body)) if zlib.crc32(body.encode()) == outer["checksum"] else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def write(file: int, mark: Mark) -> None:
    """Replace the contents of an open file by a mark."""
    content = encoded(mark)
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))


def encoded(mark: Mark) -> bytes:
    """Contents of a mark, with their checksum."""
    body = json.dumps(asdict(mark))
    return json.dumps({"mark": body, "checksum": zlib.crc32(body.encode())}).encode()
