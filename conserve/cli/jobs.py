"""`conserve jobs`: all jobs, one a line."""

import time
from typing import Annotated

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.status_report import document, no_jobs, table
from conserve.store.books.readings import JobReading, read_jobs

EXAMPLE = """
conserve jobs
conserve jobs --tag team=search
conserve jobs --json
"""


def jobs(
    ctx: typer.Context,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE]", help="Only jobs with this tag; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List all jobs, the newest first."""
    context: Context = ctx.obj
    settings = context.settings()
    everything = read_jobs(settings, now=time.time())[::-1]
    readings = [job for job in everything if all(has_tag(job, wanted) for wanted in tag or [])]
    if as_json:
        output.data_json([document(job) for job in readings])
    elif readings:
        output.data("\n".join(table(readings)))
    elif everything:
        output.say(f"none of {output.count(len(everything), 'job')} has the tag {' and '.join(tag or [])}")
    else:
        output.say(no_jobs(settings))


def has_tag(job: JobReading, wanted: str) -> bool:
    """True if the job has a tag of this key, and of this value if one is given."""
    key, equals, value = wanted.partition("=")
    return job.tags.get(key) == value if equals else key in job.tags
