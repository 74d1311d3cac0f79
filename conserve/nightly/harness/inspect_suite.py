"""Suites of nightly.toml by inspect_ai: its tasks, solvers, tools and scorers; our queue's answers."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conserve.errors import ConserveError, EvaluationUnready, SettingsError, one_line
from conserve.evals.outcome import Item, SuiteOutcome
from conserve.evals.plan import SuitePlan
from conserve.hosts import without_login
from conserve.nightly.harness.libraries import require
from conserve.nightly.harness.options import options_fact, typed_options
from conserve.nightly.harness.request_jobs import NotingQueue
from conserve.nightly.questions import digest_of
from conserve.nightly.suite import Night

OPTIONS = {
    "task": str,
    "args": dict,
    "params": dict,
    "emulate_tools": bool,
    "max_samples": int,
    "group": str,
    "logs": str,
}
"""Options of a suite, by type. `params` are inspect_ai's GenerateConfig, `group` is a metadata field of samples."""
MOST_SAMPLES = 1000  # at a time


class InspectSuite:
    """Kind `inspect`: any task of inspect_ai, as `file.py@name` or by its registered name."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = checked_options(suite)
        require("inspect_ai")
        name = options["task"].partition("@")[0]
        if name.endswith(".py") and not (folder / name).is_file():
            raise SettingsError(f"there is no file {folder / name}; correct suites.{suite.name}.task")

    def run(self, night: Night) -> SuiteOutcome:
        recorded = NotingQueue(night)
        # The folder lives on while the log is used: inspect_ai reads it only then.
        with tempfile.TemporaryDirectory(prefix="conserve-") as scratch:
            options = checked_options(night.suite)
            log = evaluation_log(night, recorded, options, scratch)
            if log.status != "success" or not log.samples:
                said = one_line(log.error.message) if log.error else "it has no samples"
                raise EvaluationUnready(
                    f"suites.{night.suite.name}: inspect_ai ended with {log.status}: {said}"
                )
            items = with_failed(
                night.suite, [item_of(sample, night.suite.options.get("group")) for sample in log.samples]
            )
            facts = facts_of(log, items) | {"params": options_fact(options, ("args", "params"))}
        items.sort(key=lambda item: item.epoch)  # a stable sort: by epoch, then in the order of the data set
        return SuiteOutcome(items=items, facts=facts, job_ids=recorded.job_ids)


def checked_options(suite: SuitePlan) -> Mapping[str, Any]:
    """Options of a suite; raises `SettingsError` for unknown ones, ones of another type, and without a task."""
    options = typed_options(suite, OPTIONS)
    if "task" not in options:
        raise SettingsError(f'suites.{suite.name} has no task; name one: task = "arithmetic.py@addition"')
    return options


def evaluation_log(night: Night, recorded: NotingQueue, options: Mapping[str, Any], scratch: str) -> Any:
    """Log of inspect_ai's own evaluation, in a folder beside nightly.toml if the suite names one."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    from conserve.nightly.harness import inspect_provider  # noqa: F401  it registers the provider
    from conserve.nightly.harness.inspect_model import hand_over

    suite, target = night.suite, night.target
    tools = {"emulate_tools": options["emulate_tools"]} if "emulate_tools" in options else {}
    if target.endpoint is not None:
        tools["endpoint"] = without_login(target.endpoint)  # its log has it; the night's queue asks
    with hand_over(recorded) as token:
        model = get_model(
            f"conserve/{target.model or night.settings.engine_model}",
            memoize=False,
            handed=token,
            jobs=1,
            **tools,
        )
        try:
            (log,) = evaluate(
                task_of(options["task"], night.folder),
                model=model,
                task_args=options.get("args", {}),
                epochs=suite.epochs,
                limit=suite.limit,
                log_dir=str(night.folder / options["logs"]) if "logs" in options else scratch,
                display="none",
                fail_on_error=False,
                max_connections=MOST_SAMPLES,
                max_samples=options.get("max_samples", MOST_SAMPLES),
                **{"seed": suite.seed, **options.get("params", {})},
            )
        except ConserveError:
            raise
        except Exception as error:  # of the user's task, or of its data
            raise EvaluationUnready(
                f"suites.{suite.name}: {type(error).__name__}: {one_line(error)}"
            ) from error
    return log


def task_of(name: str, folder: Path) -> str:
    """Name of a task for inspect_ai: a file beside nightly.toml by its path."""
    file, at, function = name.partition("@")
    return f"{folder / file}{at}{function}" if file.endswith(".py") else name


def item_of(sample: Any, group: str | None) -> Item:
    """Item of one sample and epoch; one that failed has its error."""
    usage = list((sample.model_usage or {}).values())
    source = (sample.metadata or {}).get(group) if group else None
    return Item(
        id=str(sample.id),
        prompt=sample.input if isinstance(sample.input, str) else "\n\n".join(m.text for m in sample.input),
        answer=None if sample.error else sample.output.completion,
        scores=dict(scores_of(sample)),
        source=None if source is None else str(source),
        epoch=sample.epoch - 1,
        expected=sample.target if isinstance(sample.target, str) else ", ".join(sample.target),
        error=one_line(sample.error.message) if sample.error else None,
        prompt_tokens=sum(one.input_tokens for one in usage),
        answer_tokens=sum(one.output_tokens for one in usage),
    )


def with_failed(suite: SuitePlan, items: Sequence[Item]) -> list[Item]:
    """Items in which samples that failed have the scores of a question without an answer."""
    metrics = list(dict.fromkeys(metric for item in items for metric in item.scores))
    return [item if item.error is None else replace(item, scores=suite.unanswered(metrics)) for item in items]


def scores_of(sample: Any) -> Iterator[tuple[str, float]]:
    """Scores of a sample by scorer; of a score with parts, each part by `scorer.part`."""
    from inspect_ai.scorer import value_to_float

    to_float = value_to_float()
    for scorer, score in (sample.scores or {}).items():
        if isinstance(score.value, Mapping):
            for part, value in score.value.items():
                yield f"{scorer}.{part}", to_float(value)
        elif not isinstance(score.value, list):
            yield scorer, to_float(score.value)


def facts_of(log: Any, items: Iterable[Item]) -> dict[str, str]:
    """Facts that two nights must share: inspect_ai's version, the task's, and its data set with its questions."""
    data = log.eval.dataset
    name = data.name or data.location or "of the task"
    asked = sorted({(item.id, item.prompt, item.expected or "") for item in items})
    return {
        "inspect_ai": version("inspect_ai"),
        "task": f"{log.eval.task}, version {log.eval.task_version}",
        "dataset": f"{name}, {data.samples} samples, questions {digest_of(asked)}",
    }
