"""Comparison of two runs: the facts in which they differ, then a verdict on each suite and metric. Pure."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conserve.evals.history import ChangePoint
from conserve.evals.paired import Pairs, evidence
from conserve.evals.plan import Metric, SuitePlan
from conserve.evals.records import RunRecord, SuiteRecord
from conserve.evals.verdict import SuiteVerdict, Verdict, blind, judge, scoreless, worst

IGNORED = ("conserve",)  # its version changes no answer
QUESTIONS = (
    "data", "task", "params", "dataset", "scorer", "judge", "judge_model", "judge_endpoint",
    "seed", "limit", "epochs",
)  # fmt: skip
"""Facts about what a suite asks and how it scores, not about what answers; lm-eval's tasks have a fact each."""
LATER = ("params", "scorer", "judge_model", "judge_endpoint")
"""Facts that nights of earlier versions lack."""


class SuiteMetric(NamedTuple):
    """A metric of a suite."""

    suite: str
    metric: str


@dataclass(frozen=True, slots=True)
class SuiteScores:
    """Scores of a suite by metric and item, and the source of each item that was asked."""

    by_metric: Mapping[str, Mapping[Hashable, float]]
    sources: Mapping[Hashable, str]


class FactDifference(NamedTuple):
    """A fact in which two runs differ; `suites` are those that it holds for. None: the run does not know."""

    fact: str
    before: str | None
    after: str | None
    suites: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Difference in words."""
        suites = ", ".join(self.suites)
        return f"{self.fact} differs ({suites}): {self.before or 'none'} before, {self.after or 'none'} now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Verdict on a run against another, or against its history.

    Scores of a metric of which less is better are negated in its evidence.
    """

    before: str
    after: str
    differences: Sequence[FactDifference]
    judged: Mapping[SuiteMetric, SuiteVerdict]
    metrics: Mapping[SuiteMetric, Metric]
    missing: Mapping[str, str] = field(default_factory=dict)  # suites that cannot be judged, and why
    new: Sequence[str] = ()  # suites that only the later run has
    changes: Mapping[SuiteMetric, ChangePoint] = field(default_factory=dict)  # declines against a history
    nights: Sequence[str] = ()  # runs of the history
    since: Mapping[str, str] = field(default_factory=dict)  # first night of a suite that had asked otherwise

    @property
    def of_itself(self) -> bool:
        """True for a run compared with itself, unless a suite of it can find no decline."""
        return self.before == self.after and not any(one.doubt for one in self.judged.values())

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of all suites. A lasting decline is worse; a suite that cannot be judged leaves a doubt."""
        if self.of_itself:
            return Verdict.NO_WORSE
        found = {one.verdict for one in self.judged.values()}
        if self.changes:
            found.add(Verdict.WORSE)
        if self.missing or not self.judged:
            found.add(Verdict.CANNOT_TELL)
        return worst(found)


def judge_together(
    before: Mapping[str, SuiteScores],
    after: Mapping[str, SuiteScores],
    plans: Mapping[str, SuitePlan],
    *,
    families: int = 1,
    seed: int = 0,
) -> tuple[dict[SuiteMetric, SuiteVerdict], dict[SuiteMetric, Metric]]:
    """Judge all suites and metrics that both runs have, together.

    Items that were asked and have lost their score leave a doubt, unless even the worst score would be no worse.
    """
    pairs: dict[SuiteMetric, Pairs] = {}
    at_worst: dict[SuiteMetric, Pairs] = {}  # of suites in which items have lost their score
    metrics: dict[SuiteMetric, Metric] = {}
    for suite in (name for name in after if name in before):
        for metric, scores in after[suite].by_metric.items():
            known = metric_of(plans, suite, metric)
            earlier = before[suite].by_metric.get(metric, {})
            if known is None or not known.judged or not earlier.keys() & scores.keys():
                continue
            name, sign = SuiteMetric(suite, metric), -1.0 if known.lower_is_better else 1.0
            then, now = ({item: sign * one for item, one in each.items()} for each in (earlier, scores))
            sources = after[suite].sources
            pairs[name], metrics[name] = Pairs.of(then, now, sources), known
            if lost := (then.keys() & sources.keys()) - now.keys():
                lowest = min(min(sign, 0.0), *then.values(), *now.values())
                at_worst[name] = Pairs.of(then, now | dict.fromkeys(lost, lowest), sources)
    standards = {name: metric.standard for name, metric in metrics.items()}
    rng = np.random.default_rng(seed)
    judged = judge(pairs, standards, rng, families=families)
    for name, supposed in at_worst.items():
        clear = judged[name].verdict is Verdict.NO_WORSE
        if clear and evidence(supposed, standards[name], rng).p_effect > standards[name].alpha:
            doubt = scoreless(*name, len(supposed.after) - len(pairs[name].after))
            judged[name] = judged[name]._replace(verdict=Verdict.CANNOT_TELL, doubt=doubt)
    for name, measure in metrics.items():
        if not measure.lower_is_better and not (pairs[name].before.any() or pairs[name].after.any()):
            judged[name] = judged[name]._replace(verdict=Verdict.CANNOT_TELL, doubt=blind(name.metric))
    return judged, metrics


def unpaired_suites(
    before: Mapping[str, SuiteScores],
    after: Mapping[str, SuiteScores],
    plans: Mapping[str, SuitePlan],
    judged: Collection[SuiteMetric],
    run_name: str,
) -> dict[str, str]:
    """Suites of both with a metric of the earlier night's that is not judged, though it should be."""
    found = {}
    for suite in (name for name in after if name in before and name in plans):
        wanted = [one for one in before[suite].by_metric if plans[suite].metric(one).judged]
        lost = [one for one in wanted if one not in after[suite].by_metric]
        if lost:
            found[suite] = (
                f"has no {', '.join(lost)}, which {run_name} has; say judged = false of what is gone"
            )
        elif any(SuiteMetric(suite, one) not in judged for one in wanted):
            found[suite] = f"has no item in common with {run_name}"
    return found


def metric_of(plans: Mapping[str, SuitePlan], suite: str, metric: str) -> Metric | None:
    """Measure of worse; None for a suite that is in the plan no more."""
    plan = plans.get(suite)
    return None if plan is None else plan.metric(metric)


def differences(before: RunRecord, after: RunRecord) -> list[FactDifference]:
    """Facts in which suites of two runs differ, one entry for all suites with the same difference."""
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    for suite in after.suites:
        other = before.suite(suite.name)
        if other is None or suite.error is not None or other.error is not None:
            continue
        for fact in sorted(suite.facts.keys() | other.facts.keys()):
            values = other.facts.get(fact), suite.facts.get(fact)
            if differs(fact, *values) and fact not in IGNORED:
                found.setdefault((fact, *values), []).append(suite.name)
    return [
        FactDifference(fact, earlier, later, tuple(suites))
        for (fact, earlier, later), suites in found.items()
    ]


def differs(fact: str, before: str | None, after: str | None) -> bool:
    """True if a fact differs. A fact that one night's version did not record is no difference."""
    return before != after and not (fact in LATER and None in (before, after))


def asks_alike(one: SuiteRecord, other: SuiteRecord) -> bool:
    """True if two nights of a suite asked the same questions and scored the answers alike, as far as both know."""
    before, after = questions_of(one), questions_of(other)
    return not any(differs(fact, before.get(fact), after.get(fact)) for fact in before.keys() | after.keys())


def questions_of(suite: SuiteRecord) -> dict[str, str]:
    """Facts about what a suite asks and how it scores."""
    return {
        name: value for name, value in suite.facts.items() if name in QUESTIONS or name.startswith("task ")
    }


def missing(before: RunRecord, after: RunRecord, plans: Mapping[str, SuitePlan]) -> dict[str, str]:
    """Suites of the plan that cannot be judged, and why; a suite that is new is not missing."""
    found = {}
    for name in plans:
        now, then = after.suite(name), before.suite(name)
        if now is None or now.error is not None:
            found[name] = f"has no scores in {after.id}: {now.error if now else 'it has not ended'}"
        elif then is not None and then.error is not None:
            found[name] = f"has no scores in {before.id}: {then.error}"
    return found
