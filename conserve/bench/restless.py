"""Changes of the machine's own speed: online-only's blocks show them, and no policy causes them. Pure.

Percentiles over a block's token gaps would not tell: in bursts more requests share each step. So only gaps count in
which one request was in flight, alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from conserve.bench.answers import Floats, LoadAnswer

if TYPE_CHECKING:
    from conserve.bench.measure import Block

LEAST_GAPS = 50  # of a block that counts
RESTLESS = 1.1  # as much as the default harm allows: a smaller ratio could be the machine's


class StepTimes(NamedTuple):
    """Median decode step of a live request alone, in the quickest and in the slowest block without rows, in ms."""

    quickest_ms: float
    slowest_ms: float

    @property
    def times(self) -> float:
        """Slowest to quickest."""
        return self.slowest_ms / self.quickest_ms

    @property
    def restless(self) -> bool:
        """True if the machine's speed changed by more than a harm of 10 %."""
        return self.times > RESTLESS

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The times in a cell's document."""
        return cls(document["quickest_ms"], document["slowest_ms"])

    def document(self) -> dict[str, Any]:
        """The times as JSON."""
        return {**self._asdict(), "times": self.times}


def step_times(blocks: Sequence[Block]) -> StepTimes | None:
    """Step times of these blocks, online-only's; None with fewer than two that have enough steps of one request."""
    pooled = [gaps for block in blocks if len(gaps := gaps_alone_ms(block.answers)) >= LEAST_GAPS]
    medians = [float(np.median(gaps)) for gaps in pooled]
    if len(medians) < 2 or min(medians) <= 0:
        return None
    return StepTimes(min(medians), max(medians))


def gaps_alone_ms(answers: Sequence[LoadAnswer]) -> Floats:
    """Token gaps during which no other request was in flight, in ms."""
    sent_s = np.sort([answer.sent_s for answer in answers])
    ended_s = np.sort([answer.ended_s for answer in answers])
    found = [np.zeros(0)]
    for answer in answers:
        at_s = np.asarray(answer.token_at_s, dtype=float)
        # Those sent before the gap's end, without those that had ended by its beginning; the answer is one.
        in_flight = np.searchsorted(sent_s, at_s[1:], "left") - np.searchsorted(ended_s, at_s[:-1], "right")
        found.append(np.diff(at_s)[in_flight == 1])
    pooled_ms: Floats = np.concatenate(found) * 1e3
    return pooled_ms
