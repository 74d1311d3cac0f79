"""Plan of a night, as nightly.toml says it: targets, suites, and what counts as worse. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conserve.evals.paired import Standard
from conserve.evals.records import PREVIOUS

Overlap = Literal["skip", "queue", "replace"]
Answering = Literal["run", "serve"]

RESUME_S = 20 * 3600.0
LESS_IS_BETTER = ("word_perplexity", "byte_perplexity", "bits_per_byte")  # metrics of lm-eval's


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """Model that is asked: in an engine of the run's own, or an endpoint; with neither, the settings decide.

    With `answered_by` "serve" the run asks nothing itself: a `conserve serve` of the store answers its rows.
    """

    name: str = ""
    model: str | None = None
    endpoint: str | None = None
    engine_args: tuple[str, ...] = ()
    answered_by: Answering = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a suite: how much worse counts, and which direction is worse. Others are only reported."""

    standard: Standard
    lower_is_better: bool = False
    judged: bool = True


def less_is_better(kind: str, metric: str) -> bool:
    """True for a metric of a kind of suite, with or without its filter, of which less is better by default."""
    return kind == "lm-eval" and metric.partition(",")[0] in LESS_IS_BETTER


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
        """Metric of this name; one without an entry has the suite's standard and its kind's direction."""
        lower = less_is_better(self.kind, name)
        return self.metrics.get(name, Metric(standard=self.standard, lower_is_better=lower))

    def unanswered(self, metrics: Iterable[str]) -> dict[str, float]:
        """Scores of an item without an answer: 0, and none by a metric of which less is better."""
        return {name: 0.0 for name in metrics if not self.metric(name).lower_is_better}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Folder and forms of a run's reports, and the webhook of its verdict."""

    folder: str | None = None
    forms: tuple[str, ...] = ("html",)
    webhook: str | None = None
    secret_variable: str | None = None  # environment variable of the key that signs the webhook's body


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyPlan:
    """Plan of all runs of one nightly.toml."""

    name: str
    targets: tuple[ModelTarget, ...]
    suites: tuple[SuitePlan, ...]
    reports: Reports = Reports()
    against: str = PREVIOUS  # what a report and the webhook compare with
    overlap: Overlap = "queue"
    keep_s: float | None = None  # runs that are older are removed at the end of a run
    resume_s: float = RESUME_S  # a killed run that began longer ago is given up

    def label(self, suite: SuitePlan, target: ModelTarget) -> str:
        """Name of a suite on a target: the suite's own where there is one target."""
        return suite.name if len(self.targets) == 1 else f"{suite.name}@{target.name}"

    def standards(self) -> dict[str, SuitePlan]:
        """Suites by their names in records."""
        return {self.label(suite, target): suite for target in self.targets for suite in self.suites}
