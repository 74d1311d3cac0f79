"""The task of a job: its template or columns, and the parameters of every request body."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from keyword import iskeyword
from typing import Any

import msgspec

from conserve.endpoints.protocol import Url

KEEP_LOGPROBS = "conserve_keep_logprobs"
"""Field of a body that no server gets: of an echoed prompt, keep the log probabilities of its last tokens alone."""

ROW = "row"
"""Name of the whole row in a template."""


def in_template(column: str) -> str:
    """Words that put a column into a template."""
    return f"{{{{ {column if is_word(column) else f'{ROW}[{column!r}]'} }}}}"


def is_word(column: str) -> bool:
    """True for a column that a template names as it is."""
    return column.isidentifier() and not iskeyword(column)


class Kind(StrEnum):
    """Source of a row's request."""

    PROMPT = "prompt"
    """A Jinja template over the row's columns."""
    MESSAGES = "messages"
    """A column that holds a chat's messages."""
    OPENAI = "openai"
    """An OpenAI Batch line that is a request already."""


class Order(StrEnum):
    """Execution order of a job's rows; results come in the order of the input whatever it is."""

    PREFIX = "prefix"
    """Rows whose prompts begin alike run together, so that the engine computes what they share once."""
    INPUT = "input"
    """The order of the input."""
    RANDOM = "random"
    """Shuffled by a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task of a job, by which its rows become requests; stored with the job as JSON."""

    kind: Kind
    url: Url = Url.CHAT
    template: str | None = None  # Kind.PROMPT
    system: str | None = None  # system message in front of a rendered prompt or of the messages
    column: str | None = None  # Kind.MESSAGES
    id_column: str | None = None  # column with the rows' custom ids
    params: Mapping[str, Any] = field(default_factory=dict)  # body fields that every row gets
    order: Order = Order.INPUT
    order_seed: int = 0  # Order.RANDOM

    def body(self, payload: str) -> dict[str, Any]:
        """Request body for a row's rendered payload; a field of an OpenAI line wins over the task's parameter."""
        if self.kind is Kind.OPENAI:
            return {**self.params, **msgspec.json.decode(payload)}
        if self.url is Url.COMPLETIONS:
            return {**self.params, "prompt": payload}
        if self.kind is Kind.MESSAGES:
            messages = msgspec.json.decode(payload)
        else:
            messages = [{"role": "user", "content": payload}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return {**self.params, "messages": messages}

    def to_json(self) -> str:
        """Encode the task for the store."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """The inverse of `to_json`."""
        return msgspec.json.decode(text, type=cls)
