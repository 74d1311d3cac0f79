"""What became of each request, as the client saw it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"  # all of the answer came
    REFUSED = "http_error"  # the server said no, at once or halfway through
    BROKEN = "connection_error"  # no connection, or one that ended before the answer did
    TIMEOUT = "timeout"  # the answer was not complete in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request and its answer; all times are seconds since the load began.

    `token_at_s` has one entry per token: tokens that came in one chunk share its time. `detail` says why a
    request failed.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    input_tokens: int
    token_at_s: tuple[float, ...]
    status: Status
    detail: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return len(self.token_at_s)

    @property
    def late_ms(self) -> float:
        """How long after it was due the generator sent the request."""
        return (self.sent_s - self.due_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        """From due, not sent, to the first token, so that a late generator cannot flatter the server."""
        return (self.token_at_s[0] - self.due_s) * 1e3 if self.token_at_s else None

    @property
    def tbt_ms(self) -> list[float]:
        """The gaps between consecutive tokens."""
        gaps: list[float] = (np.diff(self.token_at_s) * 1e3).tolist()
        return gaps


def ttfts_ms(answers: Sequence[Answer]) -> Floats:
    """Of all answers that have a token."""
    return np.array([answer.ttft_ms for answer in answers if answer.token_at_s], dtype=np.float64)


def tbts_ms(answers: Sequence[Answer]) -> Floats:
    """The gaps of all answers, pooled."""
    gaps_s = [np.diff(answer.token_at_s) for answer in answers if answer.token_at_s]
    pooled_ms: Floats = np.concatenate([np.zeros(0), *gaps_s]) * 1e3
    return pooled_ms
