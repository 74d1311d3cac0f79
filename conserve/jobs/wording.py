"""What requests say: the bodies that are sent, and the texts of their prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conserve.jobs.task import Kind, Task
from conserve.store.catalog import Job


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
