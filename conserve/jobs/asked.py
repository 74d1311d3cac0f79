"""What was asked of a row: the body of its request, and the text of its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conserve.errors import UsageError
from conserve.jobs.request_file import RequestFile, StoredRequest
from conserve.jobs.task import Kind, Task
from conserve.store import home
from conserve.store.catalog import Job
from conserve.store.store import Store


class Tasks:
    """Bodies and prompts of the requests of some jobs, for the view `requests`."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._tasks = {job.id: Task.from_json(job.task) for job in jobs}

    def body(self, job_id: str, payload: str) -> str:
        """JSON of the request's body, as it is sent but for the model's name."""
        return msgspec.json.encode(self._tasks[job_id].body(payload)).decode()

    def prompt(self, job_id: str, payload: str) -> str | None:
        """The rendered prompt, or a chat as text."""
        task = self._tasks[job_id]
        return payload if task.kind is Kind.PROMPT else prompt_text(task.body(payload))


def prompt_text(body: Mapping[str, Any]) -> str | None:
    """The text of a request's prompt: messages as `role: text`, one alone without its role."""
    messages = body.get("messages")
    if isinstance(messages, list):
        said = [message for message in messages if isinstance(message, dict)]
        if len(said) == 1:
            return content_text(said[0].get("content"))
        return "\n\n".join(f"{one.get('role')}: {content_text(one.get('content'))}" for one in said)
    prompt = body.get("prompt", body.get("input"))
    return prompt if isinstance(prompt, str) or prompt is None else msgspec.json.encode(prompt).decode()


def content_text(content: object) -> str:
    """A message's content as text; of its parts that are no text, only the kind."""
    if isinstance(content, list):
        return "\n".join(part_text(part) for part in content)
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def part_text(part: object) -> str:
    """One part of a message's content."""
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A row's request, where it stands in its job's order, and what was asked; nulls where rendering failed."""

    position: int
    request: StoredRequest
    body: str | None
    prompt: str | None


def asked(store: Store, job: Job, *, row_index: int | None = None, custom_id: str | None = None) -> Asked:
    """The request of a row, named by its place in the input or by its own id."""
    path = home.requests_file(store.home, job.id)
    requests = RequestFile(path)
    try:
        wanted = ("row_index", row_index) if custom_id is None else ("custom_id", custom_id)
        position = position_of(path, *wanted)
        if position is None:
            raise UsageError(missing(job, row_index, custom_id))
        (request,) = requests.read([position])
    finally:
        requests.close()
    if request.payload is None:
        return Asked(position=position, request=request, body=None, prompt=None)
    tasks = Tasks([job])
    body, prompt = tasks.body(job.id, request.payload), tasks.prompt(job.id, request.payload)
    return Asked(position=position, request=request, body=body, prompt=prompt)


def missing(job: Job, row_index: int | None, custom_id: str | None) -> str:
    """The sentence for a row that is not there."""
    if custom_id is not None:
        return f"no row of job {job.id} has the id {custom_id!r}; rows are also named by number, from 0"
    return f"job {job.id} has no row {row_index}; its rows go from 0 to {job.num_rows - 1}"


def position_of(path: Any, column: str, value: object) -> int | None:
    """Where the one row with this value stands in a request file; reads that column alone."""
    start = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            found = pc.index(file.read_row_group(group, columns=[column])[column], pa.scalar(value)).as_py()
            if found >= 0:
                return start + int(found)
            start += file.metadata.row_group(group).num_rows
    return None
