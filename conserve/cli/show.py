"""`conserve show`: one row, with its prompt, its answer and its place."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.options import JOB
from conserve.cli.suggestions import at_home
from conserve.errors import UsageError

if TYPE_CHECKING:
    from conserve.jobs.requests.lookup import FoundRequest
    from conserve.store.books.catalog import JobRecord
    from conserve.store.books.results import Result
    from conserve.store.books.standing import RowStanding

EXAMPLE = """
conserve show last 0
conserve show gsm8k-k3f9 --id question-17
conserve show gsm8k-k3f9 17 --json
"""


def show(
    ctx: typer.Context,
    job: Annotated[str, JOB],
    row: Annotated[
        int | None, typer.Argument(metavar="ROW", min=0, help="Row of the input file, from 0.")
    ] = None,
    id: Annotated[
        str | None, typer.Option(metavar="CUSTOM_ID", help="The row's own id, instead of ROW.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show one row: what was asked, the answer or the error, its times, and where it is now."""
    from conserve.jobs.requests.lookup import find_request
    from conserve.store.books import catalog
    from conserve.store.books.standing import standing

    if (row is None) == (id is None):
        raise UsageError("name one row: conserve show JOB ROW, or conserve show JOB --id CUSTOM_ID")
    context: Context = ctx.obj
    with context.store_to_read() as store:
        with store.read() as tx:
            found = catalog.get(tx, job)
        question = find_request(store, found, row_index=row, custom_id=id)
        stands = standing(store, found, question.position)
    if as_json:
        output.data_json(document(found, question, stands))
    else:
        output.data("\n".join(lines(found, question, stands)))


def document(job: "JobRecord", question: "FoundRequest", stands: "RowStanding") -> dict[str, Any]:
    """Row as JSON (docs/reference/json.md)."""
    from conserve.store.books.results import COLUMNS, DOCUMENTS, TIMES

    values = {name: getattr(stands.result, name, None) for name in COLUMNS}
    for name in TIMES:
        values[name] = output.iso(values[name])
    for name in DOCUMENTS:
        values[name] = json.loads(values[name] or "null")
    return values | {
        "job_id": job.id,
        "row_index": question.request.row_index,
        "custom_id": question.request.custom_id,
        "position": question.position,
        "state": stands.state,
        "where": stands.where,
        "attempts": stands.attempts,
        "body": None if question.body is None else json.loads(question.body),
        "prompt": question.prompt,
        "submitted_at": output.iso(job.submitted_at),
        "error_type": values["error_type"] or question.request.error_type,
        "error": values["error"] or question.request.error,
    }


def lines(job: "JobRecord", question: "FoundRequest", stands: "RowStanding") -> list[str]:
    """Lines on the row for a reader."""
    from conserve.store.books.too_long import TOO_LONG, helps_too_long

    result = stands.result
    head = [
        f"{job.id} row {question.request.row_index:,}: {output.state(stands.state)}",
        f"  where     {visible(at_home(stands.where))}",
        f"  id        {visible(question.request.custom_id or '-')}",
        f"  position  {question.position:,}",
        f"  attempts  {stands.attempts:,}",
        *(result_lines(result) if result is not None else [f"  submitted {output.moment(job.submitted_at)}"]),
    ]
    error = (result.error if result is not None else None) or question.request.error
    kind = (result.error_type if result is not None else None) or question.request.error_type
    parts = [head, section("prompt", question.prompt)]
    parts += [section("answer", answer(result))] if result is not None and not result.failed else []
    parts += [section(f"error ({kind})", error)] if kind else []
    parts += [section("what helps", at_home(helps_too_long(job.id)))] if kind == TOO_LONG else []
    return [line for part in parts for line in part]


def result_lines(result: "Result") -> list[str]:
    """Lines with times and counts of a finished row."""
    took = output.duration(max(0.0, result.finished_at - result.started_at))
    tokens = f"{result.prompt_tokens:,} prompt ({result.cached_tokens:,} cached)"
    tokens += f", {result.completion_tokens:,} completion ({result.resumed_tokens:,} resumed after a stop)"
    return [
        f"  submitted {output.moment(result.submitted_at)}",
        f"  started   {output.moment(result.started_at)}",
        f"  finished  {output.moment(result.finished_at)} (after {took})",
        f"  model     {visible(result.model or '-')}",
        f"  tokens    {tokens}",
        f"  ended by  {visible(result.finish_reason or '-')}",
    ]


def answer(result: "Result") -> str | None:
    """Text of the answer, or of all answers if there are several."""
    if result.choices is None:
        return result.text
    texts = [choice.get("text") for choice in json.loads(result.choices)]
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(texts))


def section(title: str, text: str | None) -> list[str]:
    """Heading and text; no lines without a text."""
    if text is None:
        return []
    return ["", output.coloured(f"{title}:", "bright_black"), visible(text)]


def visible(text: str) -> str:
    """Text with its control characters spelled out if stdout is a terminal."""
    return output.visible(text, sys.stdout)
