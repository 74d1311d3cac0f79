"""Jobs that a run has nothing to do for: a sentence on each, and the exit code."""

from collections.abc import Sequence
from typing import NamedTuple

from conserve.cli import exits, output
from conserve.store.books.readings import JobReading
from conserve.store.books.states import JobState


class Idle(NamedTuple):
    """Sentence on a job without rows to run, and its exit code."""

    sentence: str
    code: int


def idle(job: JobReading) -> Idle:
    """Reason that a job has nothing to run."""
    if job.state is JobState.PAUSED:
        waiting = output.count(job.waiting, "row")
        return Idle(
            f"job {job.id} is paused and {waiting} of it wait; let it go on with: conserve resume {job.id}",
            exits.PAUSED,
        )
    if job.state is JobState.FAILED:
        return Idle(
            f"job {job.id} was refused ({job.error}); try again with: conserve resume {job.id}", exits.FAILED
        )
    if job.state is JobState.CANCELLED:
        return Idle(f"job {job.id} was cancelled; submit it again to run it", exits.CANCELLED)
    return Idle(f"job {job.id} is completed; there is nothing left to run", exits.DONE)


def nothing_to_run(jobs: Sequence[JobReading], *, named: bool) -> int:
    """Print why a run has nothing to do; returns its exit code, which counts named jobs alone."""
    if named:
        found = [idle(job) for job in jobs]
        for one in found:
            output.say(one.sentence)
        codes = [one.code for one in found]
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
        output.say(idle(job).sentence)
    return bool(paused)
