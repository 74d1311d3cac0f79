"""A run: begun or gone on with, its suites asked in rounds, scored and kept one by one."""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from conserve.config import Settings
from conserve.errors import ConserveError, SettingsError, UsageError, one_line
from conserve.evals.bootstrap import source_numbers
from conserve.evals.level import interval
from conserve.evals.outcome import LARGEST_SCORE, SuiteOutcome
from conserve.evals.plan import ModelTarget, NightlyPlan, SuitePlan
from conserve.evals.plan_file import plan_of
from conserve.evals.records import MeanScore, RunRecord, RunState, SuiteRecord
from conserve.evals.verdict import blind
from conserve.nightly import keeping
from conserve.nightly.facts import facts_of
from conserve.nightly.items import ItemKey, Scored, scores_of
from conserve.nightly.kinds import kind_of, waves
from conserve.nightly.rounds import Rounds
from conserve.nightly.run_jobs import Answering, AskedJob, SuiteNight
from conserve.nightly.targets import check_target, model_lookup, with_flags
from conserve.store.files import nights

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Arguments of `conserve eval run`: a file, flags over it, and whether to begin anew."""

    file: Path
    overrides: Mapping[str, str | int]
    anew: bool = False
    progress: bool = True


def plan_of_file(file: Path) -> tuple[NightlyPlan, str]:
    """Plan of a nightly.toml and its text; raises `SettingsError`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"there is no readable file {str(file)!r}; write one with: conserve eval init"
        ) from error
    return plan_of(text, title=file.name), text


def overridden(plan: NightlyPlan, overrides: Mapping[str, Any]) -> NightlyPlan:
    """Plan with the flags of the command line on top."""
    suites, targets = plan.suites, plan.targets
    if "limit" in overrides:
        suites = tuple(replace(suite, limit=int(overrides["limit"])) for suite in suites)
    if {"model", "endpoint"} & overrides.keys():
        if len(targets) > 1:
            raise UsageError("--model and --endpoint go with a file of one model; this one has several")
        targets = (with_flags(targets[0], overrides.get("model"), overrides.get("endpoint")),)
    return replace(plan, suites=suites, targets=targets)


def check(plan: NightlyPlan, folder: Path) -> None:
    """Raise for a model or a suite that could not be asked, before the first one is."""
    for target in plan.targets:
        check_target(target, f"models.{target.name}" if target.name else "model")
    for suite in plan.suites:
        kind_of(suite).check(suite, folder)


def run_suites(settings: Settings, run: RunRecord, *, progress: bool, say: Say) -> RunRecord:
    """Run all suites that have not ended; each is kept as it ends. Errors of a suite end that suite alone."""
    plan = overridden(plan_of(run.plan), run.overrides)
    answering = Answering(settings, progress=progress, say=say)
    before_s = run.work_s
    try:
        for target in plan.targets:
            open_suites = {plan.label(suite, target): suite for suite in plan.suites}
            left = {label: suite for label, suite in open_suites.items() if not has_scores(run, label)}
            run = run_on_target(settings, run, target, left, answering, before_s, say)
    finally:
        answering.close()
    state = RunState.FAILED if any(suite.error for suite in run.suites) else RunState.FINISHED
    run = replace(in_order(run, plan), state=state, ended_at=time.time(), work_s=before_s + answering.work_s)
    run = replace(run, harm=answering.live_latencies or run.harm)
    keeping.write(settings.home, run)
    return run


def has_scores(run: RunRecord, label: str) -> bool:
    """True if a suite has ended without an error."""
    known = run.suite(label)
    return known is not None and known.error is None


def in_order(run: RunRecord, plan: NightlyPlan) -> RunRecord:
    """Run with its suites in the order of the file."""
    order = list(plan.standards())
    return replace(run, suites=tuple(sorted(run.suites, key=lambda suite: order.index(suite.name))))


def run_on_target(
    settings: Settings,
    run: RunRecord,
    target: ModelTarget,
    suites: Mapping[str, SuitePlan],
    answering: Answering,
    before_s: float,
    say: Say,
) -> RunRecord:
    """Run suites on one target, in rounds; those of a kind that runs one at a time after the others."""
    current, model_asked = [run], model_lookup(settings)

    def ended(label: str, found: SuiteRecord | Exception) -> None:
        record = (
            found
            if isinstance(found, SuiteRecord)
            else failed_suite(label, suites[label], target, found, say)
        )
        worked_s = before_s + answering.work_s
        current[0] = replace(keeping.with_suite(current[0], record), work_s=worked_s)
        keeping.write(settings.home, current[0])
        say(sentence(record) + unmatched_metrics(suites[label], record))

    def work(label: str, rounds: Rounds[AskedJob, SuiteRecord]) -> Callable[[], SuiteRecord]:
        night = SuiteNight(
            settings,
            rounds,
            run_id=run.id,
            token=run.token,
            label=label,
            suite=suites[label],
            target=target,
            folder=Path(run.folder),
            model_asked=model_asked,
        )
        return lambda: run_suite(settings, night, label)

    for labels in waves({label: suite.kind for label, suite in suites.items()}):
        rounds: Rounds[AskedJob, SuiteRecord] = Rounds(answering.answer)
        rounds.run({label: work(label, rounds) for label in labels}, ended)
    return current[0]


def run_suite(settings: Settings, night: SuiteNight, label: str) -> SuiteRecord:
    """Ask and score a suite, and keep its items."""
    outcome = kind_of(night.suite).run(night)
    file = f"items-{label}.parquet"
    keeping.write_items(settings.home, night.run_id, file, label, outcome.items)
    known = scores_of(nights.folder_of(settings.home, night.run_id) / file)
    return SuiteRecord(
        name=label,
        kind=night.suite.kind,
        target=night.target.name,
        facts=all_facts(settings, night, outcome),
        scores=tuple(means(night.suite, known)),
        items=known.items,
        failed=known.failed,
        first_error=None if known.error is None else one_line(known.error),
        prompt_tokens=known.prompt_tokens,
        answer_tokens=known.answer_tokens,
        jobs=tuple(outcome.job_ids),
        file=file,
    )


def all_facts(settings: Settings, night: SuiteNight, outcome: SuiteOutcome) -> dict[str, str]:
    """Facts of the target and of the suite."""
    given = facts_of(settings, night.target, outcome)
    return {**given, "kind": night.suite.kind, "epochs": str(night.suite.epochs), **outcome.facts}


def means(suite: SuitePlan, known: Scored) -> list[MeanScore]:
    """Mean of each metric with its interval; raises `UsageError` for no score, or one that is no finite number."""
    if not known.by_metric:
        why = "" if known.error is None else f" ({one_line(known.error)})"
        raise UsageError(f"suite {suite.name} has no scores: none of its {known.items:,} items got one{why}")
    found = []
    for metric, scores in known.by_metric.items():
        values = np.array(list(scores.values()), float)
        if not (np.abs(values) <= LARGEST_SCORE).all():
            raise UsageError(no_score(suite, metric, scores))
        clusters = source_numbers(known.sources[item] for item in scores)
        mean, low, high = interval(values, clusters, suite.metric(metric).standard.confidence)
        found.append(
            MeanScore(
                metric=metric,
                mean=mean,
                low=low,
                high=high,
                items=len(scores),
                lower_is_better=suite.metric(metric).lower_is_better,
                same=len(values) > 1 and bool(values.min() == values.max()),
            )
        )
    return found


def no_score(suite: SuitePlan, metric: str, scores: Mapping[ItemKey, float]) -> str:
    """Sentence about scores that are no finite numbers, or so large that no mean and no interval holds them."""
    bad = {key.item: score for key, score in scores.items() if not abs(score) <= LARGEST_SCORE}
    item, score = next(iter(bad.items()))
    fault = f"is beyond {LARGEST_SCORE:g}" if np.isfinite(score) else "is no finite number"
    return (
        f"suite {suite.name}: the score {metric!r} of {len(bad):,} items ({one_line(item, most=60)} for one) "
        f"{fault}; return null instead"
    )


def failed_suite(
    label: str, suite: SuitePlan, target: ModelTarget, error: Exception, say: Say
) -> SuiteRecord:
    """Record of a suite that ended in an error."""
    if not isinstance(error, ConserveError):
        say("".join(traceback.format_exception(error)).rstrip())
    said = str(error) if isinstance(error, ConserveError) else f"{type(error).__name__}: {error}"
    return SuiteRecord(name=label, kind=suite.kind, target=target.name, error=one_line(said))


def sentence(suite: SuiteRecord) -> str:
    """A suite that has ended, in words."""
    if suite.error is not None:
        return f"{suite.name}: {suite.error}"
    scores = ", ".join(
        f"{score.metric} {score.mean:.4g} ({score.low:.3g} to {score.high:.3g})" for score in suite.scores
    )
    lost = f", {suite.failed:,} without an answer ({suite.first_error})" if suite.failed else ""
    return f"{suite.name}: {scores}, {suite.items:,} items{lost}{''.join(map(sameness, suite.scores))}"


def unmatched_metrics(suite: SuitePlan, record: SuiteRecord) -> str:
    """Doubt about entries for metrics by which no item has a score."""
    scored = {score.metric for score in record.scores}
    lost = sorted(suite.metrics.keys() - scored) if record.error is None else []
    if not lost:
        return ""
    names = ", ".join(f"suites.{suite.name}.metrics.{name}" for name in lost)
    return f"; {names}: no item has such a score; there are: {', '.join(sorted(scored))}"


def sameness(score: MeanScore) -> str:
    """Doubt about a score that every item has, as where it compares with the wrong column."""
    if not score.same:
        return ""
    if score.mean == 0 and not score.lower_is_better:
        return f"; {blind(score.metric)}"
    return f"; every item scores {score.mean:.4g} by {score.metric}: see that it tells right from wrong"
