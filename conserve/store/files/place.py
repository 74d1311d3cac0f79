"""Places of a store's files: what is done in another way in a folder than in a bucket.

Both kinds of path are read, listed and joined alike (`objects.ObjectPath`). What is not is here, once for each
kind: `FolderPlace` and `BucketPlace`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, Protocol, cast

from conserve.store.files.bucket_place import BucketPlace
from conserve.store.files.folder_place import FolderPlace
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, ObjectPath, P


class Place(Protocol[P]):
    """A path in a folder or in a bucket: of a file, or of a folder with what is in it."""

    in_bucket: ClassVar[bool]

    @property
    def path(self) -> P:
        """The path itself."""

    def make(self) -> None:
        """Make a folder durably, if it is missing: a power cut must not take it with the files in it."""

    def make_with_parents(self) -> None:
        """Make a folder and its missing parents, each durably."""

    def make_private(self) -> None:
        """Make a folder as `make_with_parents` does; a new one is for its user alone, with all in it."""

    def scratch_file(self, local: Path) -> Path:
        """Scratch file of a file to be: beside it, or in the folder `local`."""

    def write(self, scratch: Path) -> None:
        """Move the finished file `scratch` here, so that it is either there whole or not at all."""

    def fetched(self, local: Path) -> AbstractContextManager[Path]:
        """Yield a file of this machine with the same contents; raises `FileNotFoundError`."""

    def copy_to(self, other: P) -> None:
        """Copy the file durably; the copy's folder is made if it is missing."""

    def adopt(self, folder: Path) -> None:
        """Give a finished folder of this machine this name, durably."""

    def move_to(self, there: P) -> None:
        """Move the file, or the folder with what is in it; the folder above is made."""

    def is_there(self) -> bool:
        """True if there is a file or a folder, or a link that leads nowhere."""

    def length(self) -> int:
        """Bytes of one file; a folder, and a file that has just gone, has none."""

    def size(self) -> int:
        """Bytes of a file, or of all files in a folder; those in a folder that may not be entered do not count."""

    def changes(self) -> Iterator[tuple[P, float]]:
        """Yield the files of a folder and the times of their last changes, in s since the epoch."""

    def parquet_by_age(self) -> list[P]:
        """Parquet files of a folder, the one first that was written first."""

    def ahead_s(self) -> float:
        """Seconds by which this machine's clock is ahead of the one that dates the files; 0 if it is behind."""

    def delete(self) -> int:
        """Delete a folder, or what of it can be deleted; returns the bytes freed."""

    def remove_tree(self) -> None:
        """Delete a folder, with what is in it."""

    def alone(self) -> AbstractContextManager[None]:
        """Hold a file or a folder against other processes, where there are locks."""

    def held(self, mark: Mark, *, alone: bool) -> AbstractContextManager[None]:
        """Hold a job's folder while working in it, beside others unless `alone`; it is marked if it was not."""

    def free(self) -> AbstractContextManager[None]:
        """Hold a job's folder once no other process works in it; one without a mark, or locks, is free."""

    def seized(self, store_id: str) -> AbstractContextManager[Mark | None]:
        """Hold a folder of this store in which no process works, and yield its mark; None for any other folder."""

    def mark(self) -> Mark | None:
        """Mark of a job's folder; None if it has none or a damaged one."""

    def readable_mark(self) -> Mark | None:
        """Mark of a job's folder as `mark` has it; raises as `damage_apart` does."""

    def set_mark(self, mark: Mark) -> None:
        """Rewrite the mark of a job's folder."""

    def drop_bare(self) -> None:
        """Remove a job's folder that holds its mark and nothing else."""


def place_of(path: P) -> Place[P]:
    """The path as a place of its kind."""
    place: Place[Path] | Place[ObjectPath]
    place = BucketPlace(path) if isinstance(path, ObjectPath) else FolderPlace(cast("Path", path))
    return cast("Place[P]", place)


@contextmanager
def scratch_of(path: FilePath, local: Path) -> Iterator[Path]:
    """Yield the scratch file of a file to be; one that `Place.write` did not move is deleted."""
    scratch = place_of(path).scratch_file(local)
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)
