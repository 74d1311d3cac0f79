"""Rows that leave the running iteration when an online request arrives: pure decisions, as plans are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conserve.names import PROMPT
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

PATIENCE = 0.02  # share of its TTFT promise that an arrival may be made to wait without need
WASTE = 0.015  # share of all offline tokens that may be thrown away while no TTFT is at stake


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """The running iteration."""

    batch: Batch  # every request in it
    rows: Sequence[Slice]  # offline rows that may leave, in leave order
    separable: bool  # single rows leave and join later; False: the rows are all there is, and begin anew
    elapsed_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Online requests that arrived after the iteration started."""

    prompts: Sequence[Slice]  # none of them computed yet
    slack_ms: float  # until the first of their first tokens is late
    ttft_ms: float  # the TTFT promise
    spare_tokens: float  # offline tokens that may be thrown away while no TTFT is at stake


class LeaveRule(Protocol):
    """Decides how many rows leave the running iteration when online requests arrive."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """Number of `under_way.rows` that leave, counted from the first; mostly 0."""


class AllOffline:
    """All offline rows leave if an arrival would miss its TTFT (conserve-2026 Algorithm 2)."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """Every row, or none."""
        if remaining_ms(under_way, model) + prompts_ms(arrivals, model) <= arrivals.slack_ms:
            return 0
        return len(under_way.rows)


class JustEnough:
    """Rows leave one after another until the arrivals can keep their TTFT (conserve-2024 Algorithm 2)."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """The fewest rows that suffice; every row or none where rows cannot leave alone."""
        if not under_way.separable:
            return AllOffline().leaving(under_way, arrivals, model)
        batch = under_way.batch.copy()
        for rows, row in enumerate(under_way.rows):
            together = batch.copy()
            for prompt in arrivals.prompts:
                together.add(*prompt)
            if remaining_ms(under_way, model, batch) + model.predict(together) <= arrivals.slack_ms:
                return rows
            batch.remove(*row)
        return len(under_way.rows)


class Promptly:
    """Rows leave for every arrival, unless that throws much away or the arrival would wait only briefly.

    If a TTFT is at stake, all offline rows leave, as in `AllOffline`. Otherwise they leave if the arrival would
    wait for more than `PATIENCE` of its promise, within the budget of tokens that may be thrown away.
    """

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """Every row, or none."""
        left_ms = remaining_ms(under_way, model)
        if under_way.separable and not left_ms:  # longer than predicted: the time that remains is unknown
            return len(under_way.rows)
        late = left_ms + prompts_ms(arrivals, model) > arrivals.slack_ms
        if not late and (
            left_ms <= PATIENCE * arrivals.ttft_ms or thrown_away(under_way, model) > arrivals.spare_tokens
        ):
            return 0
        return len(under_way.rows)


class Never:
    """No row ever leaves, for comparison: iterations are planned as if rows could."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """Zero, whatever arrives."""
        return 0


LEAVE_RULES: dict[str, Callable[[], LeaveRule]] = {
    PROMPT: Promptly,
    "all-offline": AllOffline,
    "just-enough": JustEnough,
    "never": Never,
}


def remaining_ms(under_way: UnderWay, model: LatencyModel, batch: Batch | None = None) -> float:
    """Predicted time until the iteration ends if `batch` (default: all of it) stays in it."""
    return share_left(under_way, model) * model.predict(batch or under_way.batch)


def share_left(under_way: UnderWay, model: LatencyModel) -> float:
    """Predicted share of the iteration that has not run yet, from 0 to 1."""
    whole_ms = model.predict(under_way.batch)
    return max(0.0, 1 - under_way.elapsed_ms / whole_ms) if whole_ms else 0.0


def prompts_ms(arrivals: Arrivals, model: LatencyModel) -> float:
    """Predicted prefill time of the online requests that arrived."""
    return model.predict(Batch.of(arrivals.prompts))


def thrown_away(under_way: UnderWay, model: LatencyModel) -> float:
    """Computing that is lost if all rows leave now, in tokens."""
    if under_way.separable:
        return 0.0
    return (1 - share_left(under_way, model)) * sum(row.tokens for row in under_way.rows)


def spare_tokens(offline_tokens: float, wasted_tokens: float) -> float:
    """Number of tokens that may still be thrown away while no TTFT is at stake."""
    return WASTE * offline_tokens - wasted_tokens
