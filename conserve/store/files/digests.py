"""Digests of the store's files: taken when a file is made, compared before it is read.

Parquet's own page checksums are not enough: DuckDB ignores them, and they do not cover a file's footer. A file that
was found whole is remembered in HOME/verified.json for a day, by attributes that change with every write to it. So
a query over many gigabytes reads them twice once a day, and not every time.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from conserve.errors import StoreForbidden
from conserve.store.files.objects import FilePath, ObjectPath, source
from conserve.store.files.os_errors import damage_apart, out_of_reach

MEMORY = "verified.json"
REMEMBER_S = 86_400.0
YOUNG_S = 2.0  # a file changed twice within a tick of the file system's clock looks unchanged
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Length and digest of a file when it was made."""

    bytes: int
    digest: str  # BLAKE2b of the contents


def digest_of(path: FilePath) -> str:
    """The digest of a file's contents as they are."""
    digest = hashlib.blake2b(digest_size=20)
    with path.open() if isinstance(path, ObjectPath) else path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def seal(path: FilePath) -> Seal:
    """Take the seal of a file that was just made."""
    return Seal(bytes=path.stat().st_size, digest=digest_of(path))


class FileAttributes(NamedTuple):
    """Attributes of a file that change with every write to it."""

    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> "FileAttributes":
        """Read the attributes of a file."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class Memory:
    """Files that were found whole within the day before `now`, which a process that goes on sets anew."""

    def __init__(self, path: Path, *, now: float) -> None:
        self.now = now
        self._path, self._saved_at = path, now
        self._known = dict(self._read())
        self._changed = False

    def _read(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the entries of the last day; none if the memory's own file is damaged."""
        with suppress(OSError, ValueError, TypeError, AttributeError):
            for name, (*look, digest, at) in json.loads(self._path.read_bytes()).items():
                if self._is_young(at):
                    yield name, [*look, digest, at]

    def _is_young(self, at: float) -> bool:
        return abs(self.now - at) < REMEMBER_S

    def knows(self, path: Path, seal: Seal, look: FileAttributes) -> bool:
        """True if this file was found whole and not written to since."""
        *seen, at = self._known.get(str(path), [-inf])
        return seen == [*look, seal.digest] and self._is_young(at)

    def remember(self, path: Path, seal: Seal, look: FileAttributes) -> None:
        """Note that a file is whole, unless it is so young that a later change might not show."""
        if self.now - look.ctime_ns / 1e9 > YOUNG_S:
            self._known[str(path)] = [*look, seal.digest, self.now]
            self._changed = True

    def save(self, *, every_s: float = 0.0) -> None:
        """Write the memory for the next command, which compares files again if that fails; once in `every_s`."""
        if not self._changed or abs(self.now - self._saved_at) < every_s:
            return
        self._known = dict(self._read()) | self._known  # others may have written since
        self._saved_at, self._changed = self.now, False
        # One name for all processes, so that kills leave one file at most.
        scratch = self._path.with_name(f".{self._path.name}")
        with suppress(OSError):
            try:
                entries = list(self._known.items())  # another thread may remember a file meanwhile
                young = {name: entry for name, entry in entries if self._is_young(entry[-1])}
                scratch.write_text(json.dumps(young))
                scratch.replace(self._path)
            finally:
                scratch.unlink(missing_ok=True)


@contextmanager
def memory(home: Path, *, now: float) -> Iterator[Memory]:
    """Yield the memory of a home; saved at the end."""
    found = Memory(home / MEMORY, now=now)
    yield found
    found.save()


def fault(path: FilePath, seal: Seal | None, known: Memory | None = None) -> str | None:
    """Compare a Parquet file with its seal, as `damage` does; one that is out of reach has a fault too."""
    try:
        return damage(path, seal, known)
    except StoreForbidden as error:
        return f"cannot be read ({error.why})"


def damage(path: FilePath, seal: Seal | None, known: Memory | None = None) -> str | None:
    """Compare a Parquet file with its seal; returns its fault, to follow its name, or None if it is whole.

    Of a file without a seal, which an earlier version made, only the footer is read. Raises `StoreForbidden` for a
    file that is out of reach, and another `StoreError` if this process can open no more files.
    """
    if isinstance(path, ObjectPath):
        return object_fault(path, seal)
    try:
        with damage_apart(path):
            look = FileAttributes.at(path)
            if seal is None:
                return footer_fault(path)
            if known is not None and known.knows(path, seal, look):
                if not os.access(path, os.R_OK):
                    raise out_of_reach(path, "no permission", allowed=False)
                return None
            if what := length_fault(look.bytes, seal) or digest_fault(path, seal):
                return what
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if known is not None:
        known.remember(path, seal, look)
    return None


def bytes_to_read(path: FilePath, seal: Seal | None, known: Memory | None) -> int:
    """Number of bytes that `fault` reads of a file for its digest; 0 if something else tells."""
    if seal is None or not isinstance(path, Path):
        return 0
    try:
        look = FileAttributes.at(path)
    except OSError:
        return 0
    is_known = known is not None and known.knows(path, seal, look)
    return 0 if is_known or look.bytes != seal.bytes else seal.bytes


def object_fault(path: ObjectPath, seal: Seal | None) -> str | None:
    """Compare an object with its seal, as `fault` does; no memory of it is kept."""
    try:
        size = path.stat().st_size
        return footer_fault(path) if seal is None else length_fault(size, seal) or digest_fault(path, seal)
    except FileNotFoundError:
        return "is missing"


def length_fault(size: int, seal: Seal) -> str | None:
    """Compare the length of a file with its seal; returns the fault, or None."""
    return None if size == seal.bytes else f"has {size:,} of its {seal.bytes:,} bytes"


def digest_fault(path: FilePath, seal: Seal) -> str | None:
    """Compare the contents of a file with its seal; returns the fault, or None."""
    return None if digest_of(path) == seal.digest else "is not what was written"


def footer_fault(path: FilePath) -> str | None:
    """Read the footer of a Parquet file; returns its fault, or None."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with damage_apart(path):
            pq.read_metadata(source(path))
    except (OSError, pa.ArrowException) as error:
        return f"is damaged ({str(error).splitlines()[0]})"
    return None


def seals(paths: Iterable[Path]) -> dict[str, Seal]:
    """Seals of the files that exist, by file name."""
    return {path.name: seal(path) for path in paths if path.is_file()}
