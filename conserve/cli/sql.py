"""`conserve sql`: SQL over jobs, results, inputs and requests."""

import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.api.queries import sql_query
from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids
from conserve.errors import UsageError

if TYPE_CHECKING:
    from conserve.store.sql.batches import RowBatches
    from conserve.store.sql.export import Format
    from conserve.store.sql.readable import LeftOut

EXAMPLE = """
conserve sql "select finish_reason, count(*) from results group by 1"
conserve sql "select i.question, r.text from results r join inputs i using (job_id, row_index) limit 3"
conserve sql --with gold=gold.csv -o right.parquet "select * from results join gold using (custom_id)"
conserve sql "describe inputs"
"""

CELL_WIDTH = 60
SHOWN_ROWS = 100


def sql(
    ctx: typer.Context,
    query: Annotated[
        str,
        typer.Argument(
            metavar="SQL", help="One SELECT, PIVOT, DESCRIBE or SUMMARIZE; - reads it from stdin."
        ),
    ],
    job: Annotated[
        list[str] | None, typer.Option(help="Only this job's rows; may be repeated.", autocompletion=job_ids)
    ] = None,
    named: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="NAME=PATH", help="A Parquet, CSV or JSONL file to join; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; .parquet, .csv or .jsonl.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory it may take, as 2GiB (CONSERVE_SQL_MEMORY)."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.0, help="Longest it may compute; 0: no bound (CONSERVE_SQL_TIMEOUT_S)."
        ),
    ] = None,
) -> None:
    """Query jobs, results, inputs, requests and evaluations with DuckDB; nothing else can be read or written."""
    from conserve.cli.queries import answer, say_left_out
    from conserve.cli.signals import ended_in_order
    from conserve.cli.sink import named_file, sink
    from conserve.store.sql import export

    lost: list[LeftOut] = []

    def warn(gap: "LeftOut") -> None:
        say_left_out(gap)
        if gap.damaged:
            lost.append(gap)

    out = named_file(out)
    wanted = wanted_format(out, as_json=as_json, as_csv=as_csv)
    text = sys.stdin.read() if query == "-" else query
    context: Context = ctx.obj
    settings = context.settings(sql_memory=memory, sql_timeout_s=timeout)
    asked = sql_query(settings, text, jobs=job, named=named or (), limit=None if wanted else SHOWN_ROWS + 1)
    with ended_in_order(), answer(asked, warn) as rows:
        if wanted is None:
            show(rows)
        else:
            with sink(out) as stream:
                count = export.write(rows, stream, wanted)
            if out is not None:
                output.say(f"wrote {output.count(count, 'row')} to {out}")
    if lost:
        raise typer.Exit(exits.FAILED)


def wanted_format(out: Path | None, *, as_json: bool, as_csv: bool) -> "Format | None":
    """Format of the answer; None for a table."""
    from conserve.store.sql.export import SUFFIXES, Format

    if as_json and as_csv:
        raise UsageError("give --json or --csv, not both")
    named = SUFFIXES.get(out.suffix.lower()) if out is not None else None
    flagged = Format.JSONL if as_json else Format.CSV if as_csv else None
    if out is not None and named is None and flagged is None:
        raise UsageError(f"-o {out} does not say how to write; end it in .parquet, .csv or .jsonl")
    if flagged and named and flagged is not named:
        flag = "--json" if as_json else "--csv"
        raise UsageError(
            f"{out} ends as {named} does, and {flag} asks for {flagged}; rename it, or leave {flag} out"
        )
    return flagged or named


def show(rows: "RowBatches") -> None:
    """Print the first rows as a table; long values are cut, on a terminal and elsewhere."""
    found = list(rows.tuples())
    figures = [n for n, column in enumerate(zip(*found, strict=True)) if all(is_figure(v) for v in column)]
    table = [[cell(value) for value in row] for row in found[:SHOWN_ROWS]]
    header = [output.visible(name, sys.stdout) for name in rows.schema.names]
    output.data("\n".join(output.columns(header, table, right=figures)))
    if len(found) > SHOWN_ROWS:
        output.say(f"(the first {SHOWN_ROWS} rows; --json, --csv or -o give them all)")


def is_figure(value: Any) -> bool:
    """True if a value is aligned at the right."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """A value on one line of a table."""
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    text = text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"
    return output.visible(text, sys.stdout)
