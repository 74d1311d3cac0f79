"""Withdrawal of a job that was just queued."""

from contextlib import suppress

from sqlalchemy import delete, exists

from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import job_folders, layout
from conserve.store.files.marks import Mark
from conserve.store.files.place import place_of

job, request = schema.job, schema.request


def withdraw(store: Store, job_id: str) -> bool:
    """Remove a job of which no row was ever leased; returns False and does nothing if one was."""
    folder = layout.job_folder(store.data, job_id)
    live = exists().where(request.c.job_id == job_id)
    with store.write() as tx:
        untouched = job.c.id == job_id, job.c.next_position == 0, job.c.succeeded + job.c.failed == 0, ~live
        if tx.execute(delete(job).where(*untouched)).rowcount == 0:
            return False
        # With this mark the sweep takes the folder after a crash, and `check` does not bring the job back.
        with suppress(OSError):
            place_of(folder).set_mark(Mark(store_id=store.id, registered=False))
    job_folders.discard(store.data, job_id)
    return True
