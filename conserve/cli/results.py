"""`conserve results`: a job's answers as a file."""

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids
from conserve.errors import UsageError

if TYPE_CHECKING:
    from conserve.store.catalog import Job
    from conserve.store.damage import Damage
    from conserve.store.export import Format
    from conserve.store.store import Store

EXAMPLE = """
conserve results last
conserve results gsm8k-k3f9 -o answers.parquet --with-inputs
conserve results gsm8k-k3f9 --format openai > output.jsonl
"""

FORMATS = ("parquet", "jsonl", "csv", "openai")


def results(
    ctx: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="A job's id, the beginning of one, or last.", autocompletion=job_ids
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; its ending names the format.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(metavar="|".join(FORMATS), help="jsonl unless the file's ending says otherwise."),
    ] = None,
    with_inputs: Annotated[
        bool, typer.Option("--with-inputs", help="Add the input's own columns to every row.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format jsonl.")] = False,
) -> None:
    """Write the answers a job has so far, in the order of its input rows."""
    from conserve.store import catalog
    from conserve.store.export import Format, format_of

    if format is not None and format not in FORMATS:
        raise UsageError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    if format == "openai" and with_inputs:
        raise UsageError("--format openai has no place for --with-inputs; use jsonl")
    wanted = format_of(out, Format(format) if format else Format.JSONL if as_json else None)
    if out is None and wanted is Format.PARQUET and sys.stdout.isatty():
        raise UsageError("Parquet does not belong on a terminal; name a file with -o")
    context: Context = ctx.obj
    with context.store() as store:
        with store.read() as tx:
            found = catalog.get(tx, job)
        damages: list[Damage] = []
        with sink(out) as stream:
            rows = write(store, found, wanted, stream, with_inputs=with_inputs, damages=damages)
    if rows < found.num_rows:
        so_far = f"{rows:,} of {output.count(found.num_rows, 'row')} so far"
        output.say(f"job {found.id} is {found.state}: {so_far}")
    if out is not None:
        output.say(f"wrote {output.count(rows, 'row')} to {out}")
    for damage in damages:
        output.say(f"warning: results are left out: {damage.sentence}")
    if damages:
        raise typer.Exit(exits.FAILED)


def write(
    store: "Store",
    job: "Job",
    wanted: "Format",
    stream: BinaryIO,
    *,
    with_inputs: bool,
    damages: "list[Damage]",
) -> int:
    """Write the job's results in the wanted format; returns the number of rows, and what is left out."""
    from conserve.jobs.task import Task
    from conserve.store import export
    from conserve.store.query import views

    with views(store, now=time.time(), only=[job.id], sealed=False) as opened:
        damages += opened.damages
        if with_inputs and opened.left_out:
            raise UsageError(
                f"the inputs cannot be joined: {opened.left_out[0].reason}; leave out --with-inputs"
            )
        if wanted is export.Format.OPENAI:
            url = Task.from_json(job.task).url
            answer = export.with_urls(opened.duck, store, job.id)
            return export.write_lines(answer, stream, lambda row: export.openai_line(row, url))
        answer = export.ordered(opened.duck, job.id, with_inputs=with_inputs)
        if wanted is export.Format.PARQUET:
            return export.write_parquet(answer, stream)
        if wanted is export.Format.CSV:
            return export.write_csv(answer, stream)
        return export.write_lines(answer, stream)


@contextmanager
def sink(path: Path | None) -> Iterator[BinaryIO]:
    """Where the bytes go: stdout, or a file that appears whole or not at all."""
    from conserve.store.home import explained, write_durably

    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"there is no folder {path.absolute().parent} to write {path.name} to; make it first"
        )
    with explained(path):
        if path.exists() and not path.is_file():  # a pipe or a device takes no renaming
            with path.open("wb") as stream:
                yield stream
            return
        scratch = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:6]}")
        try:
            with scratch.open("wb") as stream:
                yield stream
            write_durably(path, scratch)
        finally:
            scratch.unlink(missing_ok=True)
