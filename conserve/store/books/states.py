"""The states of a job."""

from enum import StrEnum


class JobState(StrEnum):
    """What a job is doing, as `conserve status` shows it."""

    QUEUED = "queued"
    """Has rows to run; `conserve run` takes them."""
    RUNNING = "running"
    """Queued, and some `conserve run` holds a live lease on its rows. Derived, never stored."""
    PAUSED = "paused"
    """Told to wait; `conserve resume` continues it. Rows in flight were put back with their tokens."""
    COMPLETED = "completed"
    """Every row has a result, be it an answer or an error."""
    FAILED = "failed"
    """Cannot run as things stand (its input file changed); `conserve resume` tries again."""
    CANCELLED = "cancelled"
    """Stopped for good; the results it has are kept."""

    @property
    def final(self) -> bool:
        """Nothing will change any more unless the user asks for it."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
