"""Suites that score each answer by itself: by SQL, by a Python function, or by a JSON schema."""

import functools
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conserve.api.job import Job
from conserve.errors import QueryError, SettingsError, UsageError, one_line
from conserve.evals.outcome import Item, SuiteOutcome
from conserve.evals.plan import SuitePlan
from conserve.jobs.inputs.text_rows import no_json
from conserve.nightly.mistakes import in_function, in_select
from conserve.nightly.options import Options
from conserve.nightly.questions import Answer, Questions, Scores, ask_questions, digest_of
from conserve.nightly.rows import rows_of
from conserve.nightly.suite import Night
from conserve.nightly.trials import bound, called_once

if TYPE_CHECKING:
    from conserve.store.sql.per_row import RowScores

METRIC = "score"
ROW = "row_index"
EXPRESSION = re.compile(r"""\(|'|[\w."]+\(|case  |-?[\d.]+$""", re.IGNORECASE)
"""Beginning of a name that DuckDB makes of an expression."""
EXAMPLE = (
    '"select avg(contains(lower(r.text), lower(i.answer))) from results r '
    'join inputs i using (job_id, row_index)"'
)


class SqlScored:
    """Scores by a SELECT over the job's answers and questions: one score a row, or a mean that is taken apart."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = Options(suite, folder, own=("score",))
        columns = options.check()
        found = bound(options, select_of(options).select, columns)
        if found is not None:
            check_columns(options.where, found)

    def run(self, night: Night) -> SuiteOutcome:
        options = Options(night.suite, night.folder, own=("score",))
        select, of_means = select_of(options)
        asked = ask_questions(night, options)
        scores = [scores_by_row(night, job, select) for job in asked.jobs]
        metrics = {metric for epoch in scores for found in epoch.values() for metric in found}

        def score(one: Answer) -> Scores:
            found = scores[one.epoch].get(one.row_index)
            if found is None and of_means:  # the mean leaves the row out, with or without an answer
                return {}
            return scores_or_zero(one, found or {}, metrics)

        items = (one.item(score(one)) for one in asked.answers())
        return outcome_of(asked, items, select)


class PythonScored:
    """Scores by a function of the user's: `score(answer, row)` returns a number, a truth, or numbers by metric."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = Options(suite, folder, own=("score",))
        columns = options.check()
        called_once(options, function_of(options)[0], columns)

    def run(self, night: Night) -> SuiteOutcome:
        options = Options(night.suite, night.folder, own=("score",))
        function, source = function_of(options)
        asked = ask_questions(night, options)

        def score(one: Answer) -> Scores:
            if one.text is None:
                return {}
            try:
                found = function(one.text, one.columns)
            except Exception as error:
                raise in_function(options, function, error, one.columns, item=one.id) from error
            return by_metric(found)

        @functools.cache
        def metrics() -> Collection[str]:
            return next((found.keys() for one in asked.answers() if (found := score(one))), (METRIC,))

        items = (
            one.item(score(one) if one.error is None else one.suite.unanswered(metrics()))
            for one in asked.answers()
        )
        return outcome_of(asked, items, source)


class SchemaScored:
    """Scores 1 for an answer that is JSON of a schema, else 0. With `guided` the engine is held to the schema."""

    def check(self, suite: SuitePlan, folder: Path) -> None:
        options = Options(suite, folder, own=("schema", "guided"))
        options.check()
        schema_of(options)

    def run(self, night: Night) -> SuiteOutcome:
        from jsonschema.validators import validator_for

        options = Options(night.suite, night.folder, own=("schema", "guided"))
        schema = schema_of(options)
        guided = bool(options.table.get("guided", bool))
        asked = ask_questions(night, options, schema=schema if guided else None)
        validator = validator_for(schema)(schema)
        items = (
            one.item({"valid": float(is_valid(one.text, validator)), "json": float(is_json(one.text))})
            for one in asked.answers()
        )
        return outcome_of(asked, items, schema)


def outcome_of(questions: Questions, items: Iterable[Item], scorer: object) -> SuiteOutcome:
    """Outcome of questions whose items are scored by this scorer, whose digest is a fact."""
    return SuiteOutcome(
        items=items,
        facts=questions.facts | {"scorer": digest_of(scorer)},
        job_ids=questions.job_ids,
        origins=questions.origins,
    )


def scores_or_zero(answer: Answer, scores: Scores, metrics: Iterable[str] = (METRIC,)) -> Scores:
    """Scores of an answer; a question without one scores 0 (`SuitePlan.unanswered`)."""
    return scores if answer.error is None else answer.suite.unanswered(metrics)


def select_of(options: Options) -> "RowScores":
    """SELECT of one score a row."""
    from conserve.store.sql.per_row import by_row

    given = options.required("score", EXAMPLE)
    try:
        return by_row(given)
    except QueryError as error:
        raise in_select(options.where, error) from error


def scores_by_row(night: Night, job: Job, select: str) -> dict[int, Scores]:
    """Scores of a job's rows by metric; a mean without a name is called "score". Null is no score."""
    where = f"suites.{night.suite.name}"
    found: dict[int, Scores] = {}
    for row in query_rows(night, job, select):
        values = {name.lower(): value for name, value in row.items()}
        check_columns(where, values)
        number_of = values.pop(ROW)
        if number_of is None:
            raise UsageError(f"{where}.score selects a row_index that is null; leave such rows out")
        values.pop("job_id", None)
        scores = {metric_of(name): number(value, name) for name, value in values.items() if value is not None}
        if found.setdefault(int(number_of), scores) is not scores:
            raise UsageError(f"{where}.score selects row {number_of} twice; group it by row_index")
    return found


def query_rows(night: Night, job: Job, select: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a SELECT over a job; a mistake in it is one sentence that names the suite."""
    try:
        yield from rows_of(night.settings, select, [job.id])
    except QueryError as error:
        raise in_select(f"suites.{night.suite.name}", error) from error


def check_columns(where: str, columns: Iterable[str]) -> None:
    """Raise `UsageError` for columns of a SELECT that cannot be scores by row."""
    names = [name.lower() for name in columns]
    if ROW not in names:
        raise UsageError(f"{where}.score selects no column row_index; add it")
    check_names(f"{where}.score", (name for name in names if name not in (ROW, "job_id")))


def check_names(where: str, columns: Iterable[str]) -> None:
    """Raise `UsageError` for score columns that would be one metric."""
    found = [metric_of(name) for name in columns]
    if len(set(found)) < len(found):
        raise UsageError(f"{where} selects several scores without a name; name each: avg(...) as exact")


def metric_of(column: str) -> str:
    """Metric of a column; DuckDB names one without a name by its expression."""
    return METRIC if EXPRESSION.match(column) else column


def number(value: object, metric: str) -> float:
    """Score as a number; raises `UsageError` for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UsageError(f"the score {metric!r} is no number but {one_line(value, most=60)}") from error


def by_metric(value: object) -> Scores:
    """Scores by metric, of what a function returned; None is no score."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {str(metric): number(one, str(metric)) for metric, one in value.items() if one is not None}
    return {METRIC: number(value, METRIC)}


def function_of(options: Options) -> tuple[Callable[[str, dict[str, Any]], object], str]:
    """The function of `score = "module:function"`, and its module's text."""
    given = options.required("score", '"scorers:exact"')
    module_name, colon, name = given.partition(":")
    try:
        module = module_of(options.folder, module_name)
        function = getattr(module, name) if colon else None
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        raise SettingsError(
            f"{options.where}.score: {given!r} cannot be imported: {one_line(error)}"
        ) from error
    if not callable(function):
        raise SettingsError(f'{options.where}.score takes "module:function", not {given!r}')
    file = getattr(module, "__file__", None)
    return function, Path(file).read_text(encoding="utf-8", errors="replace") if file else given


def module_of(folder: Path, name: str) -> ModuleType:
    """Module in a folder, or any that is installed; what it imports may lie in the folder too."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, so that an installed module keeps its name
    path = folder / f"{name}.py"
    return load_module(name, path, path.read_bytes()) if path.is_file() else importlib.import_module(name)


@functools.cache
def load_module(name: str, path: Path, content: bytes) -> ModuleType:
    """Module of a file with this content, made once, so that its classes are the same in all suites.

    Dataclasses and pickles look it up by its name, which it gets unless an installed module has that.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    other = None if "." in name else importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if other is None or other.origin == str(path):
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        raise
    return module


def schema_of(options: Options) -> dict[str, Any]:
    """JSON schema in the file that `schema` names; raises `SettingsError` if it is none."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    path = options.folder / options.required("schema", '"answer.json"')
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(schema, dict):
            raise ValueError("it is no JSON object")
        validator_for(schema).check_schema(schema)
    except OSError as error:
        raise SettingsError(f"{options.where}.schema: there is no file {path}; write it") from error
    except (ValueError, SchemaError) as error:
        raise SettingsError(
            f"{options.where}.schema: {path} is no JSON schema: {one_line(error, most=200)}"
        ) from error
    return schema


def is_json(text: str | None) -> bool:
    """True for text that is JSON as a whole."""
    return parse_json(text) is not NOTHING


def is_valid(text: str | None, validator: Any) -> bool:
    """True for JSON that obeys the schema."""
    value = parse_json(text)
    return value is not NOTHING and bool(validator.is_valid(value))


NOTHING = object()


def parse_json(text: str | None) -> object:
    """Value of JSON; `NOTHING` for other text."""
    try:
        return json.loads(text or "", parse_constant=no_json)
    except (ValueError, RecursionError):
        return NOTHING
