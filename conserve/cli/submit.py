"""`conserve submit`: queue a job."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.signals import ended_in_order, held_back
from conserve.config import Settings
from conserve.errors import ConserveError, UsageError, one_line

if TYPE_CHECKING:
    from conserve.jobs.source import Input
    from conserve.jobs.submit import Submitted
    from conserve.jobs.task import Task
    from conserve.store.store import Store

EXAMPLE = """
conserve submit data.parquet --prompt "Summarize: {{ text }}" --max-tokens 128
conserve submit chats.parquet --messages messages
conserve submit batch.jsonl
cat rows.jsonl | conserve submit - --prompt "{{ q }}"
"""

WHERE = {
    "link": "the rows stay in the file, to which the store has a link: replace or delete it as you like, and "
    "do not write into it",
    "reference": "the rows stay in the file: leave it as it is until the job is done and its answers are joined",
}
"""What to know of an input that was not copied."""

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE...",
        help="Parquet, JSONL, CSV or TSV (also .gz, .zst), patterns, folders, or - for standard input.",
    ),
]


def submit(
    ctx: typer.Context,
    files: Files = None,
    sql: Annotated[
        str | None, typer.Option(metavar="SELECT", help="DuckDB query whose rows are the input.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="parquet|jsonl|csv|tsv", help="What the files are, if not as named."
        ),
    ] = None,
    keep_input: Annotated[
        str | None,
        typer.Option(
            metavar="copy|link|reference",
            help="Where the rows of Parquet files stay; a copy up to input_copy_gib, a link beyond.",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Jinja template over the row's columns.")] = None,
    constant_prompt: Annotated[
        bool, typer.Option("--constant-prompt", help="Allow a template that names no column.")
    ] = False,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the template.")] = None,
    messages: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of chat messages.")] = None,
    system: Annotated[str | None, typer.Option(help="System message in front of every prompt.")] = None,
    completions: Annotated[
        bool, typer.Option("--completions", help="Send the prompt as it is, without a chat template.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    n: Annotated[int | None, typer.Option("-n", "--n", min=1, help="Answers per row.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="Log probabilities of this many alternatives a token.")
    ] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help="JSON schema that answers must obey.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="Any other field of the request body.")
    ] = None,
    id: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with the rows' own ids.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model that is to answer; runs with another one are refused.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Beginning of the job's id, instead of the file's name.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Tag of the job; may be given several times."),
    ] = None,
    priority: Annotated[int, typer.Option(help="Jobs with a higher one run first.")] = 0,
    order: Annotated[
        str,
        typer.Option(
            metavar="prefix|input|random[:SEED]",
            help="Which rows run first: those whose prompts begin alike together, as they come, or shuffled.",
        ),
    ] = "prefix",
    dry_run: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Queue nothing: show the first N requests as they would be sent."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Queue a file of prompts and print the job's id; once it is printed, the job is durable."""
    from conserve.jobs.submit import submit as enqueue

    params = request_params(
        completions,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        n=n,
        logprobs=logprobs,
        schema=schema,
        param=param,
    )
    task = make_task(read_prompt(prompt, prompt_file), messages, system, completions, id, params)
    task = in_order(task, order)
    context: Context = ctx.obj
    given = read_input(files or [], sql, form, keep_input, context.settings())
    if dry_run is not None:
        preview(
            context.settings(model=model),
            given,
            task,
            dry_run,
            constant_prompt=constant_prompt,
            as_json=as_json,
        )
        return
    with ended_in_order(), ExitStack() as until_told, context.store() as store:
        done = enqueue(
            store,
            given,
            task,
            name=read_name(name),
            priority=priority,
            model=model,
            tags=read_tags(tag or []),
            constant_prompt=constant_prompt,
            before_queueing=lambda: until_told.enter_context(held_back()),
        )
        with withdrawn_unless_printed(store, done.job_id):
            if as_json:
                output.data_json({"job_id": done.job_id, "rows": done.rows, "unrendered": done.unrendered})
            else:
                output.data(done.job_id)
        if name and done.namesakes:
            output.say(taken(name, done))
        tell(done)


def preview(
    settings: Settings, given: "Input", task: "Task", rows: int, *, constant_prompt: bool, as_json: bool
) -> None:
    """Show the first requests of what would be queued."""
    from conserve.cli.dry_run import local_counter, show_previews
    from conserve.jobs.preview import previews

    found = previews(given, task, rows, constant_prompt=constant_prompt)
    show_previews(found, local_counter(settings, settings.model), task.params, as_json=as_json)


def tell(done: "Submitted") -> None:
    """Say what was queued."""
    output.say(f"queued {output.count(done.rows, 'row')}; run them with: conserve run")
    if done.kept in WHERE:
        output.say(f"{WHERE[done.kept]}; --keep-input copy keeps a copy in the store")
    if done.unrendered:
        percent = f"{100 * done.unrendered / done.rows:.3g} %"
        share = f"{done.unrendered:,} of {output.count(done.rows, 'row')} ({percent})"
        first = f"the first is row {done.first_row:,}: {one_line(done.first_error)}"
        output.say(f"warning: {share} cannot be answered and will fail; {first}")


class UnprintedJob(ConserveError):
    """A job whose id nobody could read."""


@contextmanager
def withdrawn_unless_printed(store: "Store", job_id: str) -> Iterator[None]:
    """Take the job back if its id cannot be printed: a script could neither wait for it nor cancel it."""
    from conserve.cli.stdout import OutputClosed, OutputLost
    from conserve.store.withdraw import withdraw

    try:
        yield
    except (OutputClosed, OutputLost) as error:
        why = error.reason if isinstance(error, OutputLost) else "its reader has gone"
        did = f"job {job_id} was withdrawn" if withdraw(store, job_id) else f"job {job_id} runs already"
        raise UnprintedJob(f"the job's id cannot be printed to standard output ({why}); {did}") from error


def read_input(
    files: list[str], sql: str | None, form: str | None, keep: str | None, settings: Settings
) -> "Input":
    """What is to be submitted, from the flags."""
    from conserve.jobs.input_files import Form
    from conserve.jobs.keeping import Keep
    from conserve.jobs.source import Input

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
    """The beginning of the job's id."""
    from conserve.jobs.submit import slug

    if name is None:
        return None
    if not any(character.isascii() and character.isalnum() for character in name):
        raise UsageError(f"--name takes Latin letters, digits and dashes, as in --name nightly, not {name!r}")
    return slug(name)


def taken(name: str, done: "Submitted") -> str:
    """The sentence for a name that other jobs have too."""
    others = output.count(len(done.namesakes), "job")
    return (
        f"{others} before it had the name {one_line(name)}, {done.namesakes[-1]} last; "
        f"this one goes by its whole id: {done.job_id}"
    )


def read_tags(pairs: list[str]) -> dict[str, str]:
    """The tags of --tag."""
    tags: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--tag takes KEY=VALUE, as in --tag team=search, not {pair!r}")
        if tags.setdefault(key, value) != value:
            raise UsageError(f"--tag gives {key!r} two values: {tags[key]!r} and {value!r}")
    return tags


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    """The template, given or from its file."""
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
    """What to ask of each row, from the flags."""
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
    """The task with the order of --order."""
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
    **plain: Any,
) -> dict[str, Any]:
    """The body fields that the flags set."""
    params = {key: value for key, value in plain.items() if value not in (None, [])}
    if logprobs is not None:
        params |= {"logprobs": logprobs} if completions else {"logprobs": True, "top_logprobs": logprobs}
    if schema is not None:
        answer = {"name": "answer", "schema": read_schema(schema), "strict": True}
        params["response_format"] = {"type": "json_schema", "json_schema": answer}
    for pair in param or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--param takes KEY=JSON, as in --param top_k=20, not {pair!r}")
        params[key] = json_or_text(value)
    return params


def json_or_text(value: str) -> Any:
    """A parameter's value: JSON if it is that, else the text itself."""
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
    """A JSON schema, inline or from a file."""
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
