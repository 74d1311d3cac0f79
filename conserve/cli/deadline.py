"""`conserve deadline`: when jobs expire with the rows that are left."""

import re
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.control import Jobs
from conserve.errors import UsageError, one_line
from conserve.store.books.states import LONGEST_DEADLINE_S, OnLate
from conserve.units import parse_length

if TYPE_CHECKING:
    from conserve.store.books.catalog import JobRecord

EXAMPLE = """
conserve deadline gsm8k-k3f9 --by 06:00
conserve deadline gsm8k-k3f9 --within 8h --on-late best-effort
conserve deadline gsm8k-k3f9 --none
"""

By = Annotated[
    str | None, typer.Option("--by", metavar="TIME", help="Expire at 06:00, or 2026-11-24 06:00, local time.")
]
Within = Annotated[
    str | None, typer.Option("--within", metavar="AGE", help="Expire after so long: 90m, 8h, 2d.")
]
OnLateFlag = Annotated[
    str | None,
    typer.Option(
        "--on-late",
        metavar="expire|best-effort|push",
        help="At the deadline with rows left: end, or go on behind jobs that have time. Push: rows take more of "
        "what live requests bear before it, up to the server's --push-slo-scale.",
    ),
]


def deadline(
    ctx: typer.Context,
    jobs: Jobs,
    by: By = None,
    within: Within = None,
    on_late: OnLateFlag = None,
    none: Annotated[bool, typer.Option("--none", help="Take the deadline away.")] = False,
) -> None:
    """Give a job a deadline: it goes ahead of jobs with more time, and expires then unless it is best-effort.

    Its results are kept, and `conserve retry` takes up the rows that are left.
    """
    from conserve.store.books import catalog

    if (by is not None) + (within is not None) + none > 1:
        raise UsageError("give one of --by, --within and --none")
    moment, late = moment_of(by, within, now=time.time()), on_late_of(on_late)
    context: Context = ctx.obj
    changes = moment is not None or none or late is not None
    with context.store() as store, store.write() as tx:
        if changes:
            catalog.lock_named(tx, jobs)
        found = [catalog.get(tx, job) for job in jobs]
        if changes:
            found = [
                catalog.set_deadline(
                    tx, job.id, job.deadline if moment is None and not none else moment, late
                )
                for job in found
            ]
    for job in found:
        output.data(f"{job.id}: {deadline_words(job)}")
    say_push(late)


def deadline_words(job: "JobRecord") -> str:
    """A job's deadline in words."""
    if job.deadline is None:
        return "no deadline"
    if job.on_late == "best-effort":
        return f"due {output.moment(job.deadline)}, best-effort"
    pushes = ", push" if job.on_late == "push" and job.state != "expired" else ""
    return f"{'expired' if job.state == 'expired' else 'expires'} {output.moment(job.deadline)}{pushes}"


def say_push(late: OnLate | None) -> None:
    """Say what a push depends on, if one is asked for."""
    if late is OnLate.PUSH:
        output.say(
            "push: only where a server has --push-slo-scale above 1; elsewhere the job is as with expire"
        )


def on_late_of(text: str | None) -> OnLate | None:
    """Choice that --on-late names; None without it."""
    if text is None:
        return None
    if text not in tuple(OnLate):
        raise UsageError(f"--on-late is {' or '.join(OnLate)}, not {one_line(text, most=40)!r}")
    return OnLate(text)


def moment_of(by: str | None, within: str | None, *, now: float) -> float | None:
    """Moment that --by or --within names, in s since 1970; None without them."""
    if by is not None and within is not None:
        raise UsageError("give --by or --within, not both")
    if within is not None:
        return now + length_s(within)
    return None if by is None else clock_time(by, now=now)


def length_s(text: str) -> float:
    """Seconds of a length such as `8h`."""
    length = parse_length(text)
    if not length:
        raise UsageError(f"--within {text!r} is no length; write a number with s, m, h, d or w, as 8h")
    if length > LONGEST_DEADLINE_S:
        raise UsageError(f"--within {one_line(text, most=40)} is too long; a deadline is at most 365d away")
    return length


def showings(clock: datetime) -> list[float]:
    """Moments at which the local clock shows this, in s since 1970: two in the hour that is repeated in autumn."""
    first, second = (clock.replace(fold=fold).timestamp() for fold in (0, 1))
    return [first, second] if second > first else [first]


def clock_time(text: str, *, now: float) -> float:
    """The next moment at which the local clock shows this; raises `UsageError` for a moment that has passed."""
    today = datetime.fromtimestamp(now)
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
            hour, minute = map(int, text.strip().split(":"))
            found = today.replace(hour=hour, minute=minute, second=0, microsecond=0, fold=0)
            shown = [*showings(found), *showings(found + timedelta(days=1))]
        else:
            shown = showings(datetime.fromisoformat(text.strip()))
        moment = next((one for one in shown if one > now), shown[-1])
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"--by {text!r} is no time; write 06:00, or 2026-11-24 06:00") from error
    if moment <= now:
        raise UsageError(f"--by {text} has passed; name a moment to come")
    if moment > now + LONGEST_DEADLINE_S:
        raise UsageError(f"--by {text} is too far away; a deadline is at most 365 days away")
    return moment
