"""A store's files in a bucket: objects appear whole or not at all, and there are neither folders nor locks."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.layout import PROBES, SENDING
from conserve.store.files.marks import MARK, Mark, decoded, encoded
from conserve.store.files.objects import ObjectPath


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A path in a bucket."""

    path: ObjectPath
    in_bucket: ClassVar[bool] = True

    def make(self) -> None:
        """Do nothing: a bucket needs no folders."""

    def make_with_parents(self) -> None:
        """Do nothing: a bucket needs no folders."""

    def make_private(self) -> None:
        """Do nothing: a bucket needs no folders, and its owner says who may read it."""

    def scratch_file(self, local: Path) -> Path:
        """Scratch file of this machine, whose folder is made."""
        FolderPlace(local / SENDING).make_with_parents()
        return local / SENDING / f"{uuid.uuid4().hex}.tmp"

    def write(self, scratch: Path) -> None:
        """Upload the file."""
        self.path.upload(scratch)

    @contextmanager
    def fetched(self, local: Path) -> Iterator[Path]:
        """Yield a copy of the object."""
        copy = self.scratch_file(local)
        try:
            self.path.download(copy)
            yield copy
        finally:
            copy.unlink(missing_ok=True)

    def copy_to(self, other: ObjectPath) -> None:
        """Copy the object within the service."""
        self.path.copy_to(other)

    def adopt(self, folder: Path) -> None:
        """Upload the files; the mark goes first, so that the sweep knows the rest after a crash."""
        files = (path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name != MARK):
            (self.path / path.relative_to(folder).as_posix()).upload(path)

    def move_to(self, there: ObjectPath) -> None:
        """Move an object, or all below the path; each is deleted once its copy is there."""
        if self.path.is_file():
            self.path.copy_to(there)
            self.path.unlink()
            return
        for entry in self.path.entries():
            entry.path.copy_to(there / entry.path.relative_to(self.path))
            entry.path.unlink(missing_ok=True)
        self.path.remove_tree()  # what object storage keeps of a folder

    def is_there(self) -> bool:
        """Look for an object, or objects below the path."""
        return self.path.exists()

    def length(self) -> int:
        """Ask for the length."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def size(self) -> int:
        """Add up the lengths of one listing."""
        if self.path.is_file():
            return self.path.stat().st_size
        return sum(entry.bytes for entry in self.path.entries())

    def changes(self) -> Iterator[tuple[ObjectPath, float]]:
        """Yield all objects below the path."""
        yield from ((entry.path, entry.modified_at) for entry in self.path.entries())

    def parquet_by_age(self) -> list[ObjectPath]:
        """List the objects below the path."""
        entries = sorted(self.path.entries(), key=lambda entry: (entry.modified_at, entry.path.name))
        return [entry.path for entry in entries]

    def ahead_s(self) -> float:
        """Put an object, and read its time: the service's clock dates objects."""
        path, here = self.path / PROBES / uuid.uuid4().hex, time.time()
        path.write_bytes(b"")
        try:
            return max(0.0, here - path.stat().st_mtime)
        finally:
            path.unlink(missing_ok=True)

    def delete(self) -> int:
        """Delete all objects below the path; an error says that some are left."""
        used = self.size()
        self.remove_tree()
        return used

    def remove_tree(self) -> None:
        """Delete all objects below the path."""
        self.path.remove_tree()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold nothing: an object cannot be held."""
        yield

    @contextmanager
    def held(self, mark: Mark, *, alone: bool) -> Iterator[None]:
        """Hold nothing; `adopt` wrote the mark."""
        yield

    @contextmanager
    def free(self) -> Iterator[None]:
        """Hold nothing: age decides what is swept."""
        yield

    @contextmanager
    def seized(self, store_id: str) -> Iterator[Mark | None]:
        """Yield the mark, held by nothing."""
        mark = self.mark()
        yield mark if mark is not None and mark.is_of(store_id) else None

    def mark(self) -> Mark | None:
        """Read the mark's object."""
        try:
            return decoded((self.path / MARK).read_bytes())
        except FileNotFoundError:
            return None

    def readable_mark(self) -> Mark | None:
        """Read the mark's object: a bucket out of reach says so itself."""
        return self.mark()

    def set_mark(self, mark: Mark) -> None:
        """Put the mark's object in place of the earlier one."""
        (self.path / MARK).write_bytes(encoded(mark))

    def drop_bare(self) -> None:
        """Do nothing: what is left of a removed job is swept."""
