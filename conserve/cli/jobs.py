"""`conserve jobs`: all jobs, one a line."""

import time
from typing import Annotated

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.standing import document, table
from conserve.store.readings import read_jobs

EXAMPLE = """
conserve jobs
conserve jobs --json
"""


def jobs(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List all jobs, the newest first."""
    context: Context = ctx.obj
    readings = read_jobs(context.settings(), now=time.time())[::-1]
    if as_json:
        output.data_json([document(job) for job in readings])
    elif readings:
        output.data("\n".join(table(readings)))
    else:
        output.say('no jobs yet; queue one with: conserve submit data.parquet --prompt "..."')
