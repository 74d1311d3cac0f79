"""Presence of the folder of the jobs: a disk that is not mounted has lost nothing."""

import shlex
from pathlib import Path

from sqlalchemy import Connection

from conserve.errors import StoreError
from conserve.store.books import catalog
from conserve.store.files import home
from conserve.store.files.objects import FilePath


def require_folders(tx: Connection, where: FilePath) -> None:
    """Raise `StoreError` if the database names jobs, and none of any store has a folder at its place.

    Files must be neither judged nor made there: the place is then an empty mount point, or one of another machine.
    """
    if not isinstance(where, Path):
        return
    jobs = home.jobs_folder(where)
    with home.damage_apart(jobs):
        if jobs.is_dir() and any(not path.name.startswith(".") for path in jobs.iterdir()):
            return
    if job_ids := catalog.ids(tx):
        lost = shlex.join(["mkdir", "-p", str(jobs / job_ids[0])])
        raise StoreError(
            f"{jobs} is missing or empty; mount its disk, or check CONSERVE_HOME and CONSERVE_DATA (if the files "
            f"of all jobs are lost, say so by: {lost})"
        )
