"""`conserve results`: the answers of a job as a file."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from conserve.api.queries import check_join, check_output, results_query
from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.options import JOB
from conserve.config import Settings
from conserve.errors import UsageError
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import JobState

if TYPE_CHECKING:
    from conserve.store.books.catalog import JobRecord
    from conserve.store.sql.batches import RowBatches
    from conserve.store.sql.export import Format
    from conserve.store.sql.readable import LeftOut

EXAMPLE = """
conserve results last
conserve results gsm8k-k3f9 -o answers.parquet --with-inputs
conserve results gsm8k-k3f9 --format openai > output.jsonl
conserve results gsm8k-k3f9 --format dataset -o s3://team/answers
"""

FORMATS = ("parquet", "jsonl", "csv", "openai")
NEXT = {
    JobState.QUEUED: "run",
    JobState.PAUSED: "resume",
    JobState.FAILED: "resume",
    JobState.EXPIRED: "retry",
}
"""Commands by which a job without all answers goes on."""
TABLES = ("dataset", "delta")  # folders of files


def results(
    ctx: typer.Context,
    job: Annotated[str, JOB],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File or s3://BUCKET/NAME to write; its ending names the format."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="|".join((*FORMATS, *TABLES)),
            help="As the file's ending says; jsonl without a file. dataset and delta write a folder for many jobs.",
        ),
    ] = None,
    with_inputs: Annotated[
        bool, typer.Option("--with-inputs", help="Add the input's own columns to every row.")
    ] = False,
    with_prompts: Annotated[
        bool, typer.Option("--with-prompts", help="Add the text of its prompt to every row.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format jsonl.")] = False,
) -> None:
    """Write the answers a job has so far, in the order of its input rows."""
    from conserve.cli.queries import answer
    from conserve.cli.signals import ended_in_order
    from conserve.cli.sink import named_file, sink
    from conserve.store.sql.export import Format

    context: Context = ctx.obj
    out = named_file(out)
    if as_json and format not in (None, Format.JSONL):
        raise UsageError(f"--json is --format jsonl; leave --json or --format {format} out")
    if format in TABLES:
        table_of(context, job, format, out, with_inputs=with_inputs, with_prompts=with_prompts)
        return
    wanted = wanted_format(out, format, as_json=as_json, more=with_inputs or with_prompts)
    found, asked = results_query(
        context.settings(),
        job,
        with_inputs=with_inputs,
        with_prompts=with_prompts,
        with_urls=wanted is Format.OPENAI,
    )
    if out is not None:
        check_output(out, found)
    left_out: list[LeftOut] = []
    with (
        ended_in_order(),
        answer(asked, lambda gap: accept(gap, left_out)) as answers,
        sink(out) as stream,
    ):
        rows = write(answers, found, wanted, stream)
    tell(found, rows, out, context.settings())
    if left_out:
        raise typer.Exit(exits.FAILED)


def tell(job: "JobRecord", rows: int, out: Path | None, settings: Settings) -> None:
    """Say how many rows were written, and if that is not all of the job, its state as `conserve status` has it."""
    if rows < job.num_rows:
        so_far = f"{rows:,} of {output.count(job.num_rows, 'row')} so far"
        states = [reading.state for reading in read_jobs(settings, now=time.time(), only=[job.id])]
        state = states[0] if states else job.state
        goes_on = NEXT.get(state)
        go_on = f"; go on with: conserve {goes_on} {job.id}" if goes_on else ""
        output.say(f"job {job.id} is {state}: {so_far}{go_on}")
    if out is not None:
        output.say(f"wrote {output.count(rows, 'row')} to {path_or_url(out)}")


def path_or_url(out: Path) -> str:
    """Path or URL of a file."""
    from conserve.store.files.objects import object_at

    return str(object_at(out) or out)


def table_of(
    context: Context, job: str, kind: str | None, out: Path | None, *, with_inputs: bool, with_prompts: bool
) -> None:
    """Write the results into a folder that other programs read as a table; the job's earlier rows there go."""
    from conserve.cli.queries import answer
    from conserve.cli.signals import ended_in_order
    from conserve.store.files.objects import object_at
    from conserve.store.sql import tables

    if out is None or out.is_file():
        raise UsageError(f"--format {kind} writes a folder; name it with -o")
    found, asked = results_query(context.settings(), job, with_inputs=with_inputs, with_prompts=with_prompts)
    place, left_out = object_at(out) or out.absolute(), list["LeftOut"]()
    with ended_in_order(), answer(asked, lambda gap: accept(gap, left_out)) as answers:
        if kind == "delta":
            rows = tables.write_delta(answers, place, found.id)
        else:
            rows = tables.write_dataset(answers, place, found.id)
    tell(found, rows, out, context.settings())
    if left_out:
        raise typer.Exit(exits.FAILED)


def wanted_format(out: Path | None, name: str | None, *, as_json: bool, more: bool) -> "Format":
    """Format of the flags; `more` is True if they ask for more columns."""
    from conserve.store.sql.export import Format, format_of

    if name is not None and name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
    if name == Format.OPENAI and more:
        raise UsageError("--format openai has no place for --with-inputs or --with-prompts; use jsonl")
    form = format_of(out, Format(name) if name else Format.JSONL if as_json else None)
    if out is None and form is Format.PARQUET and sys.stdout.isatty():
        raise UsageError("Parquet does not belong on a terminal; name a file with -o")
    return form


def accept(gap: "LeftOut", left_out: "list[LeftOut]") -> None:
    """Warn of results that cannot be read; raise if joining with the missing part would drop others."""
    check_join(gap)
    output.warn(gap.sentence)
    left_out.append(gap)


def write(answers: "RowBatches", job: "JobRecord", form: "Format", stream: BinaryIO) -> int:
    """Write the results of the job in this format; returns the number of rows."""
    from conserve.jobs.task import Task
    from conserve.store.sql import export
    from conserve.store.sql.openai_lines import openai_line

    if form is not export.Format.OPENAI:
        return export.write(answers, stream, form)
    url = Task.from_json(job.task).url
    return export.write(answers, stream, form, lambda row: openai_line(row, url))
