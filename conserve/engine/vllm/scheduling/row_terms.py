"""Parameters of HyGen's policies, as `conserve bench` sets them, and the rows that a fixed rate lets begin."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from vllm.v1.request import Request

IDLE_S = 0.001  # between two looks of an engine whose rows are not due yet


@dataclass(slots=True, kw_only=True)
class RowTerms:
    """Budgets, rate and utility of the policy that runs now."""

    budget_ms: float | None = None  # of an iteration
    tokens: int | None = None  # of an iteration at most; None: as many as the engine takes
    offline_per_s: float | None = None  # rows that begin; None: as many as fit
    utility: float = 0.9  # share of rows that are taken for their prefix
    since: float = 0.0  # monotonic seconds, of the policy's start
    begun: int = 0  # rows since then

    @classmethod
    def of(cls, said: Mapping[str, Any], *, now: float) -> Self:
        """Read what was sent; raises ValueError or TypeError for anything but positive numbers."""
        unknown = set(said) - {"budget_ms", "tokens", "offline_per_s", "utility"}
        positive = all(value > 0 for value in said.values()) and isinstance(said.get("tokens", 1), int)
        if unknown or not positive or said.get("utility", 0.9) > 1:
            raise ValueError(f"HyGen's terms are positive numbers, not {said}")
        return cls(**said, since=now)

    def of_view(self, now: float, most_tokens: int, waiting: Iterable[Request]) -> dict[str, Any]:
        """Fields of a view of an engine that takes so many tokens in an iteration, and where these rows wait.

        The rate is of rows that come. Those that have begun and gave their place up go on as soon as there is room:
        they wait in front.
        """
        due = None
        if self.offline_per_s is not None:
            due = max(0, 1 + int(self.offline_per_s * (now - self.since)) - self.begun)
            due += sum(map(has_begun, waiting))
        return {
            "budget_ms": self.budget_ms,
            "max_tokens": min(most_tokens, self.tokens or most_tokens),
            "rows_due": due,
            "utility": self.utility,
        }

    def began(self, rows: Iterable[Request]) -> None:
        """Count rows that a plan admits for the first time."""
        if self.offline_per_s is not None:
            self.begun += sum(not has_begun(row) for row in rows)

    def rest(self) -> None:
        """Wait a little: vLLM schedules again at once, though no row may be due for a second."""
        if self.offline_per_s is not None:
            time.sleep(IDLE_S)

    def said(self) -> dict[str, Any]:
        """The parameters, for JSON."""
        return {
            "budget_ms": self.budget_ms,
            "tokens": self.tokens,
            "offline_per_s": self.offline_per_s,
            "utility": self.utility,
        }


def has_begun(row: Request) -> bool:
    """True if a waiting row ran before: it was evicted or parked."""
    return bool(row.num_preemptions)
