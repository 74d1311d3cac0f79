"""The store's folder and everything that lives in it.

HOME/conserve.db                 the database (unless CONSERVE_STORE names another)
DATA/jobs/<id>/requests.parquet  the rendered requests, in execution order
DATA/jobs/<id>/inputs.parquet    the input rows, or a link to the Parquet file that holds them
DATA/jobs/<id>/inputs/*.parquet  links to the Parquet files that hold them, where there are several
DATA/jobs/<id>/results/*.parquet result shards
DATA/jobs/<id>/job.json          which store the job is of, and its record (`marks`)
DATA/jobs/<id>/deliveries/*.jsonl answers and errors as files of the Batch API
DATA/uploads/<store>/*.jsonl     files that clients of the Batch API uploaded
DATA/trash/                      what was swept up, for a week (`trash`)
HOME/sending/                    files on their way to a bucket
HOME/stores.json                 which databases were here (`lineage`)
HOME/backup.json                 what a backup holds (`manifest`); commands only read such a home
DATA/verified.json               which files were found whole today (`digests`)

DATA is HOME, unless CONSERVE_DATA names another folder or a bucket (`objects`).
"""

import errno
import os
import pwd
import shlex
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR
from typing import TypeVar, cast

from conserve.config import BACKUP, is_backup
from conserve.errors import (
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreReadOnly,
    StoreUnreachable,
    first_line,
)
from conserve.store.files import marks
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, ListedObject, ObjectPath
from conserve.whole import sync

JOBS = "jobs"
REQUESTS = "requests.parquet"
INPUTS = "inputs.parquet"
PARTS = "inputs"
RESULTS = "results"
SENDING = "sending"

ABOUT_FILES = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
)
"""Errors that prove a file missing or damaged. Others, also an EIO, may be of storage that is away for a while."""

P = TypeVar("P", bound=FilePath)


def refuse_backup(home: Path) -> None:
    """Raise `StoreReadOnly` for a backup, before a command changes it."""
    if is_backup(home):
        raise StoreReadOnly(
            f"{home} is a backup, which commands only read; make a store of it: conserve --home NEW store restore "
            f"{home} (or remove its {BACKUP}, and it is a store from then on)"
        )


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


def jobs_folder(data: P) -> P:
    """Folder of all job folders."""
    return cast("P", data / JOBS)


def job_folder(data: P, job_id: str) -> P:
    """The folder of one job."""
    return cast("P", jobs_folder(data) / job_id)


def requests_file(data: P, job_id: str) -> P:
    """The rendered requests of one job."""
    return cast("P", job_folder(data, job_id) / REQUESTS)


def inputs_file(data: P, job_id: str) -> P:
    """The copied input rows of one job."""
    return cast("P", job_folder(data, job_id) / INPUTS)


@contextmanager
def new_job_folder(local: Path, store_id: str) -> Iterator[Path]:
    """Yield a folder to build a job in, held by this process; it is deleted unless `adopt` renamed it."""
    folder = local / JOBS / f".new-{uuid.uuid4().hex}"
    with ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        with explained(local):
            make_with_parents(folder.parent)
            folder.mkdir()
            held.enter_context(marks.held(folder, Mark(store_id=store_id), alone=True))
        yield folder


def adopt(folder: Path, data: FilePath, job_id: str) -> None:
    """Rename a finished folder to the job's own, durably; for a bucket, upload it."""
    with explained(data):
        if isinstance(data, ObjectPath):
            send(folder, data / JOBS / job_id)
            return
        for path in (*folder.rglob("*"), folder):
            sync(path)
        folder.rename(data / JOBS / job_id)
        sync(data / JOBS)


def send(folder: Path, to: ObjectPath) -> None:
    """Upload the files of a folder; the mark goes first, so that the sweep knows the rest after a crash."""
    files = (path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name != marks.MARK):
        (to / path.relative_to(folder).as_posix()).upload(path)


def job_objects(data: ObjectPath) -> Iterator[tuple[str, str, ListedObject]]:
    """Yield the objects of jobs by one listing, each with the job's id and its part of the job's folder.

    Objects right below jobs/ are of other programs, as `_SUCCESS` of Spark and `<name>_$folder$` of Hadoop.
    """
    for entry in (data / JOBS).entries():
        parts = entry.path.relative_to(data).parts
        if len(parts) > 2:
            yield parts[1], parts[2], entry


def discard_job(data: FilePath, job_id: str) -> None:
    """Remove the folder of a job that the database does not name."""
    with suppress(StoreUnreachable):  # then the sweep takes it
        remove_tree(job_folder(data, job_id))


def listed(folder: P) -> list[P]:
    """Files and folders right in a folder, in the order of their names; none if it is missing."""
    try:
        return sorted(cast("Iterator[P]", folder.iterdir()))
    except OSError:
        return []


def remove_tree(path: FilePath) -> None:
    """Delete a folder, with what is in it."""
    if isinstance(path, ObjectPath):
        path.remove_tree()
    else:
        shutil.rmtree(path, ignore_errors=True)


def make_with_parents(folder: FilePath) -> None:
    """Make a folder and its missing parents, each durably; a bucket needs none."""
    if isinstance(folder, ObjectPath):
        return
    if folder.parent != folder and is_new(folder.parent):
        make_with_parents(folder.parent)
    make_folder(folder)


def make_private(folder: FilePath) -> None:
    """Make a folder as `make_with_parents` does; a new one, with all that comes into it, is for its user alone."""
    if isinstance(folder, Path):
        if is_new(folder.parent):
            make_with_parents(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    make_with_parents(folder)


def make_folder(folder: FilePath) -> None:
    """Make a folder durably, if it is missing: a power cut must not take it with the files in it."""
    if isinstance(folder, ObjectPath):
        return
    folder.mkdir(exist_ok=True)
    if is_new(folder):
        with suppress(PermissionError):  # to flush a folder it must be readable
            sync(folder.parent)


def is_new(folder: Path) -> bool:
    """True for a folder that is missing or empty: a process that made it may have been killed before its flush."""
    try:
        return not any(folder.iterdir())
    except FileNotFoundError:
        return True
    except PermissionError:
        return False


@contextmanager
def scratch_of(path: FilePath, local: Path) -> Iterator[Path]:
    """Yield a file to write before `write_durably` moves it to `path`: beside it, or in the folder `local`."""
    scratch = sending(path, local)
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def sending(path: FilePath, local: Path) -> Path:
    """Scratch file of a file to be."""
    if isinstance(path, Path):
        return path.with_suffix(".tmp")
    make_with_parents(local / SENDING)
    return local / SENDING / f"{uuid.uuid4().hex}.tmp"


@contextmanager
def fetched(path: FilePath, local: Path) -> Iterator[Path]:
    """Yield a file of this machine with the contents of `path`; raises `FileNotFoundError`."""
    if isinstance(path, Path):
        yield path
        return
    copy = sending(path, local)
    try:
        path.download(copy)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def write_durably(path: FilePath, scratch: Path) -> None:
    """Move the finished file `scratch` to `path` so that it is either there whole or not at all."""
    if isinstance(path, ObjectPath):
        path.upload(scratch)
        return
    sync(scratch)
    scratch.rename(path)
    sync(path.parent)


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


def mark_of(folder: FilePath) -> Mark | None:
    """Mark of a job's folder; None if it has none or a damaged one. Raises as `damage_apart` does."""
    if isinstance(folder, Path):
        with suppress(OSError), damage_apart(folder / marks.MARK):
            (folder / marks.MARK).read_bytes()
    return marks.of(folder)


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
