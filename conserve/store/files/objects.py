"""Objects: files of a store that lie in a bucket, under paths like those of a folder.

`ObjectPath` has the part of `pathlib.Path` that the store uses, so that one code serves folders and buckets. The
differences are few. An object appears whole or not at all, under its last name, and nothing renames it. There are
no locks: the database decides what counts, and files that it does not name are swept after a day.
"""

import io
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from conserve.errors import StoreUnreachable
from conserve.store.files.bucket import SCHEMES, Bucket, reached

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileInfo

BLOCK_BYTES = 8 << 20
MOST_COPIED_BYTES = 5 << 30  # by one request within S3


class ListedObject(NamedTuple):
    """An object in a listing."""

    path: "ObjectPath"
    bytes: int
    modified_at: float  # s since the epoch, by the service's clock


class Version(NamedTuple):
    """Version of an object's contents, as its service tells it: another one after each write."""

    size: int
    tag: bytes | None  # None where the service has none
    modified: bytes | None


class ObjectStat(NamedTuple):
    """Size and last change of an object, named as `os.stat` has it."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """Path of an object, or of the objects below it."""

    bucket: Bucket
    key: str = ""  # below the bucket's root

    @property
    def at(self) -> str:
        """Name of the object for pyarrow's filesystem."""
        return f"{self.bucket.root}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """Path without its last part."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def __truediv__(self, below: str | PurePosixPath) -> "ObjectPath":
        return ObjectPath(self.bucket, f"{self.key}/{below}".strip("/"))

    def __str__(self) -> str:
        return f"{self.bucket.scheme}://{self.at}"

    def with_name(self, name: str) -> "ObjectPath":
        """Another object beside this one."""
        return self.parent / name

    def relative_to(self, other: "ObjectPath") -> PurePosixPath:
        """Path of the object below another; raises `ValueError` if it is not below."""
        return PurePosixPath(self.key).relative_to(PurePosixPath(other.key))

    def exists(self) -> bool:
        """True if there is an object, or objects below the path."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """True if there is an object."""
        return bool(self._info().is_file)

    def is_dir(self) -> bool:
        """True if there are objects below the path."""
        return bool(self._info().type.name == "Directory")

    def _info(self) -> "FileInfo":
        filesystem = self.bucket.filesystem()
        with reached(self.bucket):
            return filesystem.get_file_info(self.at)

    def stat(self) -> ObjectStat:
        """Size and last change; raises `FileNotFoundError`."""
        info = self._info()
        if not info.is_file:
            raise FileNotFoundError(f"there is no object {self}")
        return ObjectStat(info.size, (info.mtime_ns or 0) / 1e9)

    def open(self) -> "ObjectFile":
        """Open the object to read anywhere in it; raises `FileNotFoundError`."""
        return ObjectFile(self)

    def read_bytes(self) -> bytes:
        """Contents of the object."""
        with self.open() as file:
            return file.read()

    def write_bytes(self, content: bytes) -> None:
        """Put an object, in place of an earlier one."""
        filesystem = self.bucket.filesystem()
        with reached(self.bucket), filesystem.open_output_stream(self.at) as stream:
            stream.write(content)

    def upload(self, path: Path) -> None:
        """Put a file of this machine as an object, which appears once it is whole.

        Raises `StoreUnreachable` also if the object then has another size.
        """
        filesystem, size = self.bucket.filesystem(), path.stat().st_size
        with (
            path.open("rb") as file,
            reached(self.bucket),
            filesystem.open_output_stream(self.at) as stream,
        ):
            while block := file.read(BLOCK_BYTES):
                stream.write(block)
        if self.stat().st_size != size:
            raise StoreUnreachable(f"{self} is not as it was sent; run the command again")

    def replace_by(self, path: Path) -> None:
        """Put a file in place of an object that users may read meanwhile.

        A stream that is interrupted ends as a shorter object. So the file is sent under another name first, unless
        the service could not copy it.
        """
        if path.stat().st_size > MOST_COPIED_BYTES:
            self.upload(path)
            return
        partial = self.parent / f".{self.name}.{uuid.uuid4().hex[:8]}"
        try:
            partial.upload(path)
            partial.copy_to(self)
        finally:
            partial.unlink(missing_ok=True)

    def download(self, path: Path) -> "Version":
        """Copy the object to a file of this machine; raises `FileNotFoundError`.

        Returns the version at the beginning: ranges of a later one follow where the object is replaced meanwhile.
        """
        with self.open() as file, path.open("wb") as copy:
            while block := file.read(BLOCK_BYTES):
                copy.write(block)
            return file.version()

    def copy_to(self, other: "ObjectPath") -> None:
        """Copy the object within the service."""
        filesystem = self.bucket.filesystem()
        with reached(self.bucket):
            filesystem.copy_file(self.at, other.at)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete the object."""
        filesystem = self.bucket.filesystem()
        try:
            with reached(self.bucket):
                filesystem.delete_file(self.at)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all objects below the path, and an object at it."""
        filesystem = self.bucket.filesystem()
        with reached(self.bucket):
            if filesystem.get_file_info(self.at).is_file:
                filesystem.delete_file(self.at)
            else:
                filesystem.delete_dir_contents(self.at, missing_dir_ok=True)

    def remove_folder(self) -> None:
        """Delete all objects below the path, and the empty one by which a service may mark the folder."""
        assert self.key, "the path of a bucket alone would delete that"
        filesystem = self.bucket.filesystem()
        with suppress(FileNotFoundError), reached(self.bucket):
            filesystem.delete_dir(self.at)

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yield what is right below the path; nothing if there is nothing."""
        for info in self._listed(recursive=False):
            yield self / info.base_name

    def entries(self) -> Iterator[ListedObject]:
        """Yield all objects below the path, at any depth."""
        start = len(self.bucket.root) + 1
        for info in self._listed(recursive=True):
            if info.is_file and not info.path.endswith("/"):
                path = ObjectPath(self.bucket, info.path[start:])
                yield ListedObject(path, info.size, (info.mtime_ns or 0) / 1e9)

    def _listed(self, *, recursive: bool) -> "list[FileInfo]":
        from pyarrow import fs

        filesystem = self.bucket.filesystem()
        chosen = fs.FileSelector(self.at, recursive=recursive, allow_not_found=True)
        with reached(self.bucket):
            return list(filesystem.get_file_info(chosen))


FilePath: TypeAlias = Path | ObjectPath
"""A file of a store, in a folder or in a bucket."""


class JoinablePath(Protocol):
    """Members of both kinds of path; the paths that they give are of the same kind."""

    @property
    def name(self) -> str:
        """Last part of the path."""

    def __truediv__(self, below: str, /) -> Self: ...

    def __lt__(self, other: Any, /) -> bool: ...

    def iterdir(self) -> Iterator[Self]:
        """Yield what is right below the path."""


P = TypeVar("P", bound=JoinablePath)
"""Path, ObjectPath, or either."""


class RangedFile(io.RawIOBase):
    """Bytes that are fetched by ranges and read like a file of `size` bytes."""

    size = 0

    def __init__(self) -> None:
        super().__init__()
        self._place = 0

    def read_at(self, start: int, size: int) -> bytes:
        """Fetch `size` bytes, which exist, from the byte `start`."""
        raise NotImplementedError

    def readable(self) -> bool:
        """True: the file is open to be read."""
        return True

    def seekable(self) -> bool:
        """True: reads may start anywhere."""
        return True

    def tell(self) -> int:
        """Byte at which the next read starts."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Let the next read start at another byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, or all that are left; fewer at the end."""
        left = max(0, self.size - self._place)
        wanted = left if size is None or size < 0 else min(size, left)
        found = self.read_at(self._place, wanted) if wanted else b""
        self._place += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns the number of bytes read."""
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)


class ObjectFile(RangedFile):
    """An object that is read like a file; raises `StoreUnreachable` where the service fails."""

    def __init__(self, path: ObjectPath) -> None:
        super().__init__()
        self.path = path
        filesystem = path.bucket.filesystem()
        with reached(path.bucket):
            self._file: NativeFile = filesystem.open_input_file(path.at)
            self.size = int(self._file.size())

    def version(self) -> Version:
        """Version of the object when it was opened."""
        with reached(self.path.bucket):
            said = {name.lower(): value for name, value in self._file.metadata().items()}
        return Version(self.size, said.get("etag"), said.get("last-modified"))

    def read_at(self, start: int, size: int) -> bytes:
        """Fetch bytes; a service that sends fewer is asked again once."""
        with reached(self.path.bucket):
            found = bytes(self._file.read_at(size, start))
            if len(found) < size:
                found += bytes(self._file.read_at(size - len(found), start + len(found)))
        if len(found) < size:
            raise StoreUnreachable(f"{self.path} was cut off while it was read; run the command again")
        return found


def source(path: FilePath) -> Path | ObjectFile:
    """A file as pyarrow's Parquet readers take it."""
    return path if isinstance(path, Path) else path.open()


def below(path: JoinablePath, root: JoinablePath) -> str:
    """Path of a file below the place of the store's files, as the database has it."""
    return str(PurePosixPath(str(path)).relative_to(str(root)))


def object_at(path: Path) -> ObjectPath | None:
    """Object of a path that was made from a URL, in which pathlib has joined the slashes; None for other paths."""
    scheme, colon, rest = str(path).partition(":/")
    if not colon or scheme not in SCHEMES:
        return None
    place, mark, options = rest.lstrip("/").partition("?")
    name, _, key = place.partition("/")
    options = re.sub(r"\b(https?):/(?!/)", r"\1://", options)
    return ObjectPath(Bucket.parse(f"{scheme}://{name}{mark}{options}"), key)
