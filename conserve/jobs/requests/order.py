"""Execution orders: of the prefix tree, of the input, or random.

Sorting prompts as text walks the tree of their prefixes depth first, so that requests that share the most stand
together (HyGen, section 4.3). The sort key is what the engine sees first, not the JSON that it comes in.
"""

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from conserve.endpoints.protocol import Url
from conserve.jobs.requests.rendering import RenderedRow
from conserve.jobs.task import Kind, Order, Task

FRONT_FIELDS = ("cache_salt", "chat_template", "chat_template_kwargs", "documents", "tools")
"""Fields of a chat's body that chat templates print in front of the messages, or that keep caches apart."""


class SortKey(NamedTuple):
    """Column that requests are sorted by: one of their own, or one that `of` computes."""

    column: str
    kind: pa.DataType
    of: Callable[[RenderedRow], str | int | None] | None = None  # rows that failed have no key and come last


def sort_key(task: Task) -> SortKey | None:
    """Sort key of a task's requests; None if they keep the order of the input."""
    if task.order is Order.INPUT:
        return None
    if task.order is Order.RANDOM:
        return SortKey("key", pa.int64(), dice(task.order_seed))
    if task.kind is Kind.PROMPT:
        return SortKey("payload", pa.string())
    return SortKey("key", pa.string(), lambda rendered: prompt_key(task, rendered))


def dice(seed: int) -> Callable[[RenderedRow], int | None]:
    """Function that gives each row a random number, the same ones for the same seed."""
    numbers = random.Random(seed)

    def throw(rendered: RenderedRow) -> int | None:
        number = numbers.getrandbits(62)
        return None if rendered.payload is None else number

    return throw


def prompt_key(task: Task, rendered: RenderedRow) -> str | None:
    """Sort key of a row: its prompt text without the parts that the task adds to every row."""
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
    """Chat in one spelling, whatever the order of its JSON: of each message role, content, then the rest."""
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
    if not isinstance(prompt, list):
        return prompt
    text = token_text(prompt)
    return completion_prompt(prompt[0]) if text is None else text


def token_text(prompt: Sequence[Any]) -> str | None:
    """Token ids as text that sorts token by token; None for a prompt that is none of token ids."""
    try:
        return struct.pack(f">{len(prompt)}I", *prompt).hex()  # five times as fast as token by token
    except struct.error:  # no number, or one that no tokenizer has
        if not all(isinstance(token, int) for token in prompt):
            return None
        return "".join(f"{token:08x}" for token in prompt)


def to_json(document: object) -> str:
    """JSON with sorted names."""
    return msgspec.json.encode(document, order="sorted").decode()
