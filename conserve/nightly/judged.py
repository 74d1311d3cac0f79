"""Suites whose answers a judge scores: a second job over the answers of the first."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from conserve.api.job import Job
from conserve.errors import InputError, SettingsError, UsageError
from conserve.evals.outcome import Item, SuiteOutcome
from conserve.evals.plan import ModelTarget, SuitePlan
from conserve.evals.plan_file import PlanTable
from conserve.jobs.requests.rendering import template_names
from conserve.nightly.harness.request_jobs import row_missing
from conserve.nightly.options import ASKING, Options, asking_of
from conserve.nightly.questions import Answer, Questions, ask_questions, digest_of, whole_results
from conserve.nightly.redacted import address_of
from conserve.nightly.scored import METRIC, parse_json, scores_or_zero
from conserve.nightly.suite import Night
from conserve.nightly.targets import check_target

ANSWER = "answer_of_model"
SAME = "the same"  # model or address as the suite's
OWN = ("judge",)
OF_JUDGE = (
    *ASKING, "model", "endpoint", "engine_args", "pattern", "field", "scale", "grades",
)  # fmt: skip
NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
TRUTHS = {"yes": 1.0, "no": 0.0}


class JudgeScores:
    """Scores by a judge, which is asked about each question and the model's answer to it."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = Options(suite, folder, own=OWN)
        columns = options.check()
        judge = Judge(options)
        judge.check([*columns, ANSWER])
        check_target(judge.target(ModelTarget()), f"{options.where}.judge")

    def run(self, night: Night) -> SuiteOutcome:
        options = Options(night.suite, night.folder, own=OWN)
        judge = Judge(options)
        asked = ask_questions(night, options)
        target = judge.target(night.target)
        facts = asked.facts | judge.facts(target)
        if all(one.text is None for one in asked.answers()):
            unjudged = (judge.item(one, None) for one in asked.answers())
            return SuiteOutcome(items=unjudged, facts=facts, job_ids=asked.job_ids, origins=asked.origins)
        of_model = (target.model, target.endpoint, target.engine_args)
        key = f"judge-{digest_of(answers_digest(asked), judge.asking, of_model)}"
        job = night.submit_once(key, to_judge(asked), target=target, **judge.asking)
        night.await_answers(job)

        def items() -> Iterator[Item]:
            verdicts = map(asked.origins.noted, whole_results(job, job.results()))
            for one in asked.answers():
                yield judge.item(one, verdict_of(job, verdicts) if one.text is not None else None)

        job_ids = [*asked.job_ids, job.id]
        return SuiteOutcome(items=items(), facts=facts, job_ids=job_ids, origins=asked.origins)


class Judge:
    """Table `judge` of a suite: what is asked of which model, and how its answer becomes a score."""

    def __init__(self, options: Options) -> None:
        self.table = options.table.table("judge")
        self._where = f"{options.where}.judge"
        self.table.only(OF_JUDGE)
        self.asking = asking_of(self.table, options.suite, options.folder)
        self._grades = grades_of(self.table)
        self._pattern = pattern_of(self.table, self._where, self._grades)
        self._field = self.table.text("field")
        scale = self.table.real("scale")
        if scale == 0:
            raise SettingsError(f"{self._where}.scale divides each score; give the largest one, as 10")
        self._scale = 1.0 if scale is None else scale

    def check(self, columns: Sequence[str]) -> None:
        """Raise for a prompt that does not show the answer, or names none of these columns."""
        prompt = self.asking["prompt"] or ""
        try:
            names = template_names(prompt, columns)
        except UsageError as error:
            raise SettingsError(f"{self._where}.prompt: {error}") from error
        if missing := sorted(names.difference(columns)):
            raise SettingsError(
                f"{self._where}.prompt names {missing[0]!r}, but the columns are: {', '.join(columns)}"
            )
        if ANSWER not in names:
            raise SettingsError(
                f"{self._where}.prompt does not show the answer; write {{{{ {ANSWER} }}}} in it"
            )

    def target(self, of_suite: ModelTarget) -> ModelTarget:
        """The judge's model; the suite's own unless the table names another."""
        model, endpoint = self.table.text("model"), self.table.text("endpoint")
        if model is None and endpoint is None:
            return of_suite
        return ModelTarget(
            name="judge", model=model, endpoint=endpoint, engine_args=self.table.texts("engine_args")
        )

    def facts(self, target: ModelTarget) -> dict[str, str]:
        """Facts about the model that judges, what it is asked, and how its answer becomes a score.

        Its address is a fact only where no model is named: the same model may move.
        """
        found = {
            "judge": digest_of(self.asking),
            "judge_model": target.model or SAME,
            "scorer": digest_of(self.table.text("pattern"), self._field, self._scale, self._grades),
        }
        if target.model is None:
            address = address_of(self.table.text("endpoint") or "")
            found["judge_endpoint"] = address.partition("?")[0] or SAME
        return found

    def item(self, answer: Answer, verdict: Mapping[str, Any] | None) -> Item:
        """Item of an answer and the judge's verdict. Without a verdict it has no score, and an error."""
        if verdict is None:
            return answer.item(scores_or_zero(answer, {}))
        score = self.score(verdict["text"])
        if score is None:
            said = verdict["error"] or f"its answer has no score: {verdict['text']!r:.200}"
            return answer.item({}, f"the judge: {said}")
        return answer.item({METRIC: score})

    def score(self, text: str | None) -> float | None:
        """Score in the judge's answer; None if it has none."""
        if text is None:
            return None
        if self._field is not None:
            value = parse_json(text)
            found = value.get(self._field) if isinstance(value, dict) else None
        else:
            match = self._pattern.search(text)
            found = None if match is None else first_group(match)
        return self._number(found)

    def _number(self, found: object) -> float | None:
        word = str(found).strip().lower()
        if isinstance(found, bool) and word not in self._grades:  # in the field of a JSON answer
            return float(found)
        try:
            score = self._grades[word] if word in self._grades else float(word) / self._scale
        except ValueError:
            return None
        return score if isfinite(score) else None


def first_group(match: re.Match[str]) -> str:
    """Text of the first group that took part in a match; of the whole match without one."""
    return next((group for group in match.groups() if group is not None), match[0])


def verdict_of(job: Job, verdicts: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Next verdict of the judge's job; raises `RowsFailed` if it has none."""
    verdict = next(verdicts, None)
    if verdict is None:
        raise row_missing(job, job.progress().rows)
    return verdict


def grades_of(table: PlanTable) -> dict[str, float]:
    """Scores of words: those that the table names, else yes and no."""
    named = table.table("grades")
    return {word.lower(): named.real(word) or 0.0 for word in named.names} or TRUTHS


def pattern_of(table: PlanTable, where: str, grades: Mapping[str, float]) -> re.Pattern[str]:
    """Pattern of the score; by default the first grade or number, and of grades that begin alike the longest."""
    words = "|".join(map(re.escape, sorted(grades, key=len, reverse=True)))
    text = table.text("pattern") or rf"(?i)(?<!\w)({words}|{NUMBER})(?!\w)"
    try:
        return re.compile(text)
    except re.error as error:
        raise SettingsError(f"{where}.pattern is no regular expression: {error}") from error


def to_judge(questions: Questions) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the judge's job: the columns of each question as its prompt had them, and the answer."""
    answers = questions.answers()
    for _ in questions.jobs:
        for number, (columns, one) in enumerate(zip(questions.data.asked_rows(), answers, strict=False)):
            if one.row_index != number:
                raise changed_error(questions)
            if one.text is not None:
                yield {**columns, ANSWER: one.text}
    if next(answers, None) is not None:
        raise changed_error(questions)


def changed_error(questions: Questions) -> InputError:
    """The error for files that have other rows than those that were asked."""
    name = questions.options.suite.name
    return InputError(f"the files of suite {name} changed while it was asked; run the evaluation again")


def answers_digest(questions: Questions) -> str:
    """Digest of all answers, by which the judge's job is found again."""
    digest = hashlib.blake2b(digest_size=12)
    for one in questions.answers():
        digest.update(f"{one.row_index}\0{one.text}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
