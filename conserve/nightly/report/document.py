"""The document of a run and its comparison, which `--json` prints and all other forms show."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conserve.errors import UsageError
from conserve.evals.comparison import Comparison, SuiteMetric
from conserve.evals.records import HISTORY, PREVIOUS, RunRecord
from conserve.nightly import keeping
from conserve.nightly.run_comparisons import (
    NIGHTS,
    Flip,
    begun_anew,
    comparison,
    flips,
    series_of,
)
from conserve.store.files import nights

Document = dict[str, Any]

MISSING = "missing"


def document(home: Path, run: RunRecord, against: str, *, flips_of: int = 100) -> Document:
    """Document of a run compared with another, or with nothing where there is no earlier one."""
    found = comparison(home, run, against)
    before = None if found is None else before_of(home, run, found)
    shown = [] if before is None else list(flips(home, before, run, most=flips_of))
    return {
        "run": run_document(home, run),
        "comparison": None if found is None else comparison_document(found),
        "headline": headline(found),
        "flips": [flip_document(flip) for flip in shown],
        "flips_against": None if before is None else before.id,
        "nights": nights_document([*keeping.history(home, run)[-NIGHTS + 1 :], run], run),
    }


def skipped_document() -> Document:
    """Document of a night that was skipped, since an earlier run was still going."""
    return {
        "run": None,
        "comparison": None,
        "headline": "Skipped: an earlier run is still going.",
        "flips": [],
        "flips_against": None,
        "nights": [],
    }


def before_of(home: Path, run: RunRecord, found: Comparison) -> RunRecord | None:
    """Run whose answers are shown beside this one's: the other run, or the night before."""
    if found.before == HISTORY:
        return keeping.previous(home, run)
    return keeping.read(home, found.before)


def run_document(home: Path, run: RunRecord) -> Document:
    """A run as JSON."""
    return {
        "id": run.id,
        "evaluation": run.evaluation,
        "names": keeping.names_of(home, run),
        "state": nights.state_of(home, run.state.value, run.evaluation),
        "error": run.error,
        "began_at": iso(run.began_at),
        "ended_at": iso(run.ended_at),
        "work_s": round(run.work_s, 3),
        "prompt_tokens": sum(suite.prompt_tokens for suite in run.suites),
        "answer_tokens": sum(suite.answer_tokens for suite in run.suites),
        "harm": None
        if run.harm is None
        else {name: getattr(run.harm, name) for name in type(run.harm).__slots__},
        "suites": [
            {
                "suite": suite.name,
                "kind": suite.kind,
                "error": suite.error,
                "items": suite.items,
                "failed": suite.failed,
                "first_error": suite.first_error,
                "prompt_tokens": suite.prompt_tokens,
                "answer_tokens": suite.answer_tokens,
                "facts": dict(suite.facts),
                "jobs": list(suite.jobs),
                "scores": [
                    {name: getattr(score, name) for name in type(score).__slots__} for score in suite.scores
                ],
            }
            for suite in run.suites
        ],
    }


def comparison_document(found: Comparison) -> Document:
    """A comparison as JSON."""
    return {
        "before": found.before,
        "after": found.after,
        "verdict": found.verdict.value,
        "differences": [
            {"fact": one.fact, "before": one.before, "after": one.after, "suites": list(one.suites)}
            for one in found.differences
        ],
        "suites": [suite_document(found, name) for name in found.judged],
        MISSING: dict(found.missing),
        "new": list(found.new),
        "changes": [
            {"suite": suite, "metric": metric, "before": one.before, "since": one.since,
             "night": [*found.nights, found.after][one.night], "p": one.p}
            for (suite, metric), one in found.changes.items()
        ],
        "nights": list(found.nights),
        "since": dict(found.since),
    }  # fmt: skip


def suite_document(found: Comparison, name: SuiteMetric) -> Document:
    """Verdict on a metric as JSON; figures of a metric of which less is better have their own sign again."""
    judged, metric = found.judged[name], found.metrics[name]
    if metric.lower_is_better:
        judged = judged._replace(evidence=judged.evidence.negated)
    seen = judged.evidence
    return {
        "suite": name.suite,
        "metric": name.metric,
        "verdict": judged.verdict.value,
        "sentence": judged.sentence,
        "before": seen.before,
        "after": seen.after,
        "difference": seen.difference,
        "low": bounded(seen.low),
        "high": bounded(seen.high),
        "items": seen.items,
        "fell": seen.lost,
        "rose": seen.gained,
        "p_decline": judged.p_decline,
        "p_effect": seen.p_effect,
        "needed": seen.needed,
        "test": seen.test,
        "effect": metric.standard.effect,
        "confidence": metric.standard.confidence,
        "lower_is_better": metric.lower_is_better,
    }


def bounded(value: float) -> float | None:
    """Number that JSON holds; None for infinity."""
    return value if abs(value) != float("inf") else None


def flip_document(flip: Flip) -> Document:
    """A flip as JSON."""
    return {name: getattr(flip, name) for name in type(flip).__slots__}


def nights_document(runs: list[RunRecord], after: RunRecord) -> list[Document]:
    """Scores of each metric, night by night, as JSON; `since` is the first one where others asked otherwise."""
    since = begun_anew(runs, after)
    bounds = {
        (run.id, suite.name, score.metric): score
        for run in runs
        for suite in run.suites
        for score in suite.scores
    }
    return [
        {
            "suite": name.suite,
            "metric": name.metric,
            "since": since.get(name.suite),
            "scores": [
                {
                    "run": run.id,
                    "began_at": iso(run.began_at),
                    "mean": mean,
                    "low": bounds[run.id, *name].low,
                    "high": bounds[run.id, *name].high,
                }
                for run, mean in series
            ],
        }
        for name, series in series_of(runs, after).items()
    ]


def headline(found: Comparison | None) -> str:
    """Verdict in one sentence."""
    if found is None:
        return "The first night: there is nothing to compare with yet."
    if found.of_itself:
        return "The same run: no worse than itself."
    than = "its history" if found.before == HISTORY else found.before
    worse = [f"{name.suite} {name.metric}" for name, one in found.judged.items() if one.verdict == "worse"]
    worse += [
        f"{name.suite} {name.metric}" for name in found.changes if f"{name.suite} {name.metric}" not in worse
    ]
    if worse:
        return f"Worse than {than}: {', '.join(worse)}."
    doubtful = [
        f"{name.suite} {name.metric}" for name, one in found.judged.items() if one.verdict == "cannot tell"
    ]
    doubtful += list(found.missing)
    if doubtful or not found.judged:
        return f"Cannot tell whether it is worse than {than}: {', '.join(doubtful) or 'no suite in common'}."
    return f"No worse than {than}."


def iso(seconds: float | None) -> str | None:
    """Moment in s since 1970 as ISO 8601 in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def against_of(home: Path, run: RunRecord, wanted: str | None, by_file: str) -> str:
    """Name of the run to compare with: as asked for, else as its file says; `previous` until a run has that name.

    Raises `UsageError` for an id that stands for no run to compare with, and for a name whose run is gone.
    """
    if wanted is not None:
        return wanted
    if by_file in (PREVIOUS, HISTORY):
        return by_file
    try:
        keeping.resolve(home, by_file, beside=run)
    except UsageError as error:
        if keeping.is_id(by_file, run.evaluation):
            raise UsageError(f"the file compares with another run: {error}") from error
    else:
        return by_file
    known = {one.id for one in keeping.runs(home)}
    gone = [one for one, names in nights.names(home).items() if one not in known and by_file in names]
    mine = [one for one in gone if one.startswith(f"{run.evaluation}-")]
    if mine:
        raise UsageError(
            f"the run {mine[0]}, called {by_file}, is gone; run: conserve eval name last {by_file}"
        )
    return PREVIOUS


def at_least_one_suite(run: RunRecord) -> None:
    """Raise for a run that has no suite yet."""
    if not run.suites:
        raise UsageError(f"{run.id} has no suite that ended yet; go on with: conserve eval run FILE")
