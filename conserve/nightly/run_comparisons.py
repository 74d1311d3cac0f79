"""Comparisons of kept runs: with another run, or with the history of their evaluation."""

import logging
import shlex
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path

from conserve.errors import StoreDamaged
from conserve.evals.comparison import (
    Comparison,
    SuiteMetric,
    SuiteScores,
    asks_alike,
    differences,
    judge_together,
    metric_of,
    missing,
    unpaired_suites,
)
from conserve.evals.history import ChangePoint, change_point, lasting_decline
from conserve.evals.plan import SuitePlan
from conserve.evals.plan_file import plan_of
from conserve.evals.records import HISTORY, PREVIOUS, RunRecord, SuiteRecord
from conserve.nightly import keeping
from conserve.nightly.items import ItemKey, scores_of, texts_of
from conserve.nightly.running import overridden
from conserve.store.files import nights

log = logging.getLogger(__name__)

NIGHTS = 60  # that a history reaches back
FAMILIES = 2  # of tests against a history: the night against the level, and changes of level
LEVEL_NIGHTS = 14  # that make the level which a run is compared with
FLIPS = 200  # shown of a metric
UNREAD = "has no night before whose items can be read"
UNLIKE = "asks or scores otherwise than every night before; it can be judged from the next night on"


def comparison(home: Path, run: RunRecord, against: str) -> Comparison | None:
    """Comparison of a run with "previous", "history", or any name of a run; None without an earlier run."""
    if against == HISTORY:
        return with_history(home, run)
    if against == PREVIOUS:
        before = keeping.previous(home, run)
        return None if before is None else with_run(home, before, run)
    return with_run(home, keeping.resolve(home, against, beside=run), run)


def with_run(home: Path, before: RunRecord, after: RunRecord) -> Comparison:
    """Comparison of two runs, item by item; what counts as worse is as the later run's file says."""
    plans = plans_of(after)
    try:
        then = scores(home, before)
    except StoreDamaged as error:
        given = [shlex.quote(name) for name in keeping.names_of(home, before)]
        raise StoreDamaged(
            f"{error}" + "".join(f"; then name another: conserve eval name last {name}" for name in given)
        ) from error
    now = scores(home, after)
    judged, metrics = judge_together(then, now, plans)
    absent = missing(before, after, plans)
    return Comparison(
        before=before.id,
        after=after.id,
        differences=differences(before, after),
        judged=judged,
        metrics=metrics,
        missing=unpaired_suites(then, now, plans, judged, before.id) | absent,
        new=[suite.name for suite in after.suites if before.suite(suite.name) is None],
    )


def with_history(home: Path, after: RunRecord) -> Comparison | None:
    """Comparison with the level of earlier nights, item by item, and declines of level among the nights.

    The level is each item's mean score over the nights since the last change, at most fourteen. Of each suite only
    nights count that asked and scored alike.
    """
    earlier = keeping.history(home, after)[-NIGHTS:]
    if not earlier:
        return None
    plans = plans_of(after)
    level = level_scores(home, earlier, after)
    now = scores(home, after)
    judged, metrics = judge_together(level, now, plans, families=FAMILIES)
    since = begun_anew([*earlier, after], after)
    unlike = {suite: UNLIKE for suite, first in since.items() if first == after.id}
    asked = {name.suite for name in series_of(earlier, after)} & {suite.name for suite in after.suites}
    unread = dict.fromkeys(asked - level.keys(), UNREAD)
    newest = newest_scored(earlier)
    absent = missing(newest, after, plans)
    return Comparison(
        before=HISTORY,
        after=after.id,
        differences=differences(newest, after),
        judged=judged,
        metrics=metrics,
        missing=unpaired_suites(level, now, plans, judged, "its history") | unread | unlike | absent,
        new=[suite.name for suite in after.suites if suite.name not in {*level, *unread, *unlike}],
        changes=declines([*earlier, after], after, plans),
        nights=[run.id for run in earlier],
        since=since,
    )


def declines(
    runs: Sequence[RunRecord], after: RunRecord, plans: Mapping[str, SuitePlan]
) -> dict[SuiteMetric, ChangePoint]:
    """Lasting declines among the nights that are as large as what counts; metrics share their chance of error."""
    every = {name: (series, metric_of(plans, *name)) for name, series in series_of(runs, after).items()}
    judged = {name: (series, one) for name, (series, one) in every.items() if one is not None and one.judged}
    found = {}
    for name, (series, metric) in judged.items():
        alpha = metric.standard.alpha / (FAMILIES * len(judged))
        sign = -1 if metric.lower_is_better else 1
        change = lasting_decline([sign * score for _, score in series], metric.standard.effect, alpha=alpha)
        if change is not None:
            night = runs.index(series[change.night][0])
            found[name] = change._replace(night=night, before=sign * change.before, since=sign * change.since)
    return found


def series_of(
    runs: Sequence[RunRecord], after: RunRecord
) -> dict[SuiteMetric, list[tuple[RunRecord, float]]]:
    """Mean scores of each metric, night by night, of nights that asked and scored as the run `after` them."""
    found: dict[SuiteMetric, list[tuple[RunRecord, float]]] = {}
    for name, nights_of_suite in alike(runs, after).items():
        for run, suite in nights_of_suite:
            for score in suite.scores:
                found.setdefault(SuiteMetric(name, score.metric), []).append((run, score.mean))
    return found


def alike(runs: Sequence[RunRecord], after: RunRecord) -> dict[str, list[tuple[RunRecord, SuiteRecord]]]:
    """Nights of each suite that has scores, since the last one that asked or scored otherwise than `after`."""
    found: dict[str, list[tuple[RunRecord, SuiteRecord]]] = {}
    for run in runs:
        for suite in run.suites:
            if suite.error is None:
                now = after.suite(suite.name)
                same = now is None or now.error is not None or asks_alike(suite, now)
                found[suite.name] = [*found.get(suite.name, ()), (run, suite)] if same else []
    return found


def begun_anew(runs: Sequence[RunRecord], after: RunRecord) -> dict[str, str]:
    """First night that asked and scored as the run `after` them, of suites that did otherwise before."""
    having = Counter(suite.name for run in runs for suite in run.suites if suite.error is None)
    return {
        name: nights_of_suite[0][0].id
        for name, nights_of_suite in alike(runs, after).items()
        if 0 < len(nights_of_suite) < having[name]
    }


def newest_scored(earlier: Sequence[RunRecord]) -> RunRecord:
    """The last night, with each suite as of the newest night in which it has scores."""
    newest = {suite.name: suite for run in earlier for suite in run.suites if suite.error is None}
    return replace(earlier[-1], suites=tuple(newest.values()))


def level_scores(home: Path, earlier: Sequence[RunRecord], after: RunRecord) -> dict[str, SuiteScores]:
    """Mean score of each item over the nights since the last change of level, but those whose items are damaged."""
    nights_by_suite = alike(earlier, after)
    begins: dict[str, int] = {}
    for name, series in series_of(earlier, after).items():
        change = change_point([score for _, score in series])
        first = series[change.night][0].id if change is not None else None
        nights_of_suite = [run.id for run, _ in nights_by_suite[name.suite]]
        begin = 0 if first is None else nights_of_suite.index(first)
        begins[name.suite] = max(begins.get(name.suite, 0), begin)
    sums: dict[str, dict[str, dict[Hashable, list[float]]]] = {}
    sources: dict[str, dict[Hashable, str]] = {}
    for suite, begin in begins.items():
        for run, record in nights_by_suite[suite][begin:][-LEVEL_NIGHTS:]:
            try:
                one = suite_scores(home, run, record)
            except StoreDamaged as error:
                log.warning("the night is left out of the level: %s", error)
                continue
            sources.setdefault(suite, {}).update(one.sources)
            for metric, items in one.by_metric.items():
                collected = sums.setdefault(suite, {}).setdefault(metric, {})
                for item, score in items.items():
                    collected.setdefault(item, []).append(score)
    return {
        suite: SuiteScores(
            {m: {item: mean(s) for item, s in items.items()} for m, items in metrics.items()},
            sources[suite],
        )
        for suite, metrics in sums.items()
    }


def mean(nights: Sequence[float]) -> float:
    """Mean of an item's scores; of equal ones their very number, since a rounding would be a difference."""
    return nights[0] if min(nights) == max(nights) else fsum(nights) / len(nights)


def scores(home: Path, run: RunRecord) -> dict[str, SuiteScores]:
    """Scores of all suites of a run."""
    return {suite.name: suite_scores(home, run, suite) for suite in run.suites if suite.file is not None}


def suite_scores(home: Path, run: RunRecord, suite: SuiteRecord) -> SuiteScores:
    """Scores of one suite."""
    assert suite.file is not None
    found = scores_of(nights.folder_of(home, run.id) / suite.file)
    return SuiteScores(dict(found.by_metric), dict(found.sources))  # type: ignore[arg-type]


def plans_of(run: RunRecord) -> dict[str, SuitePlan]:
    """Suites of a run's own file, by their names in its record."""
    return overridden(plan_of(run.plan), run.overrides).standards()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """An item whose score changed, with both answers."""

    suite: str
    metric: str
    item: str
    epoch: int
    before: float
    after: float
    prompt: str
    expected: str | None
    before_answer: str | None
    after_answer: str | None

    @property
    def rose(self) -> bool:
        """True if the score rose."""
        return self.after > self.before


def flips(home: Path, before: RunRecord, after: RunRecord, *, most: int = FLIPS) -> Iterator[Flip]:
    """Yield items whose scores changed, those that fell first; at most so many of each metric and direction.

    Those of a suite of which a file of items is damaged are left out.
    """
    for suite in after.suites:
        other = before.suite(suite.name)
        if suite.file is None or other is None or other.file is None:
            continue
        folders = [nights.folder_of(home, run.id) for run in (before, after)]
        try:
            yield from flips_of(suite.name, folders[0] / other.file, folders[1] / suite.file, most)
        except StoreDamaged as error:
            log.warning("flips of %s are left out: %s", suite.name, error)


def flips_of(suite: str, before: Path, after: Path, most: int) -> Iterator[Flip]:
    """Yield items of a suite whose scores changed between two files of items."""
    then, now = scores_of(before), scores_of(after)
    changed = {
        metric: changed_items(then.by_metric.get(metric, {}), items, most)
        for metric, items in now.by_metric.items()
    }
    wanted = {key for keys in changed.values() for key in keys}
    texts = [texts_of(path, wanted) for path in (before, after)]
    for metric, keys in changed.items():
        for key in keys:
            yield Flip(
                suite=suite,
                metric=metric,
                item=key.item,
                epoch=key.epoch,
                before=then.by_metric[metric][key],
                after=now.by_metric[metric][key],
                prompt=texts[1][key]["prompt"],
                expected=texts[1][key]["expected"],
                before_answer=texts[0][key]["answer"],
                after_answer=texts[1][key]["answer"],
            )


def changed_items(
    before: Mapping[ItemKey, float], after: Mapping[ItemKey, float], most: int
) -> list[ItemKey]:
    """Items whose score changed: those that fell, then those that rose."""
    fell = [key for key, score in after.items() if key in before and score < before[key]]
    rose = [key for key, score in after.items() if key in before and score > before[key]]
    return [*fell[:most], *rose[:most]]


def two_runs(home: Path, first: str, second: str) -> tuple[RunRecord, RunRecord]:
    """Two runs of one evaluation by their names."""
    after = keeping.resolve(home, second)
    return keeping.resolve(home, first, beside=after), after
