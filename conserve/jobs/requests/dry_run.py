"""Dry run: makes every request and counts its prompt's tokens; sends and changes nothing."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from conserve.config import Settings
from conserve.endpoints.protocol import Url
from conserve.jobs.requests.fault import most_tokens
from conserve.jobs.requests.file import RequestFile, StoredRequest
from conserve.jobs.task import Task
from conserve.store.books import readings
from conserve.store.books.readings import JobReading
from conserve.store.files import layout

AT_ONCE = 32  # prompts that a server counts at a time
CHUNK = 512  # requests in memory


class Tokenizer(Protocol):
    """A tokenizer of the model that is to answer: the embedded engine's, or a server's."""

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer together; None where it is not known."""

    async def of_text(self, text: str, *, special: bool) -> int | None:
        """Tokens of a prompt; None where it cannot be counted."""

    async def of_chat(self, body: Mapping[str, Any]) -> int | None:
        """Tokens of a chat as the model's chat template writes it; None where it cannot be counted."""


Refuses = Callable[[Url, Mapping[str, Any]], Exception | None]
"""Error of a request that the endpoint does not answer; None if it takes the request."""


class Length(NamedTuple):
    """Tokens of a row's prompt, and the most tokens that its answer may have."""

    row_index: int
    tokens: int
    answer: int | None


@dataclass(slots=True)
class DryRun:
    """Findings on the rows of one job."""

    job_id: str
    rows: int = 0  # waiting rows
    unrendered: int = 0  # waiting rows that fail without being computed
    first_error: str | None = None
    counted: int = 0  # rows whose prompt was counted
    prompt_tokens: int = 0
    longest: Length | None = None
    too_long: int = 0  # rows that the model would reject
    first_too_long: Length | None = None
    cut_short: int = 0  # rows whose answer may end for want of room
    refused: str | None = None  # reason for which the run would leave the job alone

    def add_failure(self, row_index: int, error: str | None) -> None:
        """Add one row that cannot be answered."""
        self.unrendered += 1
        self.first_error = self.first_error or f"row {row_index:,}: {error}"

    def add_length(self, length: Length, context: int | None) -> None:
        """Add one counted prompt."""
        self.counted += 1
        self.prompt_tokens += length.tokens
        if self.longest is None or length.tokens > self.longest.tokens:
            self.longest = length
        if context is None:
            return
        if length.tokens >= context or (length.answer or 0) > context:
            self.too_long += 1
            self.first_too_long = self.first_too_long or length
        elif length.tokens + (length.answer or 0) > context:
            self.cut_short += 1


async def dry_run_of(
    settings: Settings, job: JobReading, task: Task, tokens: Tokenizer | None, refuses: Refuses
) -> DryRun:
    """Make the request of each waiting row and count its prompt's tokens, if there is a tokenizer."""
    found = DryRun(job.id)
    requests = RequestFile(layout.requests_file(readings.data(settings), job.id))
    try:
        for positions in chunks(waiting(settings, job)):
            stored = requests.read(positions)
            found.rows += len(stored)
            await count(stored, task, tokens, refuses, found)
    finally:
        requests.close()
    return found


def waiting(settings: Settings, job: JobReading) -> Iterable[int]:
    """Yield the positions of the job's waiting rows."""
    *returned, start = readings.untaken(settings, job.id)
    yield from returned
    yield from range(start, job.rows)


def chunks(positions: Iterable[int]) -> Iterable[list[int]]:
    """Cut positions into lists of `CHUNK`."""
    chunk: list[int] = []
    for position in positions:
        chunk.append(position)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def count(
    stored: Sequence[StoredRequest],
    task: Task,
    tokens: Tokenizer | None,
    refuses: Refuses,
    found: DryRun,
) -> None:
    """Add these requests to the findings."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def length_of(request: StoredRequest) -> Length | None:
        if tokens is None:
            return None
        async with gate:
            return await measured(request, task, tokens)

    taken = []
    for request in stored:
        if request.payload is None:
            found.add_failure(request.row_index, request.error)
        elif refused := refuses(Url(request.url or task.url), task.body(request.payload)):
            found.add_failure(request.row_index, str(refused))
        else:
            taken.append(request)
    for length in await asyncio.gather(*map(length_of, taken)):
        if length is not None:
            found.add_length(length, tokens.context if tokens else None)


async def measured(request: StoredRequest, task: Task, tokens: Tokenizer) -> Length | None:
    """Length of a request's prompt, of the longest if it has several; None where it cannot be counted."""
    assert request.payload is not None
    body = task.body(request.payload)
    answer = most_tokens(body)
    number = await prompt_tokens(Url(request.url or task.url), body, tokens)
    return (
        None
        if number is None
        else Length(request.row_index, number, answer if isinstance(answer, int) else None)
    )


async def prompt_tokens(url: Url, body: Mapping[str, Any], tokens: Tokenizer) -> int | None:
    """Tokens of a request's prompt, of the longest if it has several; None where they cannot be counted."""
    if url is Url.CHAT:
        return await tokens.of_chat(body)
    if url is Url.RESPONSES:
        return None
    prompt = body.get("prompt" if url is Url.COMPLETIONS else "input")
    several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    special = body.get("add_special_tokens") is not False
    found = [
        len(one) if isinstance(one, list) else await tokens.of_text(str(one), special=special)
        for one in several
    ]
    known = [number for number in found if number is not None]
    return max(known) if len(known) == len(found) else None
