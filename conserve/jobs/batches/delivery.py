"""Delivery: the results of a job that ended become a file of answers and a file of errors, in OpenAI's lines.

The files lie in the job's folder and go with it. They are made from the results, which stay the only truth: a job
whose failed rows are tried again is delivered again, under new names.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from conserve.errors import StoreDamaged, StoreError, StoreUnreachable
from conserve.jobs.task import Task
from conserve.store.books import batches, uploads
from conserve.store.books.batches import BatchRecord
from conserve.store.books.states import JobState
from conserve.store.books.uploads import NewFile
from conserve.store.database.store import Store
from conserve.store.files import layout, os_errors
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, below
from conserve.store.files.place import place_of
from conserve.store.sql import export
from conserve.store.sql.batches import rows_of
from conserve.store.sql.openai_lines import expired_line, openai_line
from conserve.store.sql.query import Views, views

PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file of lines that is whole on disk."""

    id: str
    path: FilePath
    bytes: int
    num_lines: int
    digest: str


def deliver(store: Store, batch_id: str, *, now: float) -> None:
    """Write the files of a batch whose job has ended, unless they are there."""
    found = to_deliver(store, batch_id)
    if found is None or found.job is None:
        return
    if found.job.state is not JobState.COMPLETED:
        with store.write() as tx:
            batches.fence(tx, found.job.id)
    folder = layout.job_folder(store.data, found.job.id)
    if not folder.is_dir():
        raise StoreDamaged(
            f"the folder of job {found.job.id} is gone; run: conserve check", job_id=found.job.id
        )
    with (
        os_errors.explained(store.data),
        place_of(folder).held(Mark(store_id=store.id, registered=True), alone=False),
    ):
        into = folder / uploads.DELIVERIES
        place_of(into).make()
        with place_of(into).alone():
            if (found := to_deliver(store, batch_id)) is not None:
                put_in_place(store, found, into, now=now)


def to_deliver(store: Store, batch_id: str) -> BatchRecord | None:
    """The batch, if its files are still to be written."""
    with store.read() as tx:
        found = batches.anywhere(tx, batch_id)
    return found if found is not None and found.unfinished else None


def put_in_place(store: Store, found: BatchRecord, into: FilePath, *, now: float) -> None:
    """Write the files and name them in the database, then delete those of an earlier delivery."""
    written = write(store, found, into, now=now)
    mine = [one.path for one in written.values()]
    earlier: Iterable[FilePath] = ()
    # Of objects only those that the database named go: another process may be writing.
    if not store.in_bucket:
        earlier = [path for path in into.iterdir() if path not in mine]
    replaced = register(store, found, written, now=now)
    if replaced is None:
        earlier = mine
    for path in {*earlier, *(store.data / name for name in replaced or ())}:
        with suppress(StoreUnreachable):  # then the sweep takes it
            path.unlink(missing_ok=True)


def write(store: Store, found: BatchRecord, into: FilePath, *, now: float) -> dict[str, Written]:
    """Write the answers and the errors of a job; a kind without a line gets no file."""
    assert found.job is not None
    job_id, url = found.job.id, Task.from_json(found.job.task).url
    with ExitStack() as opened:
        sinks = {name: opened.enter_context(LinesFile(into, store.local)) for name in ("output", "error")}
        read = {"results"}
        with views(
            store, now=now, only=[job_id], sealed=False, uses=lambda empty: read, compared=read
        ) as found_rows:
            for row in result_rows(found_rows, store, job_id):
                sinks["output" if row["error_type"] is None else "error"].write(openai_line(row, url))
            if found.job.state is JobState.EXPIRED:
                for row in rows_left(found_rows, store, job_id):
                    sinks["error"].write(expired_line(job_id, row))
        return {name: written for name, sink in sinks.items() if (written := sink.kept()) is not None}


def result_rows(opened: Views, store: Store, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield the results of a job in input order; raises `StoreError` unless all can be read.

    A file of answers that lacks some would pass for whole, and be kept.
    """
    for gap in opened.left_out:
        if gap.view == "results":
            raise StoreError(f"batch files of job {job_id} are not written: {gap.sentence}")
    yield from export.documents_parsed(rows_of(export.with_urls(opened.duck, store.data, job_id)))


def rows_left(opened: Views, store: Store, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a job that have no result."""
    yield from export.documents_parsed(rows_of(export.unanswered(opened.duck, store.data, job_id)))


class LinesFile:
    """A file of JSON lines, whole on disk once it is kept."""

    def __init__(self, folder: FilePath, local: Path) -> None:
        self.id = uploads.new_file_id()
        self._path = folder / f"{self.id}.jsonl"
        self._scratch = place_of(self._path).scratch_file(local)
        self._file: BinaryIO = self._scratch.open("wb")
        self._digest = hashlib.blake2b(digest_size=16)
        self._bytes = self._lines = 0
        self._encode = msgspec.json.Encoder(decimal_format="number").encode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def write(self, document: dict[str, Any]) -> None:
        """Add one line."""
        line = self._encode(document) + b"\n"
        self._file.write(line)
        self._digest.update(line)
        self._bytes += len(line)
        self._lines += 1

    def kept(self) -> Written | None:
        """Move the file to its place, durably; None if it has no line."""
        self._file.close()
        if not self._lines:
            return None
        place_of(self._path).write(self._scratch)
        return Written(
            id=self.id,
            path=self._path,
            bytes=self._bytes,
            num_lines=self._lines,
            digest=self._digest.hexdigest(),
        )


def register(
    store: Store, found: BatchRecord, written: dict[str, Written], *, now: float
) -> list[str] | None:
    """Name the files in the database, in place of an earlier delivery's, whose paths are returned.

    Returns None if the files are not wanted any more.
    """
    assert found.job is not None
    job_id = found.job.id
    expires_at = None if found.output_expires_s is None else now + found.output_expires_s
    ids = {name: one.id for name, one in written.items()}
    with store.write() as tx:
        if not batches.deliver(tx, found, output=ids.get("output"), errors=ids.get("error"), now=now):
            return None
        replaced = uploads.forget_deliveries(tx, job_id)
        for name, one in written.items():
            new = NewFile(
                purpose=PURPOSE,
                filename=f"{found.id}_{name}.jsonl",
                bytes=one.bytes,
                num_lines=one.num_lines,
                digest=one.digest,
                path=below(one.path, store.data),
                expires_at=expires_at,
                job_id=job_id,
            )
            uploads.add(tx, found.project, one.id, new, now=now)
    return replaced
