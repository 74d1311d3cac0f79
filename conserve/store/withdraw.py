"""Taking back a job that was just queued."""

from sqlalchemy import delete, exists

from conserve.store import home, schema
from conserve.store.store import Store

job, request = schema.job, schema.request


def withdraw(store: Store, job_id: str) -> bool:
    """Remove a job of which no row was ever taken; False, and nothing done, if one was."""
    live = exists().where(request.c.job_id == job_id)
    with store.write() as tx:
        untouched = job.c.id == job_id, job.c.next_position == 0, job.c.succeeded + job.c.failed == 0, ~live
        if tx.execute(delete(job).where(*untouched)).rowcount == 0:
            return False
    home.discard_job(store.home, job_id)
    return True
