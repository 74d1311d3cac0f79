"""A small disk of its own, and a file that fills it up to the last bytes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096


class Disk:
    """A tmpfs; root alone can mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    @property
    def free_bytes(self) -> int:
        """Room for others' files."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, leaving_bytes: int = 0) -> None:
        """Take all room but for so much."""
        self.empty()
        with self._filler.open("wb", buffering=0) as file:
            try:
                while self.free_bytes > leaving_bytes:
                    file.write(bytes(PAGE))
            except OSError:
                assert not leaving_bytes

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def mounted(folder: Path, size_bytes: int) -> Iterator[Disk]:
    """A disk of this size; skips the test where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
