"""Objects for DuckDB: its Parquet reader asks for bytes, and a filesystem of fsspec fetches them.

DuckDB reads the footers, and then the columns and row groups that a query needs. Its own extension for S3 would
have to be downloaded, and looks for credentials elsewhere. Ends of files are kept, since each footer is read twice:
when a view is made and when it is scanned.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import duckdb
from fsspec import AbstractFileSystem

from conserve.store.files.bucket import Bucket
from conserve.store.files.objects import ObjectFile, ObjectPath, RangedFile

TAIL_BYTES = 128 << 10
AT_ONCE = 16  # requests, most of whose time is the way to the service


def add_objects(duck: duckdb.DuckDBPyConnection, bucket: Bucket, soon: Sequence[ObjectPath] = ()) -> None:
    """Let a connection read the objects of a bucket under their URLs; the ends of `soon` are fetched at once."""
    objects = Objects(bucket)
    if soon:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for _ in threads.map(objects.warm, soon):
                pass
    duck.register_filesystem(objects)


class Objects(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Objects of one bucket, to be read."""

    cachable = False

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.protocol = bucket.scheme
        self._bucket = bucket
        self._sizes: dict[str, int] = {}
        self._tails: dict[str, bytes] = {}

    def warm(self, path: ObjectPath) -> None:
        """Fetch the end of an object; a missing one is left to the query."""
        with suppress(FileNotFoundError):
            KeptTail(path, self._sizes, self._tails)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.partition("://")[2] or path

    def path_of(self, name: str) -> ObjectPath:
        """Path of an object by its URL, or by its name in the service."""
        at = self._strip_protocol(name)
        return ObjectPath(self._bucket, at.removeprefix(self._bucket.root).strip("/"))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> "KeptTail":
        if mode != "rb":
            raise PermissionError("objects are read here, and not written")
        return KeptTail(self.path_of(path), self._sizes, self._tails)

    def size(self, path: str) -> int:
        """Length of an object, in bytes."""
        key = self.path_of(path).key
        if key not in self._sizes:
            self._sizes[key] = self.path_of(path).stat().st_size
        return self._sizes[key]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, length and kind of an object; raises `FileNotFoundError`."""
        return {"name": self._strip_protocol(path), "size": self.size(path), "type": "file"}

    def glob(self, path: str, maxdepth: int | None = None, **_: Any) -> list[str]:
        """The object of this name: names of the store have no patterns."""
        return [self._strip_protocol(path)]

    def modified(self, path: str) -> Any:
        """A moment that is the same for all objects: they never change."""
        from datetime import UTC, datetime

        return datetime.fromtimestamp(0, UTC)


class KeptTail(RangedFile):
    """An object whose last bytes are kept for all readers; it is opened once other bytes are asked for."""

    def __init__(self, path: ObjectPath, sizes: dict[str, int], tails: dict[str, bytes]) -> None:
        super().__init__()
        self._path, self._tails = path, tails
        self._file: ObjectFile | None = None
        if path.key not in tails:
            self._file = path.open()
            size = sizes[path.key] = self._file.size
            tails[path.key] = self._file.read_at(max(0, size - TAIL_BYTES), min(size, TAIL_BYTES))
        self.size = sizes[path.key]

    def read_at(self, start: int, size: int) -> bytes:
        """Take bytes from the kept end, or fetch them."""
        tail = self._tails[self._path.key]
        first = self.size - len(tail)
        if start >= first:
            return tail[start - first : start - first + size]
        if self._file is None:
            self._file = self._path.open()
        return self._file.read_at(start, size)
