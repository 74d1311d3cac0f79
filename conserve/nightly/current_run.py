"""The run that `conserve eval run` works on: the one that was begun, or a new one."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from conserve.api.job import Job
from conserve.config import Settings
from conserve.errors import JobNotFound, JobRefused, UsageError
from conserve.evals.plan import ModelTarget, NightlyPlan
from conserve.evals.plan_file import plan_of
from conserve.evals.records import RunRecord, RunState
from conserve.nightly import keeping
from conserve.nightly.redacted import overrides_of, plan_text_of
from conserve.nightly.run_jobs import SUITE, tags_of
from conserve.nightly.running import Asking, Say, overridden
from conserve.store.books.readings import JobReading, read_jobs
from conserve.store.books.states import GOING, REMOVABLE, JobState

OLD = "it began longer ago than `resume` allows"
CHANGED = "the file or the flags have changed and none of its rows was answered"


def current_run(
    settings: Settings, asking: Asking, plan: NightlyPlan, text: str, *, now: float, say: Say
) -> RunRecord:
    """The run that was begun and has not ended, if it is young enough; else a new one, and it is given up.

    Where the file or the flags have changed since, one with answers goes on with its own; one without is given up.
    A run that failed, and has answers to score or jobs that were put back, goes on with the file as it is now. Its
    open jobs are cancelled where another one begins in its place. Raises `UsageError` for a run of
    another file.
    """
    left = keeping.unfinished_run(settings.home, plan.name)
    if left is not None:
        changed = (left.plan, dict(left.overrides)) != (text, dict(asking.overrides))
        young = now - left.began_at <= plan.resume_s
        if young and not asking.anew and is_of_another_file(left, asking, text):
            raise UsageError(
                f"{plan.name!r} is the name of a file in {left.folder} too, whose run {left.id} has not ended; "
                f"give {asking.file} another `name`, as runs of one name are one history, or end that run by: --new"
            )
        if young and not asking.anew and (not changed or has_answers(settings, left, now=now)):
            say(f"going on with {left.id}, which has {len(left.suites)} of {len(plan.standards())} suites")
            if changed:
                say(
                    "the file or the flags have changed since; that run keeps its own; begin another with: --new"
                )
            return left
        why = "a new one is asked for" if asking.anew else OLD if not young else CHANGED
        give_up(settings, left, why, now=now, say=say)
    elif (failed := failed_last(settings, plan)) is not None:
        is_ours = not is_of_another_file(failed, asking, text)
        if is_ours and not asking.anew and can_go_on(settings, asking, plan, text, failed, now=now):
            say(f"going on with {failed.id}: its answers are kept and scored anew; ask all again with: --new")
            run = replace(
                failed,
                state=RunState.RUNNING,
                ended_at=None,
                plan=text,
                folder=folder_of(asking),
                overrides=asking.overrides,
                suites=(),
            )
            keeping.write(settings.home, run)
            return run
        if is_ours and cancel_open(settings, failed, now=now):
            say(f"the open jobs of {failed.id}, which failed, are cancelled")
    return new_run(settings, asking, plan, text, now=now, say=say)


def new_run(
    settings: Settings, asking: Asking, plan: NightlyPlan, text: str, *, now: float, say: Say
) -> RunRecord:
    """Begin a run; a sentence tells of an earlier one that is of another file of this name."""
    known = keeping.runs(settings.home, plan.name)
    if known and is_of_another_file(known[-1], asking, text):
        say(
            f"{known[-1].id}, the last run of {plan.name!r}, was of a file in {known[-1].folder}: both are one "
            f"history; if {asking.file} is another evaluation, give it another `name`"
        )
    run = RunRecord(
        id=keeping.new_id(settings.home, plan.name, now=now),
        token=secrets.token_hex(4),
        evaluation=plan.name,
        state=RunState.RUNNING,
        began_at=now,
        plan=text,
        folder=folder_of(asking),
        overrides=asking.overrides,
    )
    keeping.write(settings.home, run)
    return run


def folder_of(asking: Asking) -> str:
    """Folder that relative paths of the file begin at."""
    return str(asking.file.parent.absolute())


def is_of_another_file(run: RunRecord, asking: Asking, text: str) -> bool:
    """True for a run of another file of this name: of other contents, in another folder."""
    return plan_text_of(run.plan) != plan_text_of(text) and run.folder != folder_of(asking)


def failed_last(settings: Settings, plan: NightlyPlan) -> RunRecord | None:
    """The newest run of an evaluation, if it failed."""
    known = keeping.runs(settings.home, plan.name)
    return known[-1] if known and known[-1].state is RunState.FAILED else None


def can_go_on(
    settings: Settings, asking: Asking, plan: NightlyPlan, text: str, run: RunRecord, *, now: float
) -> bool:
    """True of a failed run that is young, asked the same models, and whose rows can all have answers.

    A job that was paused, or whose rows failed, is queued again by `conserve resume` or `retry`. What was not asked
    yet, as a prompt that has changed, is asked.
    """
    if now - run.began_at > plan.resume_s:
        return False
    then, wanted = (targets_of(*of) for of in ((run.plan, run.overrides), (text, asking.overrides)))
    if then != wanted:
        return False
    of_suite = {suite.name: 0 for suite in run.suites if suite.error is not None}
    for job in jobs_of(settings, run, now=now):
        withdrawn = job.state is JobState.CANCELLED and not job.done  # its model could not be reached then
        if not withdrawn and (suite := job.tags.get(SUITE, "")) in of_suite:
            of_suite[suite] += answers_of(job)
    return all(answers > 0 for answers in of_suite.values())


def targets_of(
    text: str, overrides: Mapping[str, str | int]
) -> tuple[Mapping[str, str | int], Sequence[ModelTarget]]:
    """Flags and models of a run that can be compared with those of an ended one, which lack passwords."""
    flags = overrides_of(overrides)
    return flags, overridden(plan_of(plan_text_of(text)), flags).targets


def answers_of(job: JobReading) -> int:
    """Answers that a job has or can still get; less than none if it must be put back, or is given up."""
    if job.state in GOING:
        return job.rows
    return job.succeeded if job.state is JobState.COMPLETED else -job.rows


def jobs_of(settings: Settings, run: RunRecord, *, now: float) -> list[JobReading]:
    """Jobs of a run as they stand."""
    wanted = tags_of(run.id, run.token).items()
    return [job for job in read_jobs(settings, now=now) if wanted <= job.tags.items()]


def has_answers(settings: Settings, run: RunRecord, *, now: float) -> bool:
    """True if a suite of a run has scores, or a row an answer."""
    scored = any(suite.error is None for suite in run.suites)
    return scored or any(job.succeeded for job in jobs_of(settings, run, now=now))


def give_up(settings: Settings, run: RunRecord, why: str, *, now: float, say: Say) -> None:
    """End a run in whose place another begins, and cancel its jobs that have rows without a result."""
    cancelled = cancel_open(settings, run, now=now)
    keeping.write(settings.home, replace(run, state=RunState.GIVEN_UP, ended_at=now))
    say(f"{run.id} is given up, since {why}" + ("; its open jobs are cancelled" if cancelled else ""))


def cancel_open(settings: Settings, run: RunRecord, *, now: float) -> int:
    """Cancel the jobs of a run that have rows without a result; returns how many."""
    cancelled = 0
    for job in jobs_of(settings, run, now=now):
        if job.state not in REMOVABLE:
            with suppress(JobRefused, JobNotFound):  # ended, or removed, just now
                Job(settings, job.id).cancel()
                cancelled += 1
    return cancelled
