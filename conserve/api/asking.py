"""Jobs as they are asked for, on the command line or from Python: the input, the task and its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conserve.errors import UsageError, one_line
from conserve.words import count

if TYPE_CHECKING:
    from conserve.jobs.inputs.source import Input
    from conserve.jobs.requests.submit import Submitted
    from conserve.jobs.task import Task


def make_input(
    files: Sequence[str], *, sql: str | None, form: str | None, keep: str | None, copy_gib: float
) -> "Input":
    """Input of files, patterns and folders, or of a query; and how to keep it."""
    from conserve.jobs.inputs.files import FileFormat
    from conserve.jobs.inputs.keeping import Keep
    from conserve.jobs.inputs.source import Input

    if not files and sql is None:
        raise UsageError('there is no input; name a file, - for standard input, or --sql "select ..."')
    if form is not None and form not in tuple(FileFormat):
        raise UsageError(f"--format takes {', '.join(FileFormat)}, not {form!r}")
    if keep is not None and keep not in tuple(Keep):
        raise UsageError(f"--keep-input takes {', '.join(Keep)}, not {keep!r}")
    return Input(
        names=files,
        sql=sql,
        form=FileFormat(form) if form else None,
        keep=Keep(keep) if keep else None,
        copy_gib=copy_gib,
    )


def job_name(name: str | None) -> str | None:
    """Name that the job's id begins with."""
    from conserve.jobs.requests.submit import slug

    if name is None:
        return None
    if not any(character.isascii() and character.isalnum() for character in name):
        raise UsageError(f"--name takes Latin letters, digits and dashes, as in --name nightly, not {name!r}")
    return slug(name)


def make_task(
    prompt: str | None,
    messages: str | None,
    system: str | None,
    completions: bool,
    id_column: str | None,
    params: dict[str, Any],
) -> "Task":
    """Task of a job: a prompt template, a column of chats, or lines in OpenAI's form."""
    from conserve.endpoints.protocol import Url
    from conserve.jobs.task import Kind, Task

    if prompt is not None and messages is not None:
        raise UsageError("give --prompt or --messages, not both")
    if completions and (messages is not None or system is not None):
        raise UsageError("--completions sends bare text: it takes --prompt and no --messages or --system")
    url = Url.COMPLETIONS if completions else Url.CHAT
    if prompt is not None:
        return Task(
            kind=Kind.PROMPT, url=url, template=prompt, system=system, id_column=id_column, params=params
        )
    if messages is not None:
        return Task(kind=Kind.MESSAGES, column=messages, system=system, id_column=id_column, params=params)
    if system is not None or id_column is not None or completions:
        raise UsageError("--system, --id and --completions go with --prompt or --messages")
    return Task(kind=Kind.OPENAI, params=params)


def in_order(task: "Task", wanted: str) -> "Task":
    """Task with the order of --order."""
    from conserve.jobs.task import Order

    name, colon, seed = wanted.partition(":")
    if name not in tuple(Order) or (colon and name != Order.RANDOM):
        raise UsageError(f"--order takes prefix, input, random or random:SEED, not {wanted!r}")
    if colon and not (seed.isascii() and seed.isdigit()):
        raise UsageError(f"--order random:SEED takes a whole number, as in --order random:7, not {seed!r}")
    return replace(task, order=Order(name), order_seed=int(seed or 0))


def request_params(
    given: Mapping[str, Any],
    *,
    completions: bool,
    logprobs: int | None,
    schema: Mapping[str, Any] | None,
    unknown_params: bool,
    **plain: Any,
) -> dict[str, Any]:
    """Body fields of every request: those with names of their own, then those that were `given`."""
    from conserve.jobs.requests.parameter_names import unknown_name

    params: dict[str, Any] = {key: value for key, value in plain.items() if value not in (None, [])}
    if logprobs is not None:
        params |= {"logprobs": logprobs} if completions else {"logprobs": True, "top_logprobs": logprobs}
    if schema is not None:
        answer = {"name": "answer", "schema": dict(schema), "strict": True}
        params["response_format"] = {"type": "json_schema", "json_schema": answer}
    if both := sorted(params.keys() & given.keys()):
        raise UsageError(f"{both[0]} is given twice, by a flag of its own and by --param; leave one out")
    if not unknown_params and (unknown := unknown_name(given)) is not None:
        raise UsageError(f"--param: {one_line(unknown)}")
    return params | dict(given)


def unanswerable(done: "Submitted") -> str | None:
    """Sentence on rows that will fail without being sent; None if there are none."""
    if not done.unrendered:
        return None
    percent = f"{100 * done.unrendered / done.rows:.3g} %"
    share = f"{done.unrendered:,} of {count(done.rows, 'row')} ({percent})"
    first = f"the first is row {done.first_row:,}: {one_line(done.first_error)}"
    return f"{share} cannot be answered and will fail; {first}"
