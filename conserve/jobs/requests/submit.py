"""Submit: from an input file to a queued job, all or nothing."""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from conserve.config import model_name
from conserve.errors import InputError, StoreError, TemplateError, UsageError
from conserve.jobs.inputs.cells import Unreadable
from conserve.jobs.inputs.groups import GROUP_BYTES, ROWS_PER_GROUP
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.openai_line import id_of_line
from conserve.jobs.inputs.source import Input, InputRows, Opened, open_input
from conserve.jobs.requests.admission import (
    check_input,
    check_task,
    check_terms,
    needed_columns,
)
from conserve.jobs.requests.external_sort import ExternalSort
from conserve.jobs.requests.file import SCHEMA, RequestWriter, to_table
from conserve.jobs.requests.order import SortKey, sort_key
from conserve.jobs.requests.rendering import RenderedRow, renderer
from conserve.jobs.task import Kind, Task
from conserve.store.books import batches, catalog
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.mounted import require_folders
from conserve.store.database.store import Store
from conserve.store.files import digests, job_folders, layout, os_errors
from conserve.store.sql.duplicates import first_duplicate

ADDED_WITHIN_S = 3600.0  # within that time the sweep takes no folder of a bucket
ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # no characters that look alike
LENGTH = 4  # of what is drawn for an id; of two submits that draw one, a folder refuses the second
LENGTH_IN_BUCKET = 12  # a bucket would take the second one's objects in place of the first one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job that is durable now. `unrendered` rows will end as failed rows without reaching an engine."""

    job_id: str
    rows: int
    unrendered: int
    first_row: int | None  # of the unrendered rows, in the input
    first_error: str | None  # its error
    kept: Keep  # where the input's rows lie
    namesakes: Sequence[str]  # earlier jobs whose ids begin with the same name


def submit(
    store: Store,
    given: Input,
    task: Task,
    terms: JobTerms,
    *,
    batch_id: str | None = None,
    constant_prompt: bool = False,
    check_rows: Callable[[int], None] = lambda rows: None,
    before_queueing: Callable[[], object] = lambda: None,
) -> Submitted:
    """Render every row of the input and queue the job; on any error nothing is left behind.

    `check_rows` is called with the number of rows, and may raise; `before_queueing` once only the queueing is left.
    With `batch_id` the job is that batch's; raises `Overtaken` if the batch needs none any more.
    """
    if store.in_bucket and given.keep is not Keep.REFERENCE:
        given = replace(given, keep=Keep.COPY)  # a link would be to a file of this machine
    check_task(task)
    check_terms(terms)
    with store.read() as tx:
        require_folders(tx, store.data)
    with job_folders.new(store.local, store.id) as folder:
        with os_errors.explained(store.data):
            opened = open_input(given, folder, openai=task.kind is Kind.OPENAI)
        check_input(opened.rows, task, constant_prompt=constant_prompt)
        with os_errors.explained(store.data):
            written = write_requests(folder / layout.REQUESTS, opened.rows, task)
            if written.unrendered == written.rows and batch_id is None:  # a batch's file of errors names each
                raise nothing_to_send(written, task)
            opened.copy_text(folder)
        check_ids(folder / layout.REQUESTS, task)
        check_rows(written.rows)
        before_queueing()
        name = slug(given.label if terms.name is None else terms.name)
        terms = replace(terms, model=model_name(terms.model) if terms.model else None)
        return enqueue(store, name, folder, opened, task, written, terms, batch_id)


def write_requests(path: Path, rows: InputRows, task: Task) -> RequestWriter:
    """Render all rows into the job's request file, in execution order."""
    with RequestWriter(path) as writer:
        for table in in_order(rows, task, path.parent):
            writer.write(table)
    if writer.rows == 0:
        raise no_rows()
    return writer


def no_rows() -> InputError:
    """Error for an input without rows."""
    return InputError("the input has no rows; nothing was submitted")


def nothing_to_send(writer: RequestWriter, task: Task) -> UsageError:
    """Error for an input of which no row can be answered."""
    first = f"row {writer.first_row:,}: {writer.first_error}"
    if task.kind is Kind.PROMPT:
        return TemplateError(f"the template fails on every row ({first}); correct it and submit again")
    return InputError(f"no row can be answered ({first}); correct the input and submit again")


def in_order(rows: InputRows, task: Task, folder: Path) -> Iterator[pa.Table]:
    """Yield the rendered requests in execution order, some at a time; data beyond memory goes to `folder`."""
    key = sort_key(task)
    if key is None:
        yield from rendered_tables(rows, task, key)
        return
    with ExternalSort(folder, key.column) as sorting:
        for table in rendered_tables(rows, task, key):
            sorting.write(table)
        for table in sorting.rows():
            yield table.select(SCHEMA.names)


def rendered_tables(rows: InputRows, task: Task, key: SortKey | None) -> Iterator[pa.Table]:
    """Yield the requests of all rows in input order, with their sort keys."""
    index = 0
    for ids, rendered in rendered_groups(rows, task):
        table = to_table(range(index, index + len(rendered)), ids, rendered)
        if key is not None and key.of is not None:
            table = table.append_column(key.column, pa.array(map(key.of, rendered), key.kind))
        yield table
        index += len(rendered)


def rendered_groups(rows: InputRows, task: Task) -> Iterator[tuple[list[str | None], list[RenderedRow]]]:
    """Yield custom ids and requests of all rows, as many at a time as fill a row group."""
    # A template or a text that many rows share makes requests far larger than the rows that were read.
    render = renderer(task)
    id_column = id_column_of(task)
    ids: list[str | None] = []
    rendered: list[RenderedRow] = []
    size = 0
    every = (row for batch in rows.batches(needed_columns(task, rows)) for row in batch)
    for index, row in enumerate(every):
        ids.append(custom_id(row[id_column], index, task) if id_column else None)
        rendered.append(one := render(row))
        size += len(one.payload or "")
        if len(rendered) == ROWS_PER_GROUP or size >= GROUP_BYTES:
            yield ids, rendered
            ids, rendered, size = [], [], 0
    if rendered:
        yield ids, rendered


def id_column_of(task: Task) -> str | None:
    """Column of the rows' custom ids; None if there is none."""
    return "custom_id" if task.kind is Kind.OPENAI else task.id_column


def custom_id(value: object, row_index: int, task: Task) -> str | None:
    """Custom id of a row as text; raises `InputError` if it cannot be read."""
    if task.kind is Kind.OPENAI:
        value = id_of_line(value)
    if isinstance(value, Unreadable):
        raise InputError(f"the id of row {row_index:,} is {value.reason}; correct it and submit again")
    return None if value is None else str(value)


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
    name: str,
    folder: Path,
    opened: Opened,
    task: Task,
    written: RequestWriter,
    terms: JobTerms,
    batch_id: str | None,
) -> Submitted:
    """Give the job its id and put folder and database row in place, in this order.

    A crash between the two leaves a folder that no record names; the sweep moves it to the trash.
    """
    with store.read() as tx:
        namesakes = catalog.named(tx, name)
        drawn = new_ids(name, length=LENGTH_IN_BUCKET if store.in_bucket else LENGTH)
        free = (i for i in drawn if not catalog.taken(tx, i))
        job_id = next(i for i in free if not layout.job_folder(store.data, i).exists())  # another store's
    with os_errors.explained(store.data):
        files = digests.seals([folder / layout.REQUESTS, folder / layout.INPUTS])
    job_folders.adopt(folder, store.data, job_id)
    now = time.time()
    try:
        with store.write() as tx:
            store.check_place(tx)
            catalog.lock_ids(tx)
            if time.time() - now > ADDED_WITHIN_S:
                raise StoreError("the database took too long to answer; submit again")
            catalog.add(
                tx,
                job_id,
                terms,
                task=task.to_json(),
                source=opened.source,
                num_rows=written.rows,
                now=now,
                files=files,
            )
            if batch_id is None:
                batches.of_submitted(tx, job_id, now=now)
            else:
                batches.bind(tx, batch_id, job_id, now=now)
            record = catalog.record(tx, job_id)
    except BaseException:
        discard_unregistered(store, job_id)
        raise
    job_folders.register(layout.job_folder(store.data, job_id), store.id, record)
    return Submitted(
        job_id=job_id,
        rows=written.rows,
        unrendered=written.unrendered,
        first_row=written.first_row,
        first_error=written.first_error,
        kept=opened.kept,
        namesakes=namesakes,
    )


def discard_unregistered(store: Store, job_id: str) -> None:
    """Remove the folder of a job that was not added; if that is not certain, it is left to the sweep."""
    with suppress(StoreError), store.write() as tx:
        catalog.lock_ids(tx)
        if not catalog.taken(tx, job_id):
            job_folders.discard(store.data, job_id)


def slug(label: str) -> str:
    """Short name for a job: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:24].strip("-") or "job"


def new_ids(name: str, *, length: int = LENGTH) -> Iterator[str]:
    """Yield ids to try: the name and so many random characters."""
    while True:
        yield f"{name}-{''.join(secrets.choice(ALPHABET) for _ in range(length))}"
