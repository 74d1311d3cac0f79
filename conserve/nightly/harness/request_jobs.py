"""Requests of a harness as durable jobs, each found again by the digest of its requests.

A killed evaluation is started again by the same command. It makes the same requests, finds the jobs that hold them,
and goes on with the rows that have no result.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from conserve.api.engines import Engine
from conserve.api.handing import Source
from conserve.api.job import Job
from conserve.api.store import Store
from conserve.endpoints.protocol import Url
from conserve.errors import JobRefused, RowsFailed, one_line
from conserve.store.books.states import JobState

RUN, REQUESTS = "harness.run", "harness.requests"
"""Tags of a harness's jobs: the run, and the digest of the requests."""


class Line(NamedTuple):
    """One request: its route and its body; `name` tells it from the others of its job, its number unless given."""

    url: Url
    body: Mapping[str, Any]
    name: str | None = None


class HarnessAnswer(NamedTuple):
    """Result of one request; `logprobs` and `choices` are JSON."""

    text: str | None
    finish_reason: str | None
    logprobs: str | None
    choices: str | None
    prompt_tokens: int
    completion_tokens: int


COLUMNS = HarnessAnswer._fields


class Queue(Protocol):
    """The durable queue as a harness sees it: `Alone`, or a night of `conserve eval`."""

    def submit_once(self, key: str, source: Source, **task: Any) -> Job:
        """Job that holds these requests: of an earlier try, else a new one."""

    def await_answers(self, *jobs: Job) -> None:
        """Wait until each row of these jobs has a result."""


class Alone:
    """Queue of a harness that was started by itself.

    `engine` answers the rows. Without one they wait for a `conserve run` or `conserve serve` over the same store.
    Jobs are bound to the `model`, or, without one, to that of the first harvester that comes.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        engine: Engine | None,
        *,
        name: str,
        model: str | None = None,
        progress: bool = True,
    ) -> None:
        self.store, self.run_id = store, run_id
        self._engine, self._name, self._model, self._progress = engine, name, model, progress

    def submit_once(self, key: str, source: Source, **task: Any) -> Job:
        """Job that holds these requests; that of an earlier try goes on, with its failed rows put back."""
        tags = {RUN: self.run_id, REQUESTS: key}
        found = self.store.jobs(tags=tags)
        if not found:
            return self.store.submit(source, name=self._name, model=self._model, tags=tags, **task)
        reading = found[-1].progress()
        if self._model is not None and reading.model not in (None, self._model):
            raise JobRefused(
                f"the run {self.run_id} has asked {reading.model}, and this is {self._model}; "
                "give this one another name: run=NAME"
            )
        if reading.state is JobState.FAILED:  # refused, for a reason that may be gone
            found[-1].resume()
        if reading.failed:
            found[-1].retry()
        return found[-1]

    def await_answers(self, *jobs: Job) -> None:
        for job in jobs:
            if self._engine is None:
                job.wait()
            else:
                job.run(engine=self._engine, progress=self._progress)


class NotingQueue:
    """Queue that notes the ids of the jobs that went through it."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.job_ids: list[str] = []

    def submit_once(self, key: str, source: Source, **task: Any) -> Job:
        job = self._queue.submit_once(key, source, **task)
        if job.id not in self.job_ids:
            self.job_ids.append(job.id)
        return job

    def await_answers(self, *jobs: Job) -> None:
        self._queue.await_answers(*jobs)


class Asker:
    """Asks a queue, call by call, as one process of a harness does."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._calls: Counter[str] = Counter()

    def ask(self, lines: Iterable[Line], *, sampled: bool = False) -> Iterator[HarnessAnswer]:
        """Ask each line, and yield the answers in the order of the lines.

        If answers are `sampled`, a second call with the same lines gets answers of its own. Raises `RowsFailed`.
        """
        with tempfile.TemporaryDirectory(prefix="conserve-") as folder:
            path = Path(folder, "requests.jsonl")
            key = digest = write_lines(path, lines)
            if sampled and self._calls[digest]:
                key = f"{digest}-{self._calls[digest]}"
            job = self._queue.submit_once(key, path, order="prefix")
        self._calls[digest] += 1
        self._queue.await_answers(job)
        return answers(job)


def write_lines(path: Path, lines: Iterable[Line]) -> str:
    """Write requests as OpenAI Batch lines; returns their digest."""
    encode, digest = msgspec.json.Encoder().encode, hashlib.blake2b(digest_size=16)
    with path.open("wb") as file:
        for number, line in enumerate(lines):
            document = {
                "custom_id": line.name or str(number),
                "method": "POST",
                "url": line.url,
                "body": line.body,
            }
            encoded = encode(document) + b"\n"
            digest.update(encoded)
            file.write(encoded)
    return digest.hexdigest()


def answers(job: Job) -> Iterator[HarnessAnswer]:
    """Yield the answers of a job in the order of its input; raises `RowsFailed` at a row without one."""
    columns = [*COLUMNS, "row_index", "error"]
    expected = 0
    for batch in job.results().batches():
        for *values, row_index, error in zip(*(batch[name].to_pylist() for name in columns), strict=True):
            if error is not None:
                raise row_failed(job, row_index, error)
            if row_index != expected:
                raise row_missing(job, expected)
            expected += 1
            yield HarnessAnswer(*values)
    if expected != job.progress().rows:
        raise row_missing(job, expected)


def row_failed(job: Job, row_index: int, error: str) -> RowsFailed:
    """Error for a row that failed, with how many did."""
    failed = job.progress().failed
    return RowsFailed(
        f"{failed:,} rows of job {job.id} failed, row {row_index:,} for one: {one_line(error)}; "
        f"mend the cause, run `conserve retry {job.id}`, and start the same run of the evaluation again"
    )


def row_missing(job: Job, row_index: int) -> RowsFailed:
    """Error for a row without a result in a job that has ended."""
    return RowsFailed(
        f"row {row_index:,} of job {job.id} has no result ({job.status}); run `conserve check {job.id}`, "
        "or start the evaluation again under another name of its run"
    )
