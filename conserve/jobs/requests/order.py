"""Execution orders: of the prefix tree, of the input, or random.

Sorting prompts as text walks the tree of their prefixes depth first, so that requests that share the most stand
together (HyGen, section 4.3). What is sorted is what the engine sees first, not the JSON it comes in.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import msgspec
import pyarrow as pa

from conserve.endpoints.protocol import Url
from conserve.jobs.requests.rendering import RenderedRow
from conserve.jobs.task import Kind, Order, Task

FRONT_FIELDS = ("cache_salt", "chat_template", "chat_template_kwargs", "documents", "tools")
"""Fields of a chat's body that chat templates print in front of the messages, or that keep caches apart."""


class SortKey(NamedTuple):
    """What requests are sorted by: a column that they have, or one that is computed for it."""

    column: str
    kind: pa.DataType
    of: Callable[[RenderedRow], str | int | None] | None = (
        None  # None where rendering failed: such rows come last
    )


def sort_key(task: Task) -> SortKey | None:
    """How this task's requests are ordered; None where they stay as they come."""
    if task.order is Order.INPUT:
        return None
    if task.order is Order.RANDOM:
        return SortKey("key", pa.int64(), dice(task.order_seed))
    if task.kind is Kind.PROMPT:
        return SortKey("payload", pa.string())
    return SortKey("key", pa.string(), lambda rendered: prompt_key(task, rendered))


def dice(seed: int) -> Callable[[RenderedRow], int | None]:
    """A random number for each row; the same ones for the same seed."""
    numbers = random.Random(seed)

    def throw(rendered: RenderedRow) -> int | None:
        number = numbers.getrandbits(62)
        return None if rendered.payload is None else number

    return throw


def prompt_key(task: Task, rendered: RenderedRow) -> str | None:
    """Text that begins like another row's as far as their prompts do; what the task adds to all is left out."""
    if rendered.payload is None or task.kind is Kind.PROMPT:
        return rendered.payload
    document = msgspec.json.decode(rendered.payload)
    if task.kind is Kind.MESSAGES:
        return to_json(chat(document))
    front = {name: document[name] for name in FRONT_FIELDS if document.get(name) is not None}
    if rendered.url == Url.COMPLETIONS:
        said = completion_prompt(document.get("prompt"))
    elif "input" in document:  # embeddings, responses
        said = [document.get("instructions"), completion_prompt(document["input"])]
    else:
        said = chat(document.get("messages"))
    return to_json([rendered.url, front, said])


def chat(messages: object) -> object:
    """A chat in one spelling: of each message role, content, and then the rest."""
    if not isinstance(messages, list):
        return messages
    return [message(each) if isinstance(each, dict) else each for each in messages]


def message(fields: Mapping[str, Any]) -> list[Any]:
    """One message, its fields in the order in which chat templates print them."""
    rest = {name: value for name, value in fields.items() if name not in ("role", "content")}
    begun = [fields.get("role"), fields.get("content")]
    return [*begun, rest] if rest else begun


def completion_prompt(prompt: object) -> object:
    """A completion's prompt, the first if there are several; token ids as text that sorts token by token."""
    if isinstance(prompt, list) and prompt and not is_tokens(prompt):
        prompt = prompt[0]
    return "".join(f"{token:08x}" for token in prompt) if is_tokens(prompt) else prompt


def is_tokens(prompt: object) -> TypeGuard[list[int]]:
    """Whether a prompt is given as token ids."""
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)


def to_json(document: object) -> str:
    """JSON with sorted names."""
    return msgspec.json.encode(document, order="sorted").decode()
