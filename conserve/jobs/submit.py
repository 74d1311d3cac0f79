"""Submit: from an input file to a queued job, all or nothing."""

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from conserve.config import model_name
from conserve.errors import InputError, StoreError, TemplateError, UsageError
from conserve.jobs.cells import Unreadable
from conserve.jobs.external_sort import ExternalSort
from conserve.jobs.nesting import MAX_DEPTH, is_deeper
from conserve.jobs.order import SortKey, sort_key
from conserve.jobs.rendering import renderer, template_names
from conserve.jobs.request_fault import DECIDED, parameter_fault
from conserve.jobs.request_file import SCHEMA, RequestWriter, to_table
from conserve.jobs.source import STDIN, JsonLines, Opened, Rows, check_columns, open_input, spool
from conserve.jobs.task import Kind, Task
from conserve.store import catalog, digests, home, marks
from conserve.store.query import first_duplicate
from conserve.store.store import Store

LOWEST, HIGHEST = -(2**31), 2**31 - 1  # priorities: 32 bits in every database
ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # nothing that looks like something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job that is durable now. `unrendered` rows will end as failed rows without reaching an engine."""

    job_id: str
    rows: int
    unrendered: int
    first_row: int | None  # of the unrendered ones, in the input
    first_error: str | None  # its error


def submit(
    store: Store,
    input_path: str,
    task: Task,
    *,
    name: str | None = None,
    priority: int = 0,
    on_rows: Callable[[int], None] | None = None,
    model: str | None = None,
    constant_prompt: bool = False,
    before_queueing: Callable[[], object] = lambda: None,
) -> Submitted:
    """Render every row of the input and queue the job; on any error nothing is left behind.

    `before_queueing` is called when all that is left is to queue what has been made.
    """
    check_words(task)
    check_parameters(task)
    check_priority(priority)
    with home.new_job_folder(store.home, store.id) as folder:
        from_stdin = input_path == STDIN
        with home.explained(store.home):
            path = spool(sys.stdin.buffer, folder) if from_stdin else Path(input_path)
        opened = open_input(path, from_stdin=from_stdin, openai=task.kind is Kind.OPENAI)
        check_task(opened.rows, task)
        if not constant_prompt:
            check_names_something(task)
        with home.explained(store.home):
            written = write_requests(folder / home.REQUESTS, opened.rows, task, on_rows)
            copy_inputs(opened, path, folder)
        check_ids(folder / home.REQUESTS, task)
        before_queueing()
        return enqueue(
            store,
            folder,
            opened,
            task,
            written,
            name=name or slug(input_path),
            priority=priority,
            model=model_name(model) if model else None,
        )


def check_words(task: Task) -> None:
    """Raise if the task holds what the store cannot keep as JSON."""
    try:
        task.to_json()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the prompt, a name or a parameter is not UTF-8; write it again in UTF-8 and submit again"
        ) from error
    if is_deeper(task.params, MAX_DEPTH):
        raise UsageError(
            f"a parameter or the schema nests too deep: more than {MAX_DEPTH} levels; flatten it"
        )


def check_parameters(task: Task) -> None:
    """Raise for parameters with which no row could be answered."""
    for name, instead in DECIDED.items():
        if name in task.params:
            raise UsageError(f"{name} is no parameter of a job; {instead}")
    route = "" if task.kind is Kind.OPENAI else task.url  # each line names its own
    if fault := parameter_fault(route, task.params):
        raise UsageError(f"{fault}; correct it and submit again")


def check_names_something(task: Task) -> None:
    """Raise for a template that would ask every row the same."""
    if task.kind is Kind.PROMPT and not template_names(task.template or ""):
        raise TemplateError(
            "the template names no column, so every row would ask the same; write {{ column }} where the row's "
            "text belongs, or give --constant-prompt"
        )


def check_priority(priority: int) -> None:
    """Raise for a priority that some database cannot hold."""
    if not LOWEST <= priority <= HIGHEST:
        raise UsageError(f"--priority goes from {LOWEST:,} to {HIGHEST:,}, not {priority}")


def check_task(rows: Rows, task: Task) -> None:
    """Raise if the task names columns that are not there or are of the wrong type."""
    if task.kind is Kind.PROMPT:
        check_columns(rows, sorted(template_names(task.template or "")), what="the template")
    if task.column is not None:
        check_columns(rows, [task.column], what="--messages")
    if task.id_column is not None:
        check_columns(rows, [task.id_column], what="--id")
    rows.check(task)


def needed_columns(task: Task, rows: Rows) -> list[str]:
    """The columns that rendering reads."""
    if task.kind is Kind.OPENAI:
        return list(rows.columns)
    names = template_names(task.template or "") if task.kind is Kind.PROMPT else {task.column or ""}
    if task.id_column is not None:
        names.add(task.id_column)
    return [name for name in rows.columns if name in names]


def write_requests(
    path: Path, rows: Rows, task: Task, on_rows: Callable[[int], None] | None = None
) -> RequestWriter:
    """Render all rows into the job's request file, in the order in which they are to run."""
    with RequestWriter(path) as writer:
        for table in in_order(rows, task, path.parent, on_rows or (lambda rows: None)):
            writer.write(table)
    if writer.rows == 0:
        raise InputError("the input has no rows; nothing was submitted")
    if writer.unrendered == writer.rows:
        raise nothing_to_send(writer, task)
    return writer


def nothing_to_send(writer: RequestWriter, task: Task) -> UsageError:
    """The error for an input of which no row can be answered."""
    first = f"row {writer.first_row:,}: {writer.first_error}"
    if task.kind is Kind.PROMPT:
        return TemplateError(f"the template fails on every row ({first}); correct it and submit again")
    return InputError(f"no row can be answered ({first}); correct the input and submit again")


def in_order(rows: Rows, task: Task, folder: Path, on_rows: Callable[[int], None]) -> Iterator[pa.Table]:
    """The rendered requests in execution order, some at a time; `folder` takes what memory does not hold."""
    key = sort_key(task)
    if key is None:
        yield from rendered_tables(rows, task, key, on_rows)
        return
    with ExternalSort(folder, key.column) as sorting:
        for table in rendered_tables(rows, task, key, on_rows):
            sorting.write(table)
        for table in sorting.rows():
            yield table.select(SCHEMA.names)


def rendered_tables(
    rows: Rows, task: Task, key: SortKey | None, on_rows: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Every row's request, as they come, with what it is to be sorted by."""
    render = renderer(task)
    id_column = "custom_id" if task.kind is Kind.OPENAI else task.id_column
    index = 0
    for batch in rows.batches(needed_columns(task, rows)):
        ids = [
            custom_id(row[id_column], n) if id_column else None for n, row in enumerate(batch, start=index)
        ]
        rendered = [render(row) for row in batch]
        table = to_table(range(index, index + len(batch)), ids, rendered)
        if key is not None and key.of is not None:
            table = table.append_column(key.column, pa.array(map(key.of, rendered), key.kind))
        yield table
        index += len(batch)
        on_rows(index)


def custom_id(value: object, row_index: int) -> str | None:
    """A row's own name as text; raises for one that cannot be read."""
    if isinstance(value, Unreadable):
        raise InputError(f"the id of row {row_index:,} is {value.reason}; correct it and submit again")
    return None if value is None else str(value)


def copy_inputs(opened: Opened, path: Path, folder: Path) -> None:
    """Keep the input rows with the job, where the input file cannot be queried in place or will be gone."""
    if not opened.source.copied:
        return
    if isinstance(opened.rows, JsonLines):
        opened.rows.copy_to(folder / home.INPUTS)
        if opened.source.path is None:
            path.unlink()
    else:
        path.rename(folder / home.INPUTS)


def check_ids(requests: Path, task: Task) -> None:
    """Raise if two rows have one custom id."""
    if task.kind is not Kind.OPENAI and task.id_column is None:
        return
    duplicate = first_duplicate(requests, "custom_id")
    if duplicate is not None:
        raise InputError(
            f"custom id {duplicate.value!r} is on {duplicate.times} rows; make the ids unique and submit again"
        )


def enqueue(
    store: Store,
    folder: Path,
    opened: Opened,
    task: Task,
    written: RequestWriter,
    *,
    name: str,
    priority: int,
    model: str | None,
) -> Submitted:
    """Give the job its id and put folder and database row in place, in this order.

    A crash between the two leaves a folder that no job names; `sweep` moves it to the trash.
    """
    with store.read() as tx:
        free = (i for i in new_ids(name) if not catalog.taken(tx, i))
        job_id = next(i for i in free if not home.job_folder(store.home, i).exists())  # another store's
    with home.explained(store.home):
        files = digests.seals([folder / home.REQUESTS, folder / home.INPUTS])
    home.adopt(folder, store.home, job_id)
    try:
        with store.write() as tx:
            catalog.lock_ids(tx)
            catalog.add(
                tx,
                job_id=job_id,
                task=task.to_json(),
                source=opened.source,
                num_rows=written.rows,
                priority=priority,
                now=time.time(),
                files=files,
                model=model,
            )
            record = catalog.record(tx, job_id)
    except BaseException:
        discard_unregistered(store, job_id)
        raise
    marks.register(home.job_folder(store.home, job_id), store.id, record)
    return Submitted(
        job_id=job_id,
        rows=written.rows,
        unrendered=written.unrendered,
        first_row=written.first_row,
        first_error=written.first_error,
    )


def discard_unregistered(store: Store, job_id: str) -> None:
    """Remove the folder of a job that did not come to be; where that is not certain, a sweep will look."""
    with suppress(StoreError), store.write() as tx:
        catalog.lock_ids(tx)
        if not catalog.taken(tx, job_id):
            home.discard_job(store.home, job_id)


def slug(input_path: str) -> str:
    """A short name for the job from its file's name."""
    stem = "stdin" if input_path == STDIN else Path(input_path).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:24].strip("-") or "job"


def new_ids(name: str) -> Iterator[str]:
    """Ids to try: the name and four random characters."""
    while True:
        yield f"{name}-{''.join(secrets.choice(ALPHABET) for _ in range(4))}"
