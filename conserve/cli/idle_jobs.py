"""Jobs that a run has nothing to do for: their sentences printed, and the exit code."""

from collections.abc import Sequence

from conserve.api.idle import idle
from conserve.api.running import Outcome
from conserve.cli import exits, output
from conserve.store.books.readings import JobReading
from conserve.store.books.states import JobState

CODES = {
    JobState.PAUSED: exits.PAUSED,
    JobState.FAILED: exits.FAILED,
    JobState.CANCELLED: exits.CANCELLED,
    JobState.EXPIRED: exits.CANCELLED,
    JobState.COMPLETED: exits.DONE,
}
"""Exit codes of named jobs that have nothing to run."""


def nothing_to_run(jobs: Sequence[JobReading], *, named: bool, as_json: bool = False) -> int:
    """Print why a run has nothing to do; returns its exit code, which counts named jobs alone."""
    if as_json:
        output.data_json(Outcome(jobs={job.id: job.state for job in jobs} if named else {}).document())
    if named:
        for job in jobs:
            output.say(idle(job))
        codes = [CODES.get(job.state, exits.DONE) for job in jobs]
        return next((code for code in exits.WORST_FIRST if code in codes), exits.DONE)
    paused = [job for job in jobs if job.state is JobState.PAUSED]
    if paused:
        others = f" and {output.count(len(paused) - 1, 'other job')}" if len(paused) > 1 else ""
        verb = "are" if others else "is"
        output.say(f"nothing to run; {paused[0].id}{others} {verb} paused: conserve resume {paused[0].id}")
    else:
        output.say("nothing to run; queue a job with: conserve submit")
    return exits.DONE


def left_paused(jobs: Sequence[JobReading]) -> bool:
    """Print which of these jobs are paused with rows left; True if any is."""
    paused = [job for job in jobs if job.state is JobState.PAUSED]
    for job in paused:
        output.say(idle(job))
    return bool(paused)
