"""`conserve eval`: runs of evaluations, listed and named."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.evaluation_reports import Run, compare, gate, report, tell_whose
from conserve.cli.evaluation_setup import init, schedule
from conserve.cli.signals import ended_in_order

if TYPE_CHECKING:
    from conserve.evals.records import RunRecord
    from conserve.nightly.report.document import Document

EXAMPLE = """
conserve eval init nightly.toml --data questions.jsonl
conserve eval run nightly.toml
conserve eval name last baseline
conserve eval gate last --against baseline
"""
EXAMPLES = {
    "run": "conserve eval run nightly.toml",
    "list": "conserve eval list",
    "name": "conserve eval name last baseline",
    "report": "conserve eval report last --html out.html",
    "compare": "conserve eval compare last~1 last",
    "gate": "conserve eval gate last --against baseline --fail-on regression",
    "init": "conserve eval init nightly.toml --data questions.jsonl --model Qwen/Qwen2.5-7B-Instruct",
    "schedule": "conserve eval schedule nightly.toml --at 01:30",
}
Json = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]


def run(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The evaluation: nightly.toml.")],
    model: Annotated[str | None, typer.Option(help="Model instead of the file's.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Endpoint instead of the file's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Items of each suite, instead of the file's.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Begin a run, also if one was killed.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the file, the data sets and the scorers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run all suites of a file; after a kill, go on with the run that was begun."""
    from conserve.nightly import evaluating, running
    from conserve.nightly.report.document import skipped_document

    context: Context = ctx.obj
    given = {"model": model, "endpoint": endpoint, "limit": limit}
    overrides = {name: value for name, value in given.items() if value is not None}
    asking = running.Asking(file=file, overrides=overrides, anew=new)
    if check:
        plan, _ = evaluating.checked_plan(asking)
        if as_json:
            output.data_json({"evaluation": plan.name, "suites": list(plan.standards())})
        output.say(f"{file}: {output.count(len(plan.standards()), 'suite')}, no fault")
        return
    with context.store() as store:
        del store  # opened once, so that a store that is missing is made
    with ended_in_order():
        done = evaluating.evaluate(context.settings(), asking, output.say)
    if done is None:
        if as_json:
            output.data_json(skipped_document())
        return
    found, unwritten = evaluating.publish_run(context.settings(), done, output.say)
    if as_json:
        output.data_json(found)
    else:
        output.data(f"{done.id}: {found['headline']}")
    for said in unwritten:
        output.warn(said)
    raise typer.Exit(exits.FAILED if unwritten else code_of(done))


def code_of(run: "RunRecord") -> int:
    """Exit code of a run that has ended."""
    if any(suite.error is not None for suite in run.suites):
        return exits.FAILED
    return exits.FAILED_ROWS if any(suite.failed for suite in run.suites) else exits.DONE


def show(ctx: typer.Context, as_json: Json = False) -> None:
    """List the runs, the newest first."""
    from conserve.nightly import keeping
    from conserve.nightly.report.document import run_document

    context: Context = ctx.obj
    home = context.settings().home
    found: list[Document] = [run_document(home, run) for run in reversed(keeping.runs(home))]
    for folder in keeping.unreadable(home):
        output.warn(f"the run {folder.name} is left out, since its record cannot be read; remove {folder}")
    if as_json:
        output.data_json(found)
        return
    if not found:
        output.say("there are no runs; begin with: conserve eval run nightly.toml")
        return
    header = ("RUN", "NAMES", "STATE", "BEGAN", "SCORES")
    rows = [
        [run["id"], " ".join(run["names"]), run["state"], local(run["began_at"]), scores_of(run)]
        for run in found
    ]
    output.data("\n".join(output.columns(header, rows)))


def local(moment: str) -> str:
    """Local time of a moment."""
    from datetime import datetime

    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")


def scores_of(run: dict[str, Any]) -> str:
    """Scores of a run in a few words."""
    return ", ".join(
        f"{suite['suite']} {score['metric']} {score['mean']:.4g}"
        for suite in run["suites"]
        for score in suite["scores"]
    )


def name(
    ctx: typer.Context,
    run: Run,
    given: Annotated[str, typer.Argument(metavar="NAME", help="Name to give, as baseline.")],
) -> None:
    """Name a run, to compare with it later; retention spares a named run.

    Names are of one evaluation: its run that had the name loses it.
    """
    from conserve.nightly import keeping

    context: Context = ctx.obj
    home = context.settings().home
    found = keeping.resolve(home, run)
    tell_whose(home, run, found)
    keeping.name(home, found, given)
    output.say(f"{found.id} is {given} from now on")
    if "limit" in found.overrides:
        output.warn(f"it is a trial with {found.overrides['limit']} items of each suite (--limit)")


VERBS = {
    "run": run,
    "report": report,
    "compare": compare,
    "gate": gate,
    "list": show,
    "name": name,
    "init": init,
    "schedule": schedule,
}
