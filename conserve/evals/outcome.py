"""Outcome of one suite of a night: items with scores, and the facts that two nights must share to compare."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST_SCORE = 1e100  # either way: an interval squares scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question of a suite, its answer, and its score by each metric (0 to 1 unless the metric says otherwise).

    `id` names the same question every night. Items with one `source`, such as a passage that several questions are
    about, are not independent: their errors are clustered. An item without an answer has its `error`.
    """

    id: str
    prompt: str
    answer: str | None
    scores: Mapping[str, float]
    source: str | None = None
    epoch: int = 0
    expected: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerOrigins:
    """Engines and models that results with an answer name, noted as these are read."""

    engines: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)

    def noted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note what a result names; returns the result."""
        if row["error"] is None:
            self.engines.update(filter(None, [row["engine"]]))
            self.models.update(filter(None, [row["model"]]))
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOutcome:
    """Items of a suite in its order, read once; its facts (digests of data and template, versions); its jobs.

    `origins` are complete once the items are read; without them the results are asked.
    """

    items: Iterable[Item]
    facts: Mapping[str, str] = field(default_factory=dict)
    job_ids: Sequence[str] = ()
    origins: AnswerOrigins | None = None
