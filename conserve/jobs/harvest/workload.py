"""The workload: turns leased positions into calls to the endpoint."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from conserve.endpoints.protocol import Call, Url, resumable
from conserve.errors import JobRefused, StoreDamaged, StoreError, StoreForbidden
from conserve.jobs.harvest.comparing import Comparisons, StillCompared
from conserve.jobs.inputs.fingerprint import bytes_in_doubt, changed
from conserve.jobs.requests.file import RequestFile, StoredRequest
from conserve.jobs.task import KEEP_LOGPROBS, Task
from conserve.request_fields import ARGUMENTS
from conserve.store.books import catalog
from conserve.store.books.leases import Lease, LeasedRow
from conserve.store.books.mounted import require_folder, require_folders
from conserve.store.books.saved_tokens import unpack_tokens
from conserve.store.database.store import Store
from conserve.store.files import digests, layout, os_errors
from conserve.store.files.digests import MEMORY, Memory, bytes_to_read
from conserve.store.upkeep.damage import StorePart, unreadable

MOST_FILES = 64  # open request files, each with its last row group in memory
SAVE_S = 60.0  # between two writes of which files were found whole


class ReadyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One leased row, ready to be sent; `call` is None where the row could not be rendered."""

    job_id: str
    epoch: int
    row: LeasedRow
    request: StoredRequest
    call: Call | None
    can_resume: bool
    wants_json: bool
    submitted_at: float
    keep_logprobs: int | None = None  # of the echoed prompt's tokens, its last ones

    @property
    def key(self) -> tuple[str, int]:
        """Job id and position, which name the row in the store."""
        return self.job_id, self.row.position


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job with its task."""

    job: catalog.JobRecord
    task: Task


class Workload:
    """Opens jobs as rows of theirs are leased, and closes them again.

    A job stays open until it has ended. Its request file does not: of thousands of jobs with rows in flight only
    those that rows were leased of last have theirs open.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._open: dict[str, OpenJob] = {}
        self._files: dict[str, RequestFile] = {}  # the one that was read last is the last
        self._memory: Memory | None = None  # of the files that were compared
        self.comparisons = Comparisons()

    def seen(self) -> list[str]:
        """Ids of the open jobs: rows of theirs were leased, and they have not ended."""
        return list(self._open)

    def refusal(self, job_id: str) -> JobRefused | StoreError | None:
        """Open a job; returns why it must not run, if so: an input, a record or requests that do not do."""
        if job_id in self._open:
            return None
        with self._store.read() as tx:
            job = catalog.get(tx, job_id)
        try:
            if (path := self._changed(job)) is not None:
                return JobRefused(
                    f"{path} changed after job {job_id} was submitted",
                    step=f"restore it and run `conserve resume {job_id}`, or submit the new file",
                )
            task = task_of(job)
            self._requests(job)
        except (StoreDamaged, StoreForbidden, StillCompared) as error:
            return error
        self._open[job_id] = OpenJob(job, task)
        return None

    def _changed(self, job: catalog.JobRecord) -> str | None:
        """First input file that changed since the job was submitted."""
        data = self._store.data
        reads = bytes_in_doubt(data, job)
        return self.comparisons.outcome(job.id, "inputs", reads, lambda: changed(data, job))

    def _requests(self, job: catalog.JobRecord) -> RequestFile:
        """The job's open requests; when they are opened they are compared with the digest taken at submit."""
        if (file := self._files.pop(job.id, None)) is None:
            while len(self._files) >= MOST_FILES:
                self.close_files([next(iter(self._files))])
            file = self._opened(job)
            self.comparisons.forget([job.id])
        self._files[job.id] = file
        return file

    def _opened(self, job: catalog.JobRecord) -> RequestFile:
        """Open a job's requests; raises another `StoreError` if the folders of all jobs are away, or its own is."""
        try:
            self._compare(job)
            return RequestFile(layout.requests_file(self._store.data, job.id))
        except StoreDamaged:
            with self._store.read() as tx:
                require_folders(tx, self._store.data)
                require_folder(tx, self._store.data, job.id)
            raise

    def _compare(self, job: catalog.JobRecord) -> None:
        """Raise `StoreDamaged` if the job's requests are not what was submitted."""
        data, now, parts = self._store.data, self._clock(), [StorePart.REQUESTS]
        if isinstance(data, Path):
            self._memory = self._memory or Memory(data / MEMORY, now=now)
            self._memory.now = now
        known, seal, compare = self._memory, job.files.get(layout.REQUESTS), digests.damage
        reads = bytes_to_read(layout.requests_file(data, job.id), seal, known)
        for damage in self.comparisons.outcome(
            job.id,
            "requests",
            reads,
            lambda: unreadable(data, [job], [], now=now, parts=parts, known=known, compare=compare),
        ):
            raise StoreDamaged(
                f"the requests of job {job.id} cannot be read: {damage.sentence}", job_id=job.id
            )
        if self._memory is not None:
            self._memory.save(every_s=SAVE_S)

    def load(
        self, lease: Lease, identity: str, *, model: str | None = None, pushes: bool = False
    ) -> list[ReadyRow]:
        """The lease's rows with their requests; saved tokens count only if `identity` generated them.

        `model` is the one that they were leased for. `pushes` is for rows of a job that would miss its deadline.
        """
        opened = self._open[lease.job_id]
        with os_errors.explained(self._store.data):
            requests = self._requests(opened.job).read([row.position for row in lease.rows])
        return [
            to_work(opened, lease.epoch, row, request, identity, model=model, pushes=pushes)
            for row, request in zip(lease.rows, requests, strict=True)
        ]

    def close(self, job_ids: Iterable[str] | None = None) -> None:
        """Close these jobs, or all; a job is opened again when rows of it are leased."""
        closed = list(self._open if job_ids is None else job_ids)
        self.close_files(closed)
        self.comparisons.forget_others([]) if job_ids is None else self.comparisons.forget(closed)
        for job_id in closed:
            self._open.pop(job_id, None)
        if self._memory is not None and job_ids is None:
            self._memory.save()

    def close_files(self, job_ids: Iterable[str] | None = None) -> None:
        """Close the request files of these jobs, or all, until rows are leased again; the jobs stay open."""
        for job_id in list(self._files if job_ids is None else job_ids):
            if (file := self._files.pop(job_id, None)) is not None:
                file.close()


def task_of(job: catalog.JobRecord) -> Task:
    """Task of a job; raises `StoreDamaged` if its record holds none."""
    try:
        return Task.from_json(job.task)
    except msgspec.MsgspecError as error:
        raise StoreDamaged(
            f"the record of job {job.id} is damaged ({error})",
            step=f"run: conserve check {job.id}",
            job_id=job.id,
        ) from error


def to_work(
    opened: OpenJob,
    epoch: int,
    row: LeasedRow,
    request: StoredRequest,
    identity: str,
    *,
    model: str | None = None,
    pushes: bool = False,
) -> ReadyRow:
    """Make the call for one leased row; saved tokens count only if `identity` generated them."""
    call = None
    can_resume = wants_json = False
    keep_logprobs = None
    if request.payload is not None:
        body = opened.task.body(request.payload)
        asked = body.pop(KEEP_LOGPROBS, None)
        keep_logprobs = None if asked is None else int(float(asked))  # numbers may stand in quotes
        drop_claims(body)
        can_resume = resumable(body)
        wants_json = wants_json_answer(body)
        usable = can_resume and row.tokens_by == identity
        call = Call(
            key=f"{opened.job.id}/{row.position}/{epoch}",
            url=Url(request.url) if request.url else opened.task.url,
            body=body,
            resume_from=unpack_tokens(row.tokens) if usable and row.tokens else (),
            identity=identity,
            model=model,
            pushes=pushes,
        )
    return ReadyRow(
        job_id=opened.job.id,
        epoch=epoch,
        row=row,
        request=request,
        call=call,
        can_resume=can_resume,
        wants_json=wants_json,
        submitted_at=opened.job.submitted_at,
        keep_logprobs=keep_logprobs,
    )


def drop_claims(body: dict[str, Any]) -> None:
    """Drop what a row asks for at the cost of others, or in the harvester's place.

    A priority before live requests is heeded by servers where none of the harvester's takes its place. Our own
    fields in `vllm_xargs` want the harvester's key, which the row would be sent with.
    """
    said = body.get("vllm_xargs")
    if isinstance(said, dict) and not ARGUMENTS.isdisjoint(said):
        body["vllm_xargs"] = {name: value for name, value in said.items() if name not in ARGUMENTS}
        if not body["vllm_xargs"]:
            del body["vllm_xargs"]  # which no longer keeps the row from continuing
    priority = body.get("priority")
    if priority is not None and not (isinstance(priority, int) and priority >= 0):
        del body["priority"]


def wants_json_answer(body: dict[str, object]) -> bool:
    """True if the request asks for an answer in JSON."""
    form = body.get("response_format")
    return isinstance(form, dict) and form.get("type") in ("json_schema", "json_object")
