"""`conserve forecast`: when jobs will be done."""

import time
from typing import Annotated

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.forecast_report import IDLE, document, header, none_runs, row
from conserve.cli.options import JOB
from conserve.jobs.deadlines.queue import forecast_queue
from conserve.jobs.deadlines.rate import LEAST_BUSY_S
from conserve.store.books.readings import job_named, read_harvested, read_jobs
from conserve.store.books.states import GOING

EXAMPLE = """
conserve forecast
conserve forecast gsm8k-k3f9
conserve forecast --json
"""


def forecast(
    ctx: typer.Context,
    job: Annotated[str | None, JOB] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Forecast when jobs are done, with 50 and 90 % probability, if rows go on running as in the days before."""
    context: Context = ctx.obj
    settings, now = context.settings(), time.time()
    readings = read_jobs(settings, now=now)
    found = forecast_queue(readings, read_harvested(settings), now=now)
    wanted = None if job is None else job_named(settings, readings, job)
    shown = [one for one in readings if one.state in GOING and wanted in (None, one.id)]
    if as_json:
        output.data_json([document(one, found.get(one.id)) for one in shown])
    elif not shown:
        output.say("no job has rows to run" if wanted is None else f"job {wanted} has no rows to run")
    elif not found:
        output.say(
            f"no forecast yet: it follows once rows have run for {LEAST_BUSY_S:g} s within a quarter of an hour; "
            "run: conserve run"
        )
    else:
        rows = [row(one, found[one.id], now) for one in shown if one.id in found]
        output.data("\n".join(output.columns(header(), rows, right=(1, 5))))
        if none_runs(readings):
            output.say(f"none runs now; done by then {IDLE}: conserve run")
