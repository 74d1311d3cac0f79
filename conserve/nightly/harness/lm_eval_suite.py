"""Suites of nightly.toml by lm-evaluation-harness: its tasks, prompts, filters and metrics; our queue's answers."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from conserve.errors import EvaluationUnready, SettingsError, one_line
from conserve.evals.outcome import LARGEST_SCORE, Item, SuiteOutcome
from conserve.evals.plan import LESS_IS_BETTER, SuitePlan
from conserve.nightly.harness.libraries import absent_hub, require
from conserve.nightly.harness.model_access import model_tokens, settings_of_target
from conserve.nightly.harness.options import options_fact, typed_options
from conserve.nightly.harness.request_jobs import NotingQueue
from conserve.nightly.suite import Night

log = logging.getLogger(__name__)

OPTIONS = {
    "tasks": list,
    "include": str,
    "num_fewshot": int,
    "chat_template": bool,
    "multiturn": bool,
    "system": str,
    "params": dict,
    "tokenizer": str,
    "max_length": int,
    "max_tokens": int,
    "scoring": str,
}
"""Options of a suite, by type. `include` is a folder of task files beside nightly.toml; `params` are gen_kwargs."""
SAID = ("params", "system", "chat_template", "multiturn", "max_length", "max_tokens", "scoring")
"""Options that change answers, beside what lm-eval says of its tasks."""


class LmEvalSuite:
    """Kind `lm-eval`: any task of lm-evaluation-harness."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = checked_options(suite)
        require("lm_eval")
        known = task_manager(options, folder)
        unknown = [name for name in options["tasks"] if not known.match_tasks([name])]
        if unknown:
            where = (
                f" or {options['include']}"
                if "include" in options
                else "; name a folder of your own: include"
            )
            raise SettingsError(f"suites.{suite.name}: there is no task {unknown[0]!r} in lm-eval{where}")

    def run(self, night: Night) -> SuiteOutcome:
        from conserve.nightly.harness.lm_eval_model import ConserveLM

        suite, options = night.suite, checked_options(night.suite)
        tokens = model_tokens(
            settings_of_target(night.settings, night.target, tokenizer=options.get("tokenizer")),
            flags=night.target.engine_args,
            **{name: options[name] for name in ("tokenizer", "max_length", "scoring") if name in options},
        )
        recorded = NotingQueue(night)
        model = ConserveLM(queue=recorded, tokens=tokens, max_gen_toks=options.get("max_tokens", 256))
        found = [evaluation_results(model, suite, options, night.folder) for _ in range(suite.epochs)]
        if left_out := unscored_metrics(found[0]):
            log.warning(
                "suites.%s: %s is left out, since lm-eval scores no single item by it",
                suite.name,
                ", ".join(left_out),
            )
        items = [item for epoch, one in enumerate(found) for item in items_of(one, epoch)]
        facts = facts_of(found[0]) | {"params": options_fact(options, SAID)}
        return SuiteOutcome(items=items, facts=facts, job_ids=recorded.job_ids)


def checked_options(suite: SuitePlan) -> Mapping[str, Any]:
    """Options of a suite; raises `SettingsError` for unknown ones, ones of another type, and without tasks."""
    options = typed_options(suite, OPTIONS)
    if not options.get("tasks"):
        raise SettingsError(f'suites.{suite.name} has no tasks; name them: tasks = ["gsm8k", "mmlu"]')
    return options


def task_manager(options: Mapping[str, Any], folder: Path) -> Any:
    """Index of the tasks: of the suite's folder alone if that has all, else with lm-eval's thousands."""
    include = options.get("include")
    if include is not None and not (folder / include).is_dir():
        raise SettingsError(f"there is no folder {folder / include}; correct include")
    return index(None if include is None else str(folder / include), tuple(options["tasks"]))


@lru_cache(maxsize=8)
def index(include: str | None, tasks: Sequence[str]) -> Any:
    """Index of lm-eval's, which takes it seconds to read."""
    from lm_eval.tasks import TaskManager

    if include is not None:
        ours = TaskManager(include_path=include, include_defaults=False)
        if all(ours.match_tasks([name]) for name in tasks):
            return ours
    return TaskManager(include_path=include)


def evaluation_results(
    model: Any, suite: SuitePlan, options: Mapping[str, Any], folder: Path
) -> Mapping[str, Any]:
    """Results of lm-eval's own evaluation; raises `EvaluationUnready` if a data set cannot be had."""
    import lm_eval

    try:
        found: Mapping[str, Any] = lm_eval.simple_evaluate(
            model=model,
            tasks=list(options["tasks"]),
            task_manager=task_manager(options, folder),
            num_fewshot=options.get("num_fewshot"),
            limit=suite.limit,
            apply_chat_template=options.get("chat_template", False),
            fewshot_as_multiturn=options.get("multiturn", options.get("chat_template", False)),
            system_instruction=options.get("system"),
            gen_kwargs=options.get("params"),
            random_seed=suite.seed,
            numpy_random_seed=suite.seed,
            torch_random_seed=suite.seed,
            fewshot_random_seed=suite.seed,
            bootstrap_iters=0,
            log_samples=True,
        )
    except OSError as error:  # files that are missing, and the network
        raise EvaluationUnready(
            f"suites.{suite.name}: the data of {', '.join(options['tasks'])} cannot be read ({why(error)}); "
            "put the files on this machine and name them in a task of your own (include), or fill datasets' cache"
        ) from error
    return found


def why(error: OSError) -> str:
    """Reason why data cannot be read."""
    hub = absent_hub()
    return one_line(error) if hub is None else f"no hub answers at {hub}, and this machine has not all of it"


def items_of(found: Mapping[str, Any], epoch: int) -> Iterator[Item]:
    """Items of an evaluation: one for each question of each task, with the scores by each filter."""
    for task, samples in found["samples"].items():
        by_question: dict[object, list[Mapping[str, Any]]] = {}
        for sample in samples:
            by_question.setdefault(sample["doc_id"], []).append(sample)
        for doc_id, each in by_question.items():
            yield Item(
                id=f"{task}/{doc_id}",
                prompt=str(each[0]["arguments"][0][0]),
                answer=answer_of(each[0]),
                expected=str(each[0]["target"]),
                scores=scores_of(each),
                epoch=epoch,
            )


def answer_of(sample: Mapping[str, Any]) -> str:
    """Text that a sample was answered with: the likeliest continuation, or what the model wrote."""
    given = [response[0] for response in sample["resps"]]
    if isinstance(given[0], tuple | list):  # log-likelihoods
        best = max(range(len(given)), key=lambda number: given[number][0])
        return str(sample["arguments"][best][1]).strip()
    return str(given[0])


def scores_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Scores of one question by metric; with several filters the metric names its filter."""
    scores = {}
    for sample in samples:
        for metric in sample["metrics"]:
            name = metric if len(samples) == 1 else f"{metric},{sample['filter']}"
            value = number(sample[metric], metric)
            if value is not None:
                scores[name] = value
    return scores


def number(value: object, metric: str) -> float | None:
    """Score of a sample as a number; None where lm-eval has a score of all samples together alone, as for f1."""
    if metric in LESS_IS_BETTER and isinstance(value, tuple | list):
        return perplexity(metric, *value)
    if metric == "perplexity":  # of all samples; the value of one is its log-likelihood
        return None
    return float(value) if isinstance(value, int | float | np.number | np.bool_) else None


def perplexity(metric: str, loglikelihood: float, length: float) -> float | None:
    """Perplexity of one text, or its bits, from its log-likelihood and length; None for no length, or no number."""
    if not length:
        return None
    nats = -float(loglikelihood) / float(length)
    if metric == "bits_per_byte":
        return nats / math.log(2)
    return math.exp(nats) if nats < math.log(LARGEST_SCORE) else None


def unscored_metrics(found: Mapping[str, Any]) -> list[str]:
    """Metrics by which no sample has a score of its own."""
    known: dict[str, bool] = {}
    for samples in found["samples"].values():
        for sample in samples:
            for metric in sample["metrics"]:
                known[metric] = known.get(metric, False) or number(sample[metric], metric) is not None
    return sorted(metric for metric, has_scores in known.items() if not has_scores)


def facts_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Facts that two nights must share: lm-eval's version, and the version, shots and questions of each task."""
    facts = {"lm_eval": version("lm_eval")}
    for task, samples in found["samples"].items():
        digest = hashlib.blake2b(digest_size=8)
        for sample in samples:
            digest.update(f"{sample['doc_hash']}{sample['prompt_hash']}{sample['target_hash']}".encode())
        shots = found.get("n-shot", {}).get(task)
        facts[f"task {task}"] = (
            f"version {found['versions'].get(task)}, {shots} shots, questions {digest.hexdigest()}"
        )
    return facts
