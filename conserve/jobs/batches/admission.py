"""Admission: a batch's input file becomes a job, once, whatever is killed meanwhile.

The transaction that adds the job binds the batch to it. A process that was killed before left a folder for the
sweep and a batch that still waits, and the next one begins again. Of two processes at one batch, the second is too
late and leaves nothing.
"""

import logging
from pathlib import Path

from conserve.endpoints.protocol import Url
from conserve.errors import StoreError, UsageError, one_line
from conserve.jobs.batches.lines import Limits, faults
from conserve.jobs.inputs.files import FileFormat
from conserve.jobs.inputs.source import Input
from conserve.jobs.requests.submit import slug, submit
from conserve.jobs.task import Kind, Order, Task
from conserve.store.books import batches, uploads
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import BatchRecord, InputFault, Overtaken
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.uploads import File
from conserve.store.database.migrations import DEFAULT_PROJECT
from conserve.store.database.store import Store
from conserve.store.files.place import place_of
from conserve.store.sql.query import TROUBLE

PASSING = (OSError, MemoryError, *TROUBLE)

log = logging.getLogger(__name__)


def admit(store: Store, batch_id: str, limits: Limits, *, now: float) -> None:
    """Validate the input of a batch and queue its job, or record why it has none."""
    if (waiting := find(store, batch_id, now=now)) is None:
        return
    _, upload = waiting
    if upload is None:
        refuse(store, batch_id, [gone()], now=now)
        return
    path = store.data / upload.path
    try:
        # A second process waits, and then finds nothing to do; in a bucket its job is overtaken.
        with place_of(path).alone():
            if (waiting := find(store, batch_id, now=now)) is not None:
                with place_of(path).fetched(store.local) as local:
                    queue(store, waiting[0], upload, local, limits, now=now)
    except PASSING as error:
        # A disk that is not there just now has not lost the upload.
        if path.exists() or not path.parent.is_dir():
            raise StoreError(
                f"the input of batch {batch_id} cannot be read now: {one_line(error)}"
            ) from error
        refuse(store, batch_id, [gone()], now=now)


def find(store: Store, batch_id: str, *, now: float) -> tuple[BatchRecord, File | None] | None:
    """The batch and its input, if it still waits for a job."""
    with store.read() as tx:
        found = batches.anywhere(tx, batch_id)
        if found is None or found.state is not BatchState.VALIDATING:
            return None
        return found, uploads.get(tx, found.project, found.file_id or "", now=now)


def queue(store: Store, found: BatchRecord, upload: File, path: Path, limits: Limits, *, now: float) -> None:
    """Queue the job of a batch whose input is on this machine, or refuse the input."""
    endpoint = Url(found.endpoint or Url.CHAT)
    if why := faults(path, endpoint, limits):
        refuse(store, found.id, why, now=now)
        return
    tags = {"batch": found.id}
    if found.project != DEFAULT_PROJECT:
        tags["project"] = found.project
    try:
        submit(
            store,
            Input(names=[str(path)], form=FileFormat.JSONL),
            Task(kind=Kind.OPENAI, url=endpoint, order=Order.PREFIX),
            JobTerms(
                name=slug(upload.filename.partition(".")[0]),
                tags=tags,
                deadline=found.created_at + found.window_s if found.window_s is not None else None,
                on_late=found.on_late,
            ),
            batch_id=found.id,
        )
    except Overtaken:
        log.info("batch %s was admitted by another process, or cancelled", found.id)
    except UsageError as error:
        if isinstance(error.__cause__, PASSING):
            raise error.__cause__ from error
        refuse(store, found.id, [InputFault(code="invalid_input", message=str(error))], now=now)


def refuse(store: Store, batch_id: str, why: list[InputFault], *, now: float) -> None:
    """Record why a batch's input cannot become a job."""
    with store.write() as tx:
        batches.refuse(tx, batch_id, why, now=now)


def gone() -> InputFault:
    """Fault of an input that was deleted, or has expired, before it was read."""
    said = "The input file was deleted before it was validated; upload it again."
    return InputFault(code="invalid_input_file", message=said, param="input_file_id")
