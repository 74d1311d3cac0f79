"""`conserve sql`: SQL over jobs, results and inputs."""

import sys
import time
from decimal import Decimal
from typing import Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context, job_ids

EXAMPLE = """
conserve sql "select finish_reason, count(*) from results group by 1"
conserve sql "select i.question, r.text from results r join inputs i using (job_id, row_index) limit 3"
conserve sql "describe inputs"
"""

CELL_WIDTH = 60
SHOWN_ROWS = 100


def sql(
    ctx: typer.Context,
    query: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT, DESCRIBE or SUMMARIZE; - reads it from stdin.")
    ],
    job: Annotated[
        list[str] | None, typer.Option(help="Only this job's rows; may be repeated.", autocompletion=job_ids)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header.")] = False,
) -> None:
    """Query the views jobs, results and inputs with DuckDB; nothing else can be read or written."""
    from conserve.store import catalog, export
    from conserve.store.query import ask, views

    context: Context = ctx.obj
    with context.store() as store:
        with store.read() as tx:
            only = [catalog.get(tx, name).id for name in job] if job else None
        with views(store, now=time.time(), only=only) as opened:
            for left_out in opened.left_out:
                output.say(f"warning: the view inputs leaves out job {left_out.job_id}: {left_out.reason}")
            for damage in opened.damages:
                output.say(f"warning: the view results leaves out rows: {damage.sentence}")
            answer = ask(opened.duck, sys.stdin.read() if query == "-" else query)
            if as_json:
                export.write_lines(answer, sys.stdout.buffer)
            elif as_csv:
                export.write_csv(answer, sys.stdout.buffer)
            else:
                show(answer)
            if opened.damages:
                raise typer.Exit(exits.FAILED)


def show(answer: Any) -> None:
    """The first rows as a table; long values are cut, on a terminal and off it alike."""
    found = answer.limit(SHOWN_ROWS + 1).to_arrow_table()
    header = found.column_names
    rows = list(zip(*(column.to_pylist() for column in found.columns), strict=True))
    figures = [n for n, column in enumerate(zip(*rows, strict=True)) if all(is_figure(v) for v in column)]
    table = [[cell(value) for value in row] for row in rows[:SHOWN_ROWS]]
    output.data("\n".join(output.columns(header, table, right=figures)))
    if len(rows) > SHOWN_ROWS:
        output.say(f"(the first {SHOWN_ROWS} rows; --json or --csv gives them all)")


def is_figure(value: Any) -> bool:
    """Whether a value lines up at the right."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """A value on one line of a table."""
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"
