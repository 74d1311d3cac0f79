"""A store's files in a folder: they are flushed before they are renamed, and locked by processes at work."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from conserve.store.files import locks
from conserve.store.files.marks import MARK, Mark, decoded, encoded
from conserve.store.files.os_errors import damage_apart
from conserve.whole import sync


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """A path in a folder."""

    path: Path
    in_bucket: ClassVar[bool] = False

    def make(self) -> None:
        """Make the folder, and flush its parent."""
        self.path.mkdir(exist_ok=True)
        if self._is_new():
            with suppress(PermissionError):  # to flush a folder it must be readable
                sync(self.path.parent)

    def make_with_parents(self) -> None:
        """Make the folder and its missing parents, from the top."""
        parent = FolderPlace(self.path.parent)
        if parent != self and parent._is_new():
            parent.make_with_parents()
        self.make()

    def make_private(self) -> None:
        """Make a new folder that its user alone may enter; its parents have the user's usual modes."""
        parent = FolderPlace(self.path.parent)
        if parent._is_new():
            parent.make_with_parents()
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.make_with_parents()

    def _is_new(self) -> bool:
        """True for a folder that is missing or empty: who made it may have been killed before the flush."""
        try:
            return not any(self.path.iterdir())
        except FileNotFoundError:
            return True
        except PermissionError:
            return False

    def scratch_file(self, local: Path) -> Path:
        """Scratch file beside the file to be."""
        return self.path.with_suffix(".tmp")

    def write(self, scratch: Path) -> None:
        """Flush the file, rename it and flush the folder."""
        sync(scratch)
        scratch.rename(self.path)
        sync(self.path.parent)

    @contextmanager
    def fetched(self, local: Path) -> Iterator[Path]:
        """Yield the file itself."""
        yield self.path

    def copy_to(self, other: Path) -> None:
        """Copy the file under a scratch name first."""
        copy = FolderPlace(other)
        FolderPlace(other.parent).make_with_parents()
        scratch = copy.scratch_file(other.parent)
        try:
            shutil.copyfile(self.path, scratch)
            copy.write(scratch)
        finally:
            scratch.unlink(missing_ok=True)

    def adopt(self, folder: Path) -> None:
        """Flush the folder with all that is in it, rename it, and flush the folder above."""
        for path in (*folder.rglob("*"), folder):
            sync(path)
        folder.rename(self.path)
        sync(self.path.parent)

    def move_to(self, there: Path) -> None:
        """Move the file or folder, to another disk by a copy."""
        there.parent.mkdir(parents=True)
        try:
            shutil.move(self.path, there)  # not by renaming alone: the jobs may be on a disk of their own
        except OSError:
            with suppress(OSError):  # half of a copy stays
                os.removedirs(there.parent)
            raise

    def is_there(self) -> bool:
        """Look for the path itself, not for what a link leads to."""
        return os.path.lexists(self.path)

    def length(self) -> int:
        """Ask for the length; a link's own counts."""
        try:
            return self.path.lstat().st_size if not self.path.is_dir() else 0
        except OSError:
            return 0

    def size(self) -> int:
        """Add the lengths up."""
        files = (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names)
        return sum(FolderPlace(path).length() for path in (self.path, *files))

    def changes(self) -> Iterator[tuple[Path, float]]:
        """Yield what is right in the folder."""
        for path in self.path.glob("*"):
            with suppress(OSError):
                yield path, path.stat().st_mtime

    def parquet_by_age(self) -> list[Path]:
        """List what is right in the folder, without scratch files."""
        found = self.path.glob("[!.]*.parquet")
        return sorted(found, key=lambda path: (modified_ns(path), path.name))

    def ahead_s(self) -> float:
        """Return 0: files of a folder are dated by clocks that are taken for this machine's."""
        return 0.0

    def delete(self) -> int:
        """Delete the folder, and compare its size before and afterwards."""
        used = self.size()
        self.remove_tree()
        return used - self.size()

    def remove_tree(self) -> None:
        """Delete the folder, or what of it this user may delete."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the file or folder by a lock."""
        with locks.alone(self.path):
            yield

    @contextmanager
    def held(self, mark: Mark, *, alone: bool) -> Iterator[None]:
        """Hold the folder by a lock on its mark."""
        file = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # a file system without locks: then nothing here is ever swept up
                fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            if not os.fstat(file).st_size:
                write_mark(file, mark)
            yield
        finally:
            os.close(file)

    @contextmanager
    def free(self) -> Iterator[None]:
        """Wait for the lock on the mark, and hold it."""
        with ExitStack() as opened:
            with suppress(OSError):
                file = os.open(self.path / MARK, os.O_RDWR)
                opened.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def seized(self, store_id: str) -> Iterator[Mark | None]:
        """Take the lock on the mark if it is to be had at once."""
        try:
            file = os.open(self.path / MARK, os.O_RDWR)
        except OSError:
            yield None
            return
        try:
            mark = read_mark(file) if locked(file) else None
            yield mark if mark is not None and mark.is_of(store_id) else None
        finally:
            os.close(file)

    def mark(self) -> Mark | None:
        """Read the mark."""
        try:
            file = os.open(self.path / MARK, os.O_RDONLY)
        except OSError:
            return None
        try:
            return read_mark(file)
        finally:
            os.close(file)

    def readable_mark(self) -> Mark | None:
        """Read the mark, after a trial that tells permissions and storage from damage."""
        with suppress(OSError), damage_apart(self.path / MARK):
            (self.path / MARK).read_bytes()
        return self.mark()

    def set_mark(self, mark: Mark) -> None:
        """Rewrite the mark within the same file, since processes hold locks on that."""
        file = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            write_mark(file, mark)
            os.fsync(file)
        finally:
            os.close(file)

    def drop_bare(self) -> None:
        """Remove the mark and the folder, if there is nothing else."""
        with suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [MARK]:
                (self.path / MARK).unlink()
                self.path.rmdir()


def modified_ns(path: Path) -> int:
    """Time of the last change of a file; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def locked(file: int) -> bool:
    """Lock a file that no other process holds; False if one does, or if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_mark(file: int) -> Mark | None:
    """Mark in an open file; None if its checksum is wrong."""
    try:
        return decoded(os.pread(file, os.fstat(file).st_size, 0))
    except OSError:
        return None


def write_mark(file: int, mark: Mark) -> None:
    """Replace the contents of an open file by a mark."""
    content = encoded(mark)
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))
