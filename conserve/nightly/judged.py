"""Suites whose answers a judge scores: a second job over the answers of the first."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conserve.api.job import Job
from conserve.errors import SettingsError
from conserve.evals.outcome import Item, SuiteOutcome
from conserve.evals.plan import ModelTarget, SuitePlan
from conserve.evals.plan_file import PlanTable
from conserve.nightly.harness.asking import row_missing
from conserve.nightly.options import Options, asking_of
from conserve.nightly.questions import Answer, Questions, digest_of, whole
from conserve.nightly.scored import METRIC, parsed, scored
from conserve.nightly.suite import Night
from conserve.nightly.targets import check_target

ANSWER = "answer_of_model"
OWN = ("judge",)
OF_JUDGE = (
    "prompt", "prompt_file", "messages", "system", "completions", "params", "model", "endpoint", "engine_args",
    "pattern", "field", "scale", "grades",
)  # fmt: skip
TRUTHS = {"yes": 1.0, "true": 1.0, "correct": 1.0, "no": 0.0, "false": 0.0, "incorrect": 0.0}


class JudgeScores:
    """Scores by a judge, which is asked about each question and the model's answer to it."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = Options(suite, folder, own=OWN)
        options.check()
        judge = Judge(options)
        if ANSWER not in (judge.asking["prompt"] or ""):
            raise SettingsError(
                f"{options.where}.judge.prompt does not show the answer; write {{{{ {ANSWER} }}}} in it"
            )
        check_target(judge.target(ModelTarget()), f"{options.where}.judge")

    def run(self, night: Night) -> SuiteOutcome:
        options = Options(night.suite, night.folder, own=OWN)
        judge = Judge(options)
        asked = Questions(night, options)
        key = f"judge-{digest_of(answers_digest(asked), judge.asking)}"
        target = judge.target(night.target)
        job = night.submitted(key, to_judge(asked), target=target, **judge.asking)
        night.answered(job)

        def items() -> Iterator[Item]:
            verdicts = map(asked.origins.noted, whole(job, job.results()))
            for one in asked.answers():
                yield judge.item(one, verdict_of(job, verdicts) if one.text is not None else None)

        facts = asked.facts | {"judge": digest_of(judge.asking), "judge_model": target.model or "the same"}
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
        self._scale = self.table.real("scale") or 1.0

    def target(self, of_suite: ModelTarget) -> ModelTarget:
        """The judge's model; the suite's own unless the table names another."""
        model, endpoint = self.table.text("model"), self.table.text("endpoint")
        if model is None and endpoint is None:
            return of_suite
        return ModelTarget(
            name="judge", model=model, endpoint=endpoint, engine_args=self.table.texts("engine_args")
        )

    def item(self, answer: Answer, verdict: Mapping[str, Any] | None) -> Item:
        """Item of an answer and the judge's verdict. Without a verdict it has no score, and an error."""
        if verdict is None:
            return answer.item(scored(answer, {}))
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
            value = parsed(text)
            found = value.get(self._field) if isinstance(value, dict) else None
        else:
            match = self._pattern.search(text)
            found = None if match is None else first_group(match)
        return self._number(found)

    def _number(self, found: object) -> float | None:
        word = str(found).strip().lower()
        try:
            return self._grades[word] if word in self._grades else float(word) / self._scale
        except ValueError:
            return None


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
    """Pattern of the score; the first grade, or number, by default."""
    words = "|".join(map(re.escape, grades))
    text = table.text("pattern") or rf"(?i)\b({words}|\d+(?:\.\d+)?)\b"
    try:
        return re.compile(text)
    except re.error as error:
        raise SettingsError(f"{where}.pattern is no regular expression: {error}") from error


def to_judge(asked: Questions) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of the judge's job: the columns of each question, and the answer."""
    for one in asked.answers():
        if one.text is not None:
            yield {**one.columns, ANSWER: one.text}


def answers_digest(asked: Questions) -> str:
    """Digest of all answers, by which the judge's job is found again."""
    digest = hashlib.blake2b(digest_size=12)
    for one in asked.answers():
        digest.update(f"{one.row_index}\0{one.text}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
