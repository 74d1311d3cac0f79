"""Who leaves the iteration that runs while an online request arrives: pure decisions, as for plans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel

PATIENCE = 0.02  # of the TTFT promise: what an arrival may wait for anything without a reason
WASTE = 0.015  # of all offline tokens: what may be thrown away where no promise is at stake


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """The iteration that runs."""

    batch: Batch  # everybody in it
    rows: Sequence[Slice]  # offline rows that may leave it, the first to leave first
    separable: bool  # rows leave alone and go on later where they left; else all leave, and begin anew
    elapsed_ms: float

    @property
    def pure(self) -> bool:
        """Whether nobody but these rows is in it."""
        return len(self.rows) == self.batch.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Those who have come since it began."""

    prompts: Sequence[Slice]  # of online requests, none of them computed yet
    slack_ms: float  # until the first token of one of them is late
    ttft_ms: float  # the promise
    spare_tokens: float  # offline tokens that may be thrown away for comfort's sake


class Preemption(Protocol):
    """Decides for arrivals."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """How many of `under_way.rows` are to leave, mostly none."""


class AllOffline:
    """Conserve-2026 Algorithm 2: all offline rows leave if an arrival would miss its TTFT."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """All or nobody."""
        if remaining_ms(under_way, model) + prompts_ms(arrivals, model) <= arrivals.slack_ms:
            return 0
        return all_if_sooner(under_way, arrivals, model)


class JustEnough:
    """Conserve-2024 Algorithm 2: row after row leaves until the arrival's TTFT can be kept."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """As many as it takes; where rows cannot leave on their own, all or nobody."""
        if not under_way.separable:
            return AllOffline().leaving(under_way, arrivals, model)
        batch = replace(under_way.batch)
        for rows, row in enumerate(under_way.rows):
            together = replace(batch)
            for prompt in arrivals.prompts:
                together.add(*prompt)
            if remaining_ms(under_way, model, batch) + model.predict(together) <= arrivals.slack_ms:
                return rows
            batch.remove(*row)
        return len(under_way.rows)


class Prompt:
    """An arrival waits for nothing that it can be spared, as long as little is thrown away for it.

    Where its TTFT is at stake, all offline rows leave, as in `AllOffline`. Otherwise they leave if the arrival
    would wait for more than `PATIENCE` of the promise, within the budget of tokens that may be thrown away.
    """

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """All or nobody."""
        left_ms = remaining_ms(under_way, model)
        if under_way.separable and not left_ms:  # overdue, nobody knows for how long
            return len(under_way.rows)
        late = left_ms + prompts_ms(arrivals, model) > arrivals.slack_ms
        if not late and (
            left_ms <= PATIENCE * arrivals.ttft_ms or thrown_away(under_way, model) > arrivals.spare_tokens
        ):
            return 0
        return all_if_sooner(under_way, arrivals, model)


class Never:
    """For comparison: iterations are composed as if they could be preempted, and never are."""

    def leaving(self, under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
        """Nobody."""
        return 0


PREEMPTIONS: dict[str, Callable[[], Preemption]] = {
    "prompt": Prompt,
    "all-offline": AllOffline,
    "just-enough": JustEnough,
    "never": Never,
}
OFF = "off"


def remaining_ms(under_way: UnderWay, model: LatencyModel, batch: Batch | None = None) -> float:
    """What is left of the iteration if only `batch` goes on with it."""
    return share_left(under_way, model) * model.predict(batch or under_way.batch)


def share_left(under_way: UnderWay, model: LatencyModel) -> float:
    """Predicted share of the iteration that is still to run, from 0 to 1."""
    whole_ms = model.predict(under_way.batch)
    return max(0.0, 1 - under_way.elapsed_ms / whole_ms) if whole_ms else 0.0


def prompts_ms(arrivals: Arrivals, model: LatencyModel) -> float:
    """How long the prompts of those who wait take."""
    return model.predict(Batch.of(arrivals.prompts))


def thrown_away(under_way: UnderWay, model: LatencyModel) -> float:
    """Tokens' worth of computing that is lost if all rows leave now."""
    if under_way.separable:
        return 0.0
    return (1 - share_left(under_way, model)) * sum(row.tokens for row in under_way.rows)


def all_if_sooner(under_way: UnderWay, arrivals: Arrivals, model: LatencyModel) -> int:
    """All rows, unless online rows would have to leave with them and get their tokens later for it."""
    if not under_way.separable and not under_way.pure:
        again = replace(under_way.batch)
        for row in under_way.rows:
            again.remove(*row)
        for prompt in arrivals.prompts:
            again.add(*prompt)
        if model.predict(again) >= remaining_ms(under_way, model):
            return 0
    return len(under_way.rows)


def spare_tokens(offline_tokens: float, wasted_tokens: float) -> float:
    """How many more tokens may be thrown away for comfort's sake."""
    return WASTE * offline_tokens - wasted_tokens
