"""Jobs without rows to run: a sentence on each."""

from conserve.store.books.readings import JobReading
from conserve.store.books.states import JobState
from conserve.units import count


def idle(job: JobReading) -> str:
    """Reason that a job has nothing to run."""
    if job.state is JobState.PAUSED:
        waiting = count(job.waiting, "row of it waits", "rows of it wait")
        return f"job {job.id} is paused and {waiting}; let it go on with: conserve resume {job.id}"
    if job.state is JobState.FAILED:
        return f"job {job.id} was refused ({job.error}); try again with: conserve resume {job.id}"
    if job.state is JobState.CANCELLED:
        return f"job {job.id} was cancelled; submit it again to run it"
    if job.state is JobState.EXPIRED:
        left = count(job.waiting, "row")
        return f"job {job.id} expired with {left} left; take them up again with: conserve retry {job.id}"
    return f"job {job.id} is completed; there is nothing left to run"
