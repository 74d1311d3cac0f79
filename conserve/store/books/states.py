"""The states of a job."""

from collections.abc import Collection
from enum import StrEnum


class OnLate(StrEnum):
    """Fate of a job at its deadline with rows left."""

    EXPIRE = "expire"
    """Job ends; `conserve retry` takes up the rows that are left."""
    BEST_EFFORT = "best-effort"
    """Job goes on, in the order of jobs without a deadline."""
    PUSH = "push"
    """Rows may take more of what live requests bear before the deadline (`--push-slo-scale`); then the job ends."""


LONGEST_DEADLINE_S = 365 * 86_400.0
"""Time from now that a deadline lies ahead at most."""


class JobState(StrEnum):
    """State of a job, as `conserve status` shows it."""

    QUEUED = "queued"
    """Job has rows to run; `conserve run` takes the rows."""
    RUNNING = "running"
    """Job is queued, and a `conserve run` holds a live lease on some of the rows. Derived, never stored."""
    PAUSED = "paused"
    """Job was paused by the user until `conserve resume`. Rows in flight were put back with their tokens."""
    COMPLETED = "completed"
    """Every row has a result, be it an answer or an error."""
    FAILED = "failed"
    """Job cannot run as things stand (an input file changed); `conserve resume` tries again."""
    CANCELLED = "cancelled"
    """Job was stopped for good; the results so far are kept."""
    EXPIRED = "expired"
    """Deadline passed with rows left; the results so far are kept, and `conserve retry` takes up the rest."""

    @property
    def stopped(self) -> bool:
        """True if the job's rows in flight are withdrawn and no others are taken, whatever results there are."""
        return self in (JobState.PAUSED, JobState.CANCELLED, JobState.EXPIRED)

    @property
    def final(self) -> bool:
        """True if the job stays as it is unless the user asks for a change."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)


class FailedBy(StrEnum):
    """Cause for which a job failed."""

    INPUT = "input"
    """An input file changed."""
    DAMAGE = "damage"
    """The record or the requests cannot be read; a repair queues the job again once its requests are whole."""
    LOSS = "loss"
    """The job's task is lost."""


GOING = frozenset({JobState.QUEUED, JobState.RUNNING})
"""States of jobs whose rows are taken."""
OPEN = frozenset({JobState.QUEUED, JobState.PAUSED})
"""Stored states of jobs that may go on and have not been refused."""
COMPLETABLE = OPEN | {JobState.FAILED, JobState.EXPIRED}
"""States of jobs that their last result completes."""
ENDED_EARLY = frozenset({JobState.CANCELLED, JobState.EXPIRED})
"""States of jobs that ended by a wish or a deadline, rows left or not."""
DELIVERED = ENDED_EARLY | {JobState.COMPLETED}
"""States of jobs whose results are delivered."""
REMOVABLE = frozenset({JobState.COMPLETED, JobState.CANCELLED})
"""States of finished jobs. A failed job is not finished, since `conserve resume` lets it go on."""


OF_TEXT = {state.value: state for state in JobState}
"""States by their values in a column."""


def stored(states: Collection[JobState]) -> list[str]:
    """Values of states in a column, in the order of `JobState`."""
    return [state.value for state in JobState if state in states]
