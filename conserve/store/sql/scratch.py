"""Temporary files whose names say which process made them, so that a later process can remove them."""

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conserve.owners import is_of_other_namespace, this_namespace

PREFIX = ".conserve-tmp-"
FORGOTTEN_S = 86_400.0  # without a write, after which the process of another PID namespace counts as ended


@contextmanager
def place(folder: Path | None = None) -> Iterator[Path]:
    """Yield an unused path in a folder, by default the system's for temporary files; removed at the end.

    Nothing is created at the path, so that a query that spills nothing leaves nothing, however it ends. Files that
    killed processes left in the folder are removed first.
    """
    folder = folder or system_folder()
    sweep(folder)
    nonce = f"{secrets.token_hex(4)}-{this_namespace()}"
    path = folder / f"{PREFIX}{socket.gethostname()}:{os.getpid()}:{nonce}"
    try:
        yield path
    finally:
        remove(path)


def system_folder() -> Path:
    """The system's folder for temporary files, even if it cannot be written to: most queries write nothing."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")


def sweep(folder: Path) -> None:
    """Remove the temporary files of dead processes of this machine from a folder."""
    with contextlib.suppress(OSError):  # a folder that may not be read has nothing of ours
        for entry in os.scandir(folder):
            if entry.name.startswith(PREFIX) and is_stale(Path(entry.path)):
                remove(Path(entry.path))


def is_stale(path: Path) -> bool:
    """True if the process that chose this name ran on this machine and has ended.

    Of a container that has this machine's host name, and process ids of its own, only silence tells.
    """
    begin, _, nonce = path.name.removeprefix(PREFIX).rpartition(":")
    host, _, pid = begin.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    if is_of_other_namespace(nonce):
        return time.time() - path.lstat().st_mtime > FORGOTTEN_S
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no process id
        return False
    return False


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and may be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
