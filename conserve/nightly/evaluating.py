"""`conserve eval run`: one process at a time works on an evaluation, to the end of its run."""

import shlex
import time
from dataclasses import replace

from conserve.config import Settings
from conserve.errors import UsageError
from conserve.evals.plan import NightlyPlan
from conserve.evals.plan_file import plan_of
from conserve.evals.records import RunRecord
from conserve.nightly import keeping
from conserve.nightly.current_run import current_run
from conserve.nightly.evaluation_lock import held
from conserve.nightly.publishing import Published, key_of, publish
from conserve.nightly.running import Asking, Say, check, overridden, plan_of_file, run_suites
from conserve.nightly.targets import bound_to


def evaluate(settings: Settings, asking: Asking, say: Say) -> RunRecord | None:
    """Run an evaluation, or go on with the run that was killed; None where another process is at it.

    The file counts as it is once this process is at it, which may be a day after the call. Raises the error of an
    engine that cannot answer; the run then waits for the next call.
    """
    plan, text = ready(asking)
    with held(settings.home, plan.name, plan.overlap, say) as hold:
        if hold == "theirs":
            return None
        if hold == "ended the other":
            asking = replace(asking, anew=True)
        if plan_of_file(asking.file)[1] != text:
            waited_for = plan.name
            plan, text = ready(asking)
            if plan.name != waited_for:
                raise UsageError(
                    f"{asking.file} is of {plan.name!r} now, while this run waited for {waited_for!r}; run it again"
                )
        for target in overridden(plan, asking.overrides).targets:
            bound_to(settings, target)  # raises before a run is begun whose jobs no model could have
        run = current_run(settings, asking, plan, text, now=time.time(), say=say)
        try:
            run = run_suites(settings, run, progress=asking.progress, say=say)
        except KeyboardInterrupt:
            say(f"{run.id} stopped; go on with: conserve eval run {shlex.quote(str(asking.file))}")
            raise
        remove_outdated(settings, plan, run, now=time.time(), say=say)
    return run


def ready(asking: Asking) -> tuple[NightlyPlan, str]:
    """Plan and text of a file whose suites can be asked and whose verdict can be posted."""
    plan, text = checked_plan(asking)
    key_of(plan.reports)
    return plan, text


def checked_plan(asking: Asking) -> tuple[NightlyPlan, str]:
    """Plan and text of a file whose suites can be asked; raises `UsageError` for the first fault."""
    plan, text = plan_of_file(asking.file)
    check(overridden(plan, asking.overrides), asking.file.parent.absolute())
    return plan, text


def publish_run(settings: Settings, run: RunRecord, say: Say) -> Published:
    """Publish a run as its file says."""
    return publish(settings, run, plan_of(run.plan), say)


def remove_outdated(settings: Settings, plan: NightlyPlan, run: RunRecord, *, now: float, say: Say) -> None:
    """Remove runs beyond their retention; those with a name stay, and so do jobs (`conserve prune`).

    The run itself stays too, the one before it, and the one that the file says to compare with.
    """
    if plan.keep_s is None:
        return
    against = keeping.resolve_or_none(settings.home, plan.against, beside=run)
    compared = keeping.previous(settings.home, run), against
    spared = {run.id, *(one.id for one in compared if one is not None)}
    for one in keeping.outdated_runs(settings.home, plan.name, before=now - plan.keep_s):
        if one.id not in spared:
            keeping.remove(settings.home, one)
            say(f"{one.id} is removed: it is older than the file keeps runs")
