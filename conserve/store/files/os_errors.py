"""The operating system's errors about a store's files as store errors, which name the next command."""

import errno
import os
import pwd
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR

from conserve.errors import (
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreReadOnly,
    first_line,
)
from conserve.store.files.layout import JOBS
from conserve.store.files.objects import FilePath

ABOUT_FILES = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
)
"""Errors that prove a file missing or damaged. Others, also an EIO, may be of storage that is away for a while."""


def refuse_no_folder(home: Path) -> None:
    """Raise `StoreError` for a home that is a file, or lies below one; one that is missing may be made yet."""
    try:
        if S_ISDIR(home.stat().st_mode):
            return
    except NotADirectoryError:
        pass
    except OSError:  # whatever opens it tells of others
        return
    raise no_folder(home)


def no_folder(where: FilePath) -> StoreError:
    """The error of a place that is no folder."""
    return StoreError(
        f"{where} cannot be used: it is no folder, or lies in none; check --home or CONSERVE_HOME"
    )


def no_space(where: FilePath) -> StoreFull:
    """The error of a full disk."""
    return StoreFull(
        f"no space left in {where}; free some and run the command again, nothing committed is lost"
    )


@contextmanager
def damage_apart(path: FilePath) -> Iterator[None]:
    """Turn an error of this process or machine, which says nothing about the file, into a `StoreError`.

    Raises `StoreForbidden` where permissions or storage keep this process from the file.
    """
    try:
        yield
    except MemoryError as error:  # Arrow's are too
        said = first_line(error)
        raise StoreError(
            f"{path} cannot be read, since there is no memory ({said}); free some and run the command again"
        ) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise StoreError(
                f"{path} cannot be opened, since too many files are open; run: ulimit -n 65535, "
                "and then the command again"
            ) from error
        if error.errno in (errno.ENOMEM, errno.ESTALE):
            raise StoreError(f"{path} cannot be read: {error.strerror}; run the command again") from error
        if isinstance(path, Path) and error.errno is not None and error.errno not in ABOUT_FILES:
            allowed, why = not isinstance(error, PermissionError), error.strerror or first_line(error)
            raise out_of_reach(path, why, allowed=allowed) from error
        raise


def out_of_reach(path: Path, why: str, *, allowed: bool) -> StoreForbidden:
    """The error of a file that permissions or, where it is allowed, storage keep this process from."""
    fix = "bring its storage back, or delete the file if it is lost" if allowed else "let this user read it"
    parts = path.parts
    job_id = parts[len(parts) - parts[::-1].index(JOBS)] if JOBS in parts[:-1] else None
    said = f"{path} cannot be read ({why}), which says nothing about what is in it"
    return StoreForbidden(said, step=fix, job_id=job_id, file=path, why=why)


@contextmanager
def owned(folder: FilePath) -> Iterator[None]:
    """Turn a refusal of the operating system into the error of a job's folder that this user may not write."""
    try:
        yield
    except PermissionError as error:
        said, step = f"{folder} cannot be written by this user", f"run: {chown(folder)}"
        raise StoreForbidden(said, step=step, job_id=folder.name) from error


def chown(*paths: FilePath) -> str:
    """Command that gives files and folders to the user of this process."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.geteuid())
    return shlex.join(["sudo", "chown", "-R", user, *map(str, paths)])


@contextmanager
def explained(where: FilePath) -> Iterator[None]:
    """Turn `OSError` into a store error that names `where` and the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise no_space(where) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreReadOnly(
                f"{where} cannot be written; make it writable or set CONSERVE_HOME"
            ) from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise no_folder(where) from error
        why = error.strerror or error
        raise StoreError(f"{where} cannot be used: {why}; check --home or CONSERVE_HOME") from error
