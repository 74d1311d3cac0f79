"""`conserve status`: progress of the queue or of one job."""

from typing import Annotated

import typer

from conserve.cli import status_report
from conserve.cli.context import Context
from conserve.cli.options import JOB

EXAMPLE = """
conserve status
conserve status gsm8k-k3f9 --watch
conserve status --json
"""


def status(
    ctx: typer.Context,
    job: Annotated[str | None, JOB] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it until the work is done and nothing serves.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --watch one document a line.")
    ] = False,
) -> None:
    """Show how far the jobs are, all that are unfinished or one in detail, and how live requests fare."""
    context: Context = ctx.obj
    status_report.answer(context.settings(), status_report.StatusArguments(job, watch, as_json))
