"""Preview of a job that is not queued: its first requests, as they would be sent."""

import sys
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from conserve.endpoints.protocol import Url
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.source import Input, open_input
from conserve.jobs.requests.admission import check_input, check_task, needed_columns
from conserve.jobs.requests.rendering import Renderer, renderer
from conserve.jobs.requests.submit import custom_id, id_column_of, no_rows
from conserve.jobs.task import Kind, Task


class Preview(NamedTuple):
    """One row's request, or the reason why it has none."""

    row_index: int
    custom_id: str | None
    url: Url
    body: dict[str, Any] | None
    error: str | None


def previews(given: Input, task: Task, rows: int, *, constant_prompt: bool = False) -> list[Preview]:
    """Render the first rows of the input; raises what `submit` raises, but for errors of rows."""
    check_task(task)
    with tempfile.TemporaryDirectory(prefix="conserve-preview-") as scratch:
        in_place = replace(given, keep=Keep.REFERENCE)
        opened = open_input(in_place, Path(scratch), openai=task.kind is Kind.OPENAI)
        check_input(opened.rows, task, constant_prompt=constant_prompt)
        batches = opened.rows.batches(needed_columns(task, opened.rows))
        first = list(islice((row for batch in batches for row in batch), min(rows, sys.maxsize)))
        if not first:
            raise no_rows()
        render = renderer(task)
        return [preview(number, row, task, render) for number, row in enumerate(first)]


def preview(row_index: int, row: dict[str, Any], task: Task, render: Renderer) -> Preview:
    """Render one row."""
    column = id_column_of(task)
    named = custom_id(row[column], row_index, task) if column else None
    rendered = render(row)
    if rendered.payload is None:
        return Preview(row_index, named, task.url, None, rendered.error)
    return Preview(row_index, named, Url(rendered.url or task.url), task.body(rendered.payload), None)
