"""The store's folder and everything that lives in it.

HOME/conserve.db                 the database (unless CONSERVE_STORE names another)
HOME/jobs/<id>/requests.parquet  the rendered requests, in execution order
HOME/jobs/<id>/inputs.parquet    the input rows, or a link to the Parquet file that holds them
HOME/jobs/<id>/inputs/*.parquet  links to the Parquet files that hold them, where there are several
HOME/jobs/<id>/results/*.parquet result shards
HOME/jobs/<id>/job.json          which store the job is of, and its record (`marks`)
HOME/jobs/<id>/deliveries/*.jsonl answers and errors as files of the Batch API
HOME/uploads/<store>/*.jsonl     files that clients of the Batch API uploaded
HOME/trash/                      what was swept up, for a week (`trash`)
HOME/stores.json                 which databases were here (`lineage`)
HOME/verified.json               which files were found whole today (`digests`)
"""

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from conserve.errors import StoreError, StoreFull, StoreReadOnly
from conserve.store.files import marks
from conserve.store.files.marks import Mark
from conserve.whole import sync

REQUESTS = "requests.parquet"
INPUTS = "inputs.parquet"
PARTS = "inputs"
RESULTS = "results"


def jobs_folder(home: Path) -> Path:
    """Folder of all job folders."""
    return home / "jobs"


def job_folder(home: Path, job_id: str) -> Path:
    """The folder of one job."""
    return jobs_folder(home) / job_id


def requests_file(home: Path, job_id: str) -> Path:
    """The rendered requests of one job."""
    return job_folder(home, job_id) / REQUESTS


def inputs_file(home: Path, job_id: str) -> Path:
    """The copied input rows of one job."""
    return job_folder(home, job_id) / INPUTS


@contextmanager
def new_job_folder(home: Path, store_id: str) -> Iterator[Path]:
    """Yield a folder to build a job in, held by this process; it is deleted unless `adopt` renamed it."""
    folder = jobs_folder(home) / f".new-{uuid.uuid4().hex}"
    with ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        with explained(home):
            make_with_parents(jobs_folder(home))
            folder.mkdir()
            held.enter_context(marks.held(folder, Mark(store_id=store_id), alone=True))
        yield folder


def adopt(folder: Path, home: Path, job_id: str) -> None:
    """Rename a finished folder to the job's own, durably."""
    with explained(home):
        for path in (*folder.rglob("*"), folder):
            sync(path)
        folder.rename(job_folder(home, job_id))
        sync(jobs_folder(home))


def discard_job(home: Path, job_id: str) -> None:
    """Remove the folder of a job that the database does not name."""
    shutil.rmtree(job_folder(home, job_id), ignore_errors=True)


def make_with_parents(folder: Path) -> None:
    """Make a folder and its missing parents, each durably."""
    if folder.parent != folder and is_new(folder.parent):
        make_with_parents(folder.parent)
    make_folder(folder)


def make_folder(folder: Path) -> None:
    """Make a folder durably, if it is missing: a power cut must not take it with the files in it."""
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


def write_durably(path: Path, scratch: Path) -> None:
    """Move the finished file `scratch` to `path` so that it is either there whole or not at all."""
    sync(scratch)
    scratch.rename(path)
    sync(path.parent)


@contextmanager
def explained(where: Path) -> Iterator[None]:
    """Turn `OSError` into a store error that names `where` and the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFull(
                f"no space left in {where}; free some and run the command again, nothing committed is lost"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreReadOnly(
                f"{where} cannot be written; make it writable or set CONSERVE_HOME"
            ) from error
        raise StoreError(f"{where} cannot be used: {error}; check CONSERVE_HOME") from error
