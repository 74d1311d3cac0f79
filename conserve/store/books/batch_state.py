"""The state of a batch, derived from its own record and its job's."""

from enum import StrEnum
from typing import NamedTuple

from conserve.store.books.states import JobState


class BatchState(StrEnum):
    """State of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    """Input is being read and becomes a job."""
    FAILED = "failed"
    """Input cannot become a job, or the job cannot run."""
    IN_PROGRESS = "in_progress"
    """Job has rows to run, or is paused."""
    FINALIZING = "finalizing"
    """Every row has a result, or the deadline is over; the files are being written."""
    COMPLETED = "completed"
    """Every row has a result, and the files of answers and errors are there."""
    EXPIRED = "expired"
    """Deadline was over before every row had a result; the files are there."""
    CANCELLING = "cancelling"
    """Batch was cancelled; rows in flight end, and the files are being written."""
    CANCELLED = "cancelled"
    """Batch was cancelled; the files hold the results that there were."""

    @property
    def final(self) -> bool:
        """True if the batch stays as it is unless its job is changed."""
        return self in (BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED)


class BatchFacts(NamedTuple):
    """Facts that make the state of a batch."""

    bound: bool  # the input has become a job
    job: JobState | None  # None before the job exists, and where the job's record is damaged
    refused: bool
    cancelled: bool
    written: bool  # no files of the results are to be written


_ENDED = {  # with the files, and while they are being written
    JobState.COMPLETED: (BatchState.COMPLETED, BatchState.FINALIZING),
    JobState.CANCELLED: (BatchState.CANCELLED, BatchState.CANCELLING),
    JobState.EXPIRED: (BatchState.EXPIRED, BatchState.FINALIZING),
}


def state_of(facts: BatchFacts) -> BatchState:
    """State of a batch; in progress where the job's record is damaged, until `conserve check` mends it."""
    if not facts.bound and facts.refused:
        return BatchState.FAILED
    if not facts.bound:
        return BatchState.CANCELLED if facts.cancelled else BatchState.VALIDATING
    if facts.job in _ENDED:
        ended, writing = _ENDED[facts.job]
        return ended if facts.written else writing
    return BatchState.FAILED if facts.job is JobState.FAILED else BatchState.IN_PROGRESS
