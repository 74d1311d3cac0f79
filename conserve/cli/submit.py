"""`conserve submit`: queue a job."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.api.asking import TaskRequest, make_input, unanswerable
from conserve.cli import output
from conserve.cli.context import Context
from conserve.cli.deadline import By, OnLateFlag, Within
from conserve.cli.deadline_flags import DeadlineFlags
from conserve.cli.signals import ended_in_order, held_back
from conserve.cli.submit_flags import read_params, read_prompt, read_schema, read_tags
from conserve.cli.takers import Taker, taker, what_runs
from conserve.config import Settings
from conserve.errors import ConserveError, one_line
from conserve.store.books.job_terms import JobTerms

if TYPE_CHECKING:
    from conserve.jobs.inputs.source import Input
    from conserve.jobs.requests.submit import Submitted
    from conserve.jobs.task import Task
    from conserve.store.database.store import Store

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
"""Sentences on an input that was not copied."""

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
    unknown_params: Annotated[
        bool, typer.Option("--unknown-params", help="Allow --param names that neither vLLM nor OpenAI has.")
    ] = False,
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
    by: By = None,
    within: Within = None,
    on_late: OnLateFlag = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a job that will not make its deadline with 90 %.")
    ] = False,
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
    from conserve.jobs.requests.submit import submit as enqueue

    task = TaskRequest(
        prompt=read_prompt(prompt, prompt_file),
        messages=messages,
        system=system,
        completions=completions,
        id_column=id,
        order=order,
        params=read_params(param or []),
        flag_params={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "stop": stop,
            "n": n,
        },
        logprobs=logprobs,
        schema=None if schema is None else read_schema(schema),
        unknown_params=unknown_params,
    ).task()
    due = DeadlineFlags.of(by, within, on_late, strict=strict)
    context: Context = ctx.obj
    given = make_input(
        files or [], sql=sql, form=form, keep=keep_input, copy_gib=context.settings().input_copy_gib
    )
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
            JobTerms(
                name=name,
                priority=priority,
                model=model,
                tags=read_tags(tag or []),
                deadline=due.deadline,
                on_late=due.on_late,
            ),
            constant_prompt=constant_prompt,
            check_rows=lambda rows: due.check(context.settings(), priority, rows),
            before_queueing=lambda: until_told.enter_context(held_back()),
        )
        with withdrawn_unless_printed(store, done.job_id):
            print_id(done, as_json=as_json)
        tell(done, name, taker(context.settings(), store, model), of_another_database(store))
        due.tell()


def of_another_database(store: "Store") -> str | None:
    """Doubt about a job in a home's own database where the home is that of another one too."""
    from conserve.store.database import lineage

    others = [] if "://" in store.place else lineage.elsewhere(store.home)
    if not others:
        return None
    return (
        f"the job is in {store.home / store.place}, and the queue of this folder was in {others[-1]}; harvesters "
        "there do not take it: set CONSERVE_STORE"
    )


def preview(
    settings: Settings, given: "Input", task: "Task", rows: int, *, constant_prompt: bool, as_json: bool
) -> None:
    """Show the first requests of the job that would be queued."""
    from conserve.cli.dry_run import local_counter, show_previews
    from conserve.jobs.requests.preview import previews

    found = previews(given, task, rows, constant_prompt=constant_prompt)
    show_previews(found, local_counter(settings, settings.engine_model), task.params, as_json=as_json)


def print_id(done: "Submitted", *, as_json: bool) -> None:
    """Print the job's id to standard output."""
    if as_json:
        output.data_json({"job_id": done.job_id, "rows": done.rows, "unrendered": done.unrendered})
    else:
        output.data(done.job_id)


def tell(done: "Submitted", name: str | None, found: Taker | None, doubt: str | None) -> None:
    """Print what was queued, who runs it, and what it is called if that is not this name."""
    if name is not None and done.namesakes:
        output.say(taken(name, done))
    if name is not None and (sentence := renamed(name)) is not None:
        output.say(sentence)
    output.say(f"queued {output.count(done.rows, 'row')}; {what_runs(found)}")
    if doubt is not None:
        output.say(f"warning: {doubt}")
    if done.kept in WHERE:
        output.say(f"{WHERE[done.kept]}; --keep-input copy keeps a copy in the store")
    if (sentence := unanswerable(done)) is not None:
        output.say(f"warning: {sentence}")


class UnprintedJob(ConserveError):
    """Raised if the id of a job could not be printed."""


@contextmanager
def withdrawn_unless_printed(store: "Store", job_id: str) -> Iterator[None]:
    """Withdraw the job if its id cannot be printed: a script could neither wait for it nor cancel it."""
    from conserve.cli.stdout import OutputClosed, OutputLost
    from conserve.store.books.withdraw import withdraw

    try:
        yield
    except (OutputClosed, OutputLost) as error:
        why = error.reason if isinstance(error, OutputLost) else "its reader has gone"
        did = f"job {job_id} was withdrawn" if withdraw(store, job_id) else f"job {job_id} runs already"
        raise UnprintedJob(f"the job's id cannot be printed to standard output ({why}); {did}") from error


def renamed(name: str) -> str | None:
    """Sentence on a name that ids cannot have as it is; None for one that is only written small."""
    from conserve.jobs.requests.submit import slug

    kept = slug(name)
    if kept == name.lower():
        return None
    return (
        f"the job is called {kept}, not {one_line(name)}: names are of the letters a to z, digits and dashes, "
        "and have 24 at most"
    )


def taken(name: str, done: "Submitted") -> str:
    """Sentence on a name that other jobs have too."""
    others = output.count(len(done.namesakes), "job")
    return (
        f"{others} before it had the name {one_line(name)}, {done.namesakes[-1]} last; "
        f"this one goes by its whole id: {done.job_id}"
    )
