"""Repair: recover a damaged job from what is left of it; a job that cannot be recovered fails alone.

Requests are rendered again and inputs copied again, if the input is as it was at submit. Lost results are computed
again (`store.upkeep.mending`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow.parquet as pq

from conserve.errors import UsageError
from conserve.jobs.inputs.files import FileFormat
from conserve.jobs.inputs.fingerprint import is_other
from conserve.jobs.inputs.keeping import Keep
from conserve.jobs.inputs.parquet_rows import ParquetRows
from conserve.jobs.inputs.source import Input, InputRows, Opened, open_input
from conserve.jobs.requests.admission import check_input
from conserve.jobs.requests.submit import write_requests
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.books.states import FailedBy
from conserve.store.database.store import Store
from conserve.store.files import digests, job_folders, layout, os_errors
from conserve.store.files.objects import FilePath, below
from conserve.store.files.place import place_of, scratch_of
from conserve.store.upkeep import checking, mending, records
from conserve.store.upkeep.damage import Damage, StorePart


def repair(store: Store, job_id: str, damages: Collection[Damage], *, now: float) -> list[str]:
    """Mend one job as far as possible; returns the changes in words."""
    parts = {damage.part for damage in damages}
    said = [records.mend(store, job_id, now=now)] if StorePart.RECORD in parts else []
    said += mending.mend_rows(store, job_id, now=now)
    with store.read() as tx:
        job = catalog.get(tx, job_id)
    if (lost := task_fault(job)) is not None:
        reason = f"what job {job.id} asks is lost ({lost}); submit it again"
        return said + fail(store, job, reason, FailedBy.LOSS, now)
    if parts & {StorePart.MARK, StorePart.RECORD}:
        said.append(records.mend_mark(store, job_id))
    if StorePart.INPUTS in parts:
        said += mend_inputs(store, job, now)
    if StorePart.REQUESTS in parts and not is_whole(layout.requests_file(store.data, job.id), job):
        said += mend_requests(store, job, now)
    return said + [f"job {job.id} is queued again"] * forgiven(store, job.id, now=now)


def forgiven(store: Store, job_id: str, *, now: float) -> bool:
    """Queue a job again that was refused for damage, if its requests are whole by now; returns True if it was.

    The requests are read before the transaction, which holds up other writers.
    """
    with store.read() as tx:
        job = catalog.get(tx, job_id)
    if job.failed_by is not FailedBy.DAMAGE or not is_whole(layout.requests_file(store.data, job_id), job):
        return False
    with store.write() as tx:
        return catalog.get(tx, job_id).files == job.files and catalog.forgive(tx, job_id, now=now)


def task_fault(job: catalog.JobRecord) -> str | None:
    """Fault of a job's task; None without one."""
    try:
        Task.from_json(job.task)
    except msgspec.MsgspecError as error:
        return str(error)
    return None


def mend_inputs(store: Store, job: catalog.JobRecord, now: float) -> list[str]:
    """Copy the input rows again."""
    path = layout.inputs_file(store.data, job.id)
    if is_whole(path, job):
        return []  # restored from the trash by now
    with job_folders.new(store.local, store.id) as folder:
        opened = open_again(job, folder, Keep.COPY)
        if opened is None:
            return []
        opened.copy_text(folder)
        replace(store, job, path, folder / layout.INPUTS, now)
    return [f"{below(path, store.data)} was copied from {job.source.path} again"]


def mend_requests(store: Store, job: catalog.JobRecord, now: float) -> list[str]:
    """Render the requests again; if that is not possible, a job with rows left to run fails."""
    path = layout.requests_file(store.data, job.id)
    source = render_again(store, job, path, now)
    if source is None:
        lost = f"the requests of job {job.id} are lost, and its input is not as it was; submit it again"
        return fail(store, job, lost, FailedBy.DAMAGE, now)
    return [f"{below(path, store.data)} was rendered from {source} again"]


def fail(store: Store, job: catalog.JobRecord, reason: str, by: FailedBy, now: float) -> list[str]:
    """Let a job that cannot run any more fail, if it has rows left to run; returns the reason if so."""
    reason += f", the {job.succeeded + job.failed:,} results it has stay"
    with store.write() as tx:
        failed = catalog.fail(tx, job.id, reason, by, now=now)
    return [reason] * failed


class RenderSource(NamedTuple):
    """Rows that a job's requests may be rendered from."""

    name: str
    rows: InputRows
    original: bool  # their fingerprint is that of the job's input


def render_sources(store: Store, job: catalog.JobRecord, folder: Path) -> Iterator[RenderSource]:
    """Yield the sources to render from: the input, if it is as it was, then the copy of its rows in the store."""
    if (opened := open_again(job, folder, Keep.REFERENCE)) is not None:
        yield RenderSource(str(job.source.path), opened.rows, True)
    path = layout.inputs_file(store.data, job.id)
    if job.source.copied and is_whole(path, job):
        with suppress(UsageError):
            name = below(path, store.data)
            yield RenderSource(name, ParquetRows(path, name), False)


def open_again(job: catalog.JobRecord, folder: Path, keep: Keep) -> Opened | None:
    """Open the job's input, kept in a scratch folder; None unless it is in its place and unchanged."""
    files = [] if job.source.path is None else job.source.files
    if not files or any(not Path(part.path).exists() or is_other(part, Path(part.path)) for part in files):
        return None
    form = FileFormat(job.source.format) if job.source.format in set(FileFormat) else None
    several = job.source.path != files[0].path  # but of their folder
    given = Input(names=[part.path for part in files], several=several, form=form, keep=keep)
    with suppress(UsageError):
        return open_input(given, folder, openai=Task.from_json(job.task).kind is Kind.OPENAI)
    return None


def render_again(store: Store, job: catalog.JobRecord, path: FilePath, now: float) -> str | None:
    """Render a job's requests from what is left of its input; returns the name of the source, None if none serves.

    A file that is the same byte for byte is accepted. From the original input, another version may have rendered
    the requests differently; then the new file need only fit the results that there are.
    """
    task = Task.from_json(job.task)
    with job_folders.new(store.local, store.id) as folder:
        for source in render_sources(store, job, folder):
            with suppress(UsageError), scratch_file(store, path) as scratch:
                check_input(source.rows, task, constant_prompt=True)
                write_requests(scratch, source.rows, task)
                seal = job.files.get(layout.REQUESTS)
                same = seal is not None and digests.seal(scratch) == seal
                if same or (source.original and fits(store, job, scratch)):
                    replace(store, job, path, scratch, now)
                    return source.name
    return None


def fits(store: Store, job: catalog.JobRecord, requests: Path) -> bool:
    """True if the results that there are answer the requests at their positions."""
    indexes = pq.read_table(requests, columns=["row_index"])["row_index"].to_numpy()
    if len(indexes) != job.num_rows:
        return False
    with store.read() as tx:
        positions, rows = mending.answered(tx, store.data, job.id)
    return bool(np.array_equal(indexes[positions], rows))


def is_whole(path: FilePath, job: catalog.JobRecord) -> bool:
    """True if a file of a job is undamaged."""
    return checking.file_fault(path, job.files.get(path.name)) is None


@contextmanager
def scratch_file(store: Store, path: FilePath) -> Iterator[Path]:
    """Yield a scratch file for `path`, whose folder is made if it is missing."""
    with os_errors.explained(store.data):
        place_of(path.parent).make_with_parents()
        with scratch_of(path.with_name(f".{path.name}"), store.local) as scratch:
            yield scratch


def replace(store: Store, job: catalog.JobRecord, path: FilePath, scratch: Path, now: float) -> None:
    """Put a file that was made anew in its place, and store its seal."""
    mending.throw_away(store, path, now)
    seal = digests.seal(scratch)
    place_of(path).write(scratch)
    with store.write() as tx:
        catalog.keep_seal(tx, job.id, path.name, seal)
