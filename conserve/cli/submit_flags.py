"""Flags of `conserve submit` as an input, a task and its parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from conserve.config import Settings
from conserve.errors import UsageError, one_line

if TYPE_CHECKING:
    from conserve.jobs.inputs.source import Input
    from conserve.jobs.task import Task


def read_input(
    files: list[str], sql: str | None, form: str | None, keep: str | None, settings: Settings
) -> "Input":
    """Input of the job, from the flags."""
    from conserve.jobs.inputs.files import Form
    from conserve.jobs.inputs.keeping import Keep
    from conserve.jobs.inputs.source import Input

    if not files and sql is None:
        raise UsageError('there is no input; name a file, - for standard input, or --sql "select ..."')
    if form is not None and form not in tuple(Form):
        raise UsageError(f"--format takes {', '.join(Form)}, not {form!r}")
    if keep is not None and keep not in tuple(Keep):
        raise UsageError(f"--keep-input takes {', '.join(Keep)}, not {keep!r}")
    return Input(
        names=files,
        sql=sql,
        form=Form(form) if form else None,
        keep=Keep(keep) if keep else None,
        copy_gib=settings.input_copy_gib,
    )


def read_name(name: str | None) -> str | None:
    """Name that the job's id begins with."""
    from conserve.jobs.requests.submit import slug

    if name is None:
        return None
    if not any(character.isascii() and character.isalnum() for character in name):
        raise UsageError(f"--name takes Latin letters, digits and dashes, as in --name nightly, not {name!r}")
    return slug(name)


def read_tags(pairs: list[str]) -> dict[str, str]:
    """Tags of --tag."""
    tags: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--tag takes KEY=VALUE, as in --tag team=search, not {pair!r}")
        if tags.setdefault(key, value) != value:
            raise UsageError(f"--tag gives {key!r} two values: {tags[key]!r} and {value!r}")
    return tags


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """Template, from the flag or its file."""
    if prompt_file is None:
        return prompt
    if prompt is not None:
        raise UsageError("give --prompt or --prompt-file, not both")
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the template {prompt_file}: {error}") from error


def make_task(
    prompt: str | None,
    messages: str | None,
    system: str | None,
    completions: bool,
    id_column: str | None,
    params: dict[str, Any],
) -> "Task":
    """Task of the job, from the flags."""
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
    completions: bool,
    *,
    logprobs: int | None,
    schema: str | None,
    param: list[str] | None,
    unknown_params: bool,
    **plain: Any,
) -> dict[str, Any]:
    """Body fields that the flags set."""
    from conserve.jobs.requests.parameter_names import unknown_name

    params = {key: value for key, value in plain.items() if value not in (None, [])}
    if logprobs is not None:
        params |= {"logprobs": logprobs} if completions else {"logprobs": True, "top_logprobs": logprobs}
    if schema is not None:
        answer = {"name": "answer", "schema": read_schema(schema), "strict": True}
        params["response_format"] = {"type": "json_schema", "json_schema": answer}
    given = read_params(param or [])
    if not unknown_params and (unknown := unknown_name(given)) is not None:
        raise UsageError(f"--param: {one_line(unknown)}")
    return params | given


def read_params(pairs: list[str]) -> dict[str, Any]:
    """Fields of --param."""
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--param takes KEY=JSON, as in --param top_k=20, not {pair!r}")
        params[key] = json_or_text(value)
    return params


def json_or_text(value: str) -> Any:
    """Value of a parameter: parsed if it is JSON, else the text itself."""
    try:
        return json.loads(value, parse_constant=not_json)
    except ValueError:
        return value
    except RecursionError as error:
        raise UsageError("--param nests too deep for a request; flatten it") from error


def not_json(constant: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is no JSON")


def read_schema(text: str) -> dict[str, Any]:
    """Read a JSON schema, inline or from a file."""
    try:
        source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        schema = json.loads(source, parse_constant=not_json)
    except OSError as error:
        raise UsageError(f"cannot read the schema {text:.200}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--schema is not JSON ({error})") from error
    except RecursionError as error:
        raise UsageError("--schema nests too deep for a request; flatten it") from error
    if not isinstance(schema, dict):
        raise UsageError("--schema must be a JSON object")
    return schema
