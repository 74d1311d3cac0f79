"""Presence of the folders of the jobs: a disk that is not mounted, or another machine's, has lost nothing."""

import shlex

from sqlalchemy import Connection

from conserve.errors import StoreError, StoreForbidden
from conserve.store.books import catalog
from conserve.store.database.connection import of_one_machine
from conserve.store.database.migrations import store_id
from conserve.store.files import layout, os_errors
from conserve.store.files.objects import FilePath
from conserve.store.files.place import place_of


def require_folders(tx: Connection, where: FilePath) -> None:
    """Raise `StoreError` if the database names jobs, and none of its store has a folder at its place.

    Files must be neither judged nor made there: the place is then an empty mount point, or one of another machine.
    """
    if place_of(where).in_bucket:
        return
    jobs, ours, others = layout.jobs_folder(where), store_id(tx), False
    with os_errors.damage_apart(jobs):
        for folder in jobs.iterdir() if jobs.is_dir() else ():  # of a hundred thousand the first one will do
            if folder.name.startswith("."):
                continue
            if catalog.taken(tx, folder.name) or is_ours(folder, ours):
                return
            others = True
    if not (job_ids := catalog.ids(tx)):
        return
    found = "has folders of other stores' jobs alone" if others else "is missing or empty"
    lost = shlex.join(["mkdir", "-p", str(jobs / job_ids[0])])
    raise StoreError(
        f"{jobs} {found}; mount its disk, or check CONSERVE_HOME and CONSERVE_DATA (if the files "
        f"of all jobs are lost, say so by: {lost})"
    )


def is_ours(folder: FilePath, ours: str) -> bool:
    """True for a job's folder that is marked as this store's, or has no mark that can be read."""
    mark = place_of(folder).mark()
    return mark is None or mark.store_id == ours


def require_folder(tx: Connection, where: FilePath, job_id: str) -> None:
    """Raise `StoreForbidden` if a job's whole folder is missing here, and another machine may have it.

    Nothing is known of its files then: each machine of a queue may have been given a folder of its own by mistake.
    """
    folder = layout.job_folder(where, job_id)
    if not place_of(folder).in_bucket and not folder.exists() and not of_one_machine(tx):
        raise StoreForbidden(
            f"{folder} is missing; harvesters of one database need one folder of files (CONSERVE_DATA, or the same "
            f"CONSERVE_HOME mounted), so look where job {job_id} was submitted",
            step=f"if its files are lost, run: conserve check {job_id} --repair",
            job_id=job_id,
            file=folder,
        )
