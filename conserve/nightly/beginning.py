"""The run that `conserve eval run` works on: the one that was begun, or a new one."""

import secrets
from contextlib import suppress
from dataclasses import replace

from conserve.api.job import Job
from conserve.api.store import Store
from conserve.config import Settings
from conserve.errors import JobNotFound, JobRefused
from conserve.evals.plan import NightlyPlan
from conserve.evals.records import RunRecord, RunState
from conserve.nightly import keeping
from conserve.nightly.asking import tags_of
from conserve.nightly.running import Asking, Say
from conserve.store.books.states import JobState


def begun(
    settings: Settings, asking: Asking, plan: NightlyPlan, text: str, *, now: float, say: Say
) -> RunRecord:
    """The run that was begun and has not ended, if it is young enough; else a new one, and it is given up.

    Where the file or the flags have changed since, one with answers goes on with its own; one without is given up.
    """
    left = keeping.unfinished(settings.home, plan.name)
    if left is not None:
        changed = (left.plan, dict(left.overrides)) != (text, dict(asking.overrides))
        young = now - left.began_at <= plan.resume_s
        if young and not asking.anew and (not changed or has_answers(settings, left)):
            say(f"going on with {left.id}, which has {len(left.suites)} of {len(plan.standards())} suites")
            if changed:
                say(
                    "the file or the flags have changed since; that run keeps its own; begin another with: --new"
                )
            return left
        give_up(settings, left, now=now, say=say)
    run = RunRecord(
        id=keeping.new_id(settings.home, plan.name, now=now),
        token=secrets.token_hex(4),
        evaluation=plan.name,
        state=RunState.RUNNING,
        began_at=now,
        plan=text,
        folder=str(asking.file.parent.absolute()),
        overrides=asking.overrides,
    )
    keeping.write(settings.home, run)
    return run


def jobs_of(settings: Settings, run: RunRecord) -> list[Job]:
    """Jobs of a run."""
    return Store(settings).jobs(tags=tags_of(run.id, run.token))


def has_answers(settings: Settings, run: RunRecord) -> bool:
    """True if a suite of a run has scores, or a row an answer."""
    if any(suite.error is None for suite in run.suites):
        return True
    for job in jobs_of(settings, run):
        with suppress(JobNotFound):  # removed just now
            if job.progress().succeeded:
                return True
    return False


def give_up(settings: Settings, run: RunRecord, *, now: float, say: Say) -> None:
    """End a run in whose place another begins, and cancel its jobs that have rows without a result."""
    cancelled = 0
    for job in jobs_of(settings, run):
        with suppress(JobRefused, JobNotFound):  # ended, or removed, just now
            if job.status not in (JobState.COMPLETED, JobState.CANCELLED):
                job.cancel()
                cancelled += 1
    keeping.write(settings.home, replace(run, state=RunState.GIVEN_UP, ended_at=now))
    say(f"{run.id} is given up" + ("; its open jobs are cancelled" if cancelled else ""))
