"""Plan of a night, as nightly.toml says it: targets, suites, and what counts as worse. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conserve.evals.paired import Standard

Overlap = Literal["skip", "queue", "replace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is asked: a model in an engine of the run's own, or an endpoint; with neither, the settings decide."""

    name: str = ""
    model: str | None = None
    endpoint: str | None = None
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a suite: how much worse counts, and which direction is worse."""

    standard: Standard
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """One suite: `options` are the entries of its table that its kind alone understands."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    limit: int | None = None
    epochs: int = 1
    standard: Standard
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def metric(self, name: str) -> Metric:
        """Metric of this name; one without an entry of its own has the suite's standard, and higher is better."""
        return self.metrics.get(name, Metric(standard=self.standard))
