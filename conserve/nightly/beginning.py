"""The run that `conserve eval run` works on: the one that was begun, or a new one."""

from contextlib import suppress
from dataclasses import replace

from conserve.api.store import Store
from conserve.config import Settings
from conserve.errors import JobRefused
from conserve.evals.plan import NightlyPlan
from conserve.evals.records import RunRecord, RunState
from conserve.nightly import keeping
from conserve.nightly.asking import RUN
from conserve.nightly.running import Asking, Say


def begun(
    settings: Settings, asking: Asking, plan: NightlyPlan, text: str, *, now: float, say: Say
) -> RunRecord:
    """The run that was killed, if it is young enough and not of another file or flags; else a new one.

    Where the file or the flags have changed, a run with answers goes on with its own; one without is given up.
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
        evaluation=plan.name,
        state=RunState.RUNNING,
        began_at=now,
        plan=text,
        folder=str(asking.file.parent.absolute()),
        overrides=asking.overrides,
    )
    keeping.write(settings.home, run)
    return run


def has_answers(settings: Settings, run: RunRecord) -> bool:
    """True if a suite of a run has scores, or a row an answer."""
    if any(suite.error is None for suite in run.suites):
        return True
    return any(job.progress().succeeded for job in Store(settings).jobs(tags={RUN: run.id}))


def give_up(settings: Settings, run: RunRecord, *, now: float, say: Say) -> None:
    """End a run in whose place another begins, and cancel its jobs, which would be answered for nothing."""
    left = [job for job in Store(settings).jobs(tags={RUN: run.id}) if not job.status.final]
    for job in left:
        with suppress(JobRefused):  # ended just now
            job.cancel()
    keeping.write(settings.home, replace(run, state=RunState.GIVEN_UP, ended_at=now))
    say(f"{run.id} is given up" + ("; its open jobs are cancelled" if left else ""))
