"""Admission of tasks and inputs: checked before anything is rendered, each mistake named in one sentence."""

from conserve.errors import TemplateError, UsageError
from conserve.jobs.inputs.nesting import MAX_DEPTH, is_deeper
from conserve.jobs.inputs.openai_line import OPENAI_COLUMNS
from conserve.jobs.inputs.source import InputRows, check_columns, other_separator
from conserve.jobs.requests.fault import DECIDED, parameter_fault
from conserve.jobs.requests.rendering import odd_name_hint, template_names
from conserve.jobs.task import Kind, Task
from conserve.store.books.job_terms import JobTerms

LOWEST, HIGHEST = -(2**31), 2**31 - 1  # priorities: 32 bits in every database


def check_task(task: Task) -> None:
    """Raise for a task that suits no input at all."""
    check_words(task)
    check_parameters(task)


def check_words(task: Task) -> None:
    """Raise if the task holds text or values that the store cannot keep as JSON."""
    try:
        task.to_json()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the prompt, a name or a parameter is not UTF-8; write it again in UTF-8 and submit again"
        ) from error
    if is_deeper(task.params, MAX_DEPTH):
        raise UsageError(
            f"a parameter or the schema nests too deep: more than {MAX_DEPTH} levels; flatten it"
        )


def check_parameters(task: Task) -> None:
    """Raise for parameters with which no row could be answered."""
    for name, instead in DECIDED.items():
        if name in task.params:
            raise UsageError(f"{name} is no parameter of a job; {instead}")
    route = "" if task.kind is Kind.OPENAI else task.url  # each line names its own
    if fault := parameter_fault(route, task.params):
        raise UsageError(f"{fault}; correct it and submit again")


def check_terms(terms: JobTerms) -> None:
    """Raise for a name, a priority or tags that ids, shells and databases do not all take as they are."""
    if terms.name is not None and not any(one.isascii() and one.isalnum() for one in terms.name):
        raise UsageError(
            f"--name takes Latin letters, digits and dashes, as in --name nightly, not {terms.name!r}"
        )
    if not LOWEST <= terms.priority <= HIGHEST:
        raise UsageError(f"--priority goes from {LOWEST:,} to {HIGHEST:,}, not {terms.priority}")
    for key, value in terms.tags.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise UsageError(f"a tag and its value are text, not {key!r}: {value!r}; put them in quotes")
        if not key or "=" in key or not (key.isprintable() and value.isprintable()):
            raise UsageError(
                f"a tag is KEY=VALUE without control characters, as in --tag team=search, not {key!r}={value!r}"
            )


def check_input(rows: InputRows, task: Task, *, constant_prompt: bool) -> None:
    """Raise if the task names columns that are missing or of the wrong type, or asks every row the same."""
    if task.kind is Kind.PROMPT:
        template, names = task.template or "", set[str]()
        try:
            names = template_names(template, rows.columns)
            check_template(rows, names, constant_prompt=constant_prompt)
        except TemplateError as error:
            missing = names - {*rows.columns}
            hint = "" if other_separator(rows) else odd_name_hint(template, rows.columns, missing)
            raise TemplateError(f"{error}{hint}") from error
    if task.column is not None:
        check_columns(rows, [task.column], what="--messages")
    if task.id_column is not None:
        check_columns(rows, [task.id_column], what="--id")
    rows.check(task)


def check_template(rows: InputRows, names: set[str], *, constant_prompt: bool) -> None:
    """Raise for a template that names a missing column, or no column."""
    check_columns(rows, sorted(names), what="the template")
    if not names and not constant_prompt:
        raise TemplateError(
            "the template names no column, so every row would ask the same; write {{ column }} where the row's "
            "text belongs, or give --constant-prompt"
        )


def needed_columns(task: Task, rows: InputRows) -> list[str]:
    """The columns that rendering reads."""
    if task.kind is Kind.OPENAI:
        return list(OPENAI_COLUMNS)
    names = {task.column or ""}
    if task.kind is Kind.PROMPT:
        names = template_names(task.template or "", rows.columns)
    if task.id_column is not None:
        names.add(task.id_column)
    return [name for name in rows.columns if name in names]
