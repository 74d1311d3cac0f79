"""Answers of a load: each request as its client saw it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


class RequestEnd(StrEnum):
    """End of a request."""

    OK = "ok"  # the answer is complete
    REFUSED = "http_error"  # the server refused, at once or halfway through the answer
    BROKEN = "connection_error"  # no connection, or one that ended before the answer did
    TIMEOUT = "timeout"  # the answer was not complete in time


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer:
    """One request and its answer; all times are seconds since the load began.

    `token_at_s` has one entry per token: tokens that came in one chunk share its time. `output_tokens` were asked
    for, 0 where that is unknown. `detail` says why a request failed.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    input_tokens: int
    token_at_s: tuple[float, ...]
    status: RequestEnd
    detail: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: those that the prefix cache had

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_at_s)

    @property
    def late_ms(self) -> float:
        """Time from due to sent, in ms: how late the generator was."""
        return (self.sent_s - self.due_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        """Time from due, not sent, to the first token, in ms: a late generator cannot flatter the server."""
        return (self.token_at_s[0] - self.due_s) * 1e3 if self.token_at_s else None

    @property
    def tbt_ms(self) -> list[float]:
        """Gaps between consecutive tokens, in ms."""
        gaps: list[float] = (np.diff(self.token_at_s) * 1e3).tolist()
        return gaps


def ttfts_ms(answers: Sequence[LoadAnswer]) -> Floats:
    """TTFTs of all answers that have a token, in ms."""
    return np.array([answer.ttft_ms for answer in answers if answer.token_at_s], dtype=np.float64)


def tbts_ms(answers: Sequence[LoadAnswer]) -> Floats:
    """Token gaps of all answers, pooled, in ms."""
    gaps_s = [np.diff(answer.token_at_s) for answer in answers if answer.token_at_s]
    pooled_ms: Floats = np.concatenate([np.zeros(0), *gaps_s]) * 1e3
    return pooled_ms
