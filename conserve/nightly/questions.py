"""Questions of a data set asked once an epoch, and their answers as items."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve.api.job import Job
from conserve.evals.outcome import AnswerOrigins, Item
from conserve.evals.plan import SuitePlan
from conserve.nightly.harness.request_jobs import row_missing
from conserve.nightly.options import Options
from conserve.nightly.samples import DataSet, data_set
from conserve.nightly.suite import Night
from conserve.store.sql.input_columns import RESULT_COLUMNS

TAKEN = {name.lower() for name in (*RESULT_COLUMNS, "prompt")}

Scores = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The data set of a suite, asked: one job an epoch."""

    options: Options
    data: DataSet
    asking: Mapping[str, Any]
    jobs: Sequence[Job]
    origins: AnswerOrigins = field(default_factory=AnswerOrigins)

    def answers(self) -> Iterator["Answer"]:
        """Yield the answers of all epochs, in the order of the data set; raises `RowsFailed` for a missing row."""
        for epoch, job in enumerate(self.jobs):
            for row in whole_results(job, job.results(with_inputs=True, with_prompts=True)):
                yield Answer(self.origins.noted(row), epoch, self.data, self.options)

    @property
    def facts(self) -> dict[str, str]:
        """Facts that two nights must share to compare."""
        return {
            "data": self.data.digest,
            "task": digest_of(self.asking),
            "seed": str(self.options.suite.seed),
            "limit": str(self.options.suite.limit or "none"),
        }

    @property
    def job_ids(self) -> Sequence[str]:
        """Ids of the jobs."""
        return [job.id for job in self.jobs]


def ask_questions(night: Night, options: Options, *, schema: Mapping[str, Any] | None = None) -> Questions:
    """Ask the data set of a suite, and wait for the answers."""
    data = data_set(night.suite, options.data, night.folder)
    asking = options.asking() | {"schema": schema}
    jobs = [submit_epoch(night, options, data, asking, epoch) for epoch in range(night.suite.epochs)]
    night.await_answers(*jobs)
    return Questions(options=options, data=data, asking=asking, jobs=jobs)


def submit_epoch(night: Night, options: Options, data: DataSet, asking: Mapping[str, Any], epoch: int) -> Job:
    """Job of one epoch; sampled answers have a seed of their own in each."""
    if epoch and "seed" in asking["params"]:
        asking = {**asking, "params": {**asking["params"], "seed": asking["params"]["seed"] + epoch}}
    id_column = options.table.text("id")
    key = digest_of(data.digest, data.asked, night.suite.seed, asking, epoch, id_column)
    with data.source() as source:
        return night.submit_once(key, source, id=id_column, **asking)


class Answer:
    """Answer to one question, beside the columns of its row."""

    def __init__(self, row: Mapping[str, Any], epoch: int, data: DataSet, options: Options) -> None:
        self.row, self.epoch = row, epoch
        self._data, self._options = data, options

    @property
    def suite(self) -> SuitePlan:
        """Suite that asked."""
        return self._options.suite

    @property
    def row_index(self) -> int:
        """Row of the job."""
        return int(self.row["row_index"])

    @property
    def text(self) -> str | None:
        """Text of the answer; None if there is none."""
        text = self.row["text"]
        return None if text is None else str(text)

    @property
    def error(self) -> str | None:
        """Reason why there is no answer."""
        error = self.row["error"]
        return error if error is None else str(error)

    @property
    def columns(self) -> dict[str, Any]:
        """The data set's own columns, by their own names."""
        names = self._data.names
        return {names.get(name, name): value for name, value in self.row.items() if name.lower() not in TAKEN}

    def item(self, scores: Scores, error: str | None = None) -> Item:
        """Item with these scores. One without an answer has its error."""
        return Item(
            id=self.id,
            prompt=str(self.row.get("prompt") or ""),
            answer=self.text,
            scores=scores,
            source=self._named("group"),
            epoch=self.epoch,
            expected=self._named("expected"),
            error=error or self.error,
            prompt_tokens=int(self.row["prompt_tokens"] or 0),
            answer_tokens=int(self.row["completion_tokens"] or 0),
        )

    @property
    def id(self) -> str:
        """Name of the item, the same every night; of a row without an id among rows that have one, its place."""
        number = self._data.row_number(self.row_index)
        if not self._options.table.text("id"):
            return str(number)
        given = self.row["custom_id"]
        return f"row {number}" if given is None else str(given)

    def _named(self, option: str) -> str | None:
        column = self._options.table.text(option)
        value = None if column is None else self.columns.get(column)
        return None if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def whole_results(job: Job, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a job's results; raises `RowsFailed` where one is missing, so that none takes its place."""
    expected = 0
    for row in rows:
        if int(row["row_index"]) != expected:
            raise row_missing(job, expected)
        yield row
        expected += 1
    if expected != job.progress().rows:
        raise row_missing(job, expected)


def digest_of(*values: object) -> str:
    """Digest of values that JSON holds."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
