"""Wording of requests: their bodies as sent, their prompts as text, and values of theirs in a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conserve.jobs.task import Kind, Task
from conserve.store.books.catalog import JobRecord


class Tasks:
    """Bodies and prompts of some jobs' requests, for the view `requests`; None where a task cannot be read."""

    def __init__(self, jobs: Sequence[JobRecord]) -> None:
        self._texts = {job.id: job.task for job in jobs}
        self._tasks: dict[str, Task] = {}

    def body(self, job_id: str, payload: str) -> str | None:
        """JSON of the request's body, as it is sent but for the model's name."""
        body = self._body(job_id, payload)
        return None if body is None else msgspec.json.encode(body).decode()

    def prompt(self, job_id: str, payload: str) -> str | None:
        """The rendered prompt, or a chat as text."""
        body = self._body(job_id, payload)
        if body is None:
            return None
        return payload if self._tasks[job_id].kind is Kind.PROMPT else prompt_text(body)

    def _body(self, job_id: str, payload: str) -> dict[str, Any] | None:
        try:
            if job_id not in self._tasks:
                self._tasks[job_id] = Task.from_json(self._texts[job_id])
            return self._tasks[job_id].body(payload)
        except (ValueError, TypeError, RecursionError):  # a task of a later version, or no JSON
            return None


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
    """Content of a message as text; a part that is not text is named by its kind."""
    if isinstance(content, list):
        return "\n".join(part_text(part) for part in content)
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def part_text(part: object) -> str:
    """One part of a message's content."""
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"


def shown(value: object) -> str:
    """A value as JSON, cut to 60 characters."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
