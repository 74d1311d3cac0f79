"""`conserve eval report`, `compare` and `gate`: what kept runs say."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.errors import UsageError

if TYPE_CHECKING:
    from conserve.evals.records import RunRecord
    from conserve.evals.verdict import Verdict

FAIL_ON = ("regression", "never")
DIGESTS = {
    "data": "the rows asked about",
    "task": "prompt, messages or parameters",
    "scorer": "the score",
    "judge": "what the judge is asked",
    "chat_template": "the model's",
}
UNENDED = "Cannot tell: it has not ended; go on with it, or wait for its process: conserve eval run FILE"

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id, name, last, last~1; or EVALUATION:last.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
Against = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Another run, previous, or history; by default as the run's file says."),
]


def report(
    ctx: typer.Context,
    run: Run = "last",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="One self-contained page.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as Markdown.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="JUnit XML, for CI systems.")] = None,
    against: Against = None,
    as_json: Json = False,
) -> None:
    """Report on a run: the verdict, scores over the nights, flips with both answers, cost."""
    from conserve.nightly.publishing import write
    from conserve.nightly.report.forms import text_in_form

    found = document_of(ctx, run, against)
    files = {"html": html, "markdown": markdown, "junit": junit}
    for form, path in files.items():
        if path is not None:
            output.say(f"wrote {write(found, form, path)}")
    if as_json:
        output.data_json(found)
    elif not any(files.values()):
        output.data(text_in_form(found, "markdown").rstrip())


def compare(
    ctx: typer.Context,
    before: Annotated[str, typer.Argument(metavar="A", help="The earlier run: id, name, last~1.")] = "last~1",
    after: Annotated[str, typer.Argument(metavar="B", help="The later run.")] = "last",
    flips: Annotated[
        int, typer.Option(metavar="N", min=0, help="Flips to print, of each metric and direction.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compare two runs item by item; what differs between them comes first."""
    from conserve.nightly.report.document import document
    from conserve.nightly.run_comparisons import two_runs

    context: Context = ctx.obj
    home = context.settings().home
    first, second = two_runs(home, before, after)
    tell_whose(home, after, second)
    found = document(home, second, first.id, flips_of=flips or (100 if as_json else 0))
    if as_json:
        output.data_json({name: found[name] for name in ("headline", "comparison", "flips")})
        return
    tell(found)
    for flip in found["flips"]:
        output.data(
            f"{flip['suite']} {flip['metric']} item {flip['item']}: {flip['before']:g} -> {flip['after']:g}\n"
            f"  before: {short(flip['before_answer'])}\n  now:    {short(flip['after_answer'])}"
        )


def gate(
    ctx: typer.Context,
    run: Run = "last",
    against: Against = None,
    fail_on: Annotated[
        str,
        typer.Option(metavar="WHAT", help="regression: exit 6 if worse, 7 if it cannot be told; never: 0."),
    ] = "regression",
    as_json: Json = False,
) -> None:
    """Exit with 6 if a run is worse, with 7 if that cannot be told, else with 0."""
    from conserve.evals.verdict import Verdict
    from conserve.nightly import keeping

    if fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on takes {' or '.join(FAIL_ON)}, not {fail_on!r}")
    context: Context = ctx.obj
    home = context.settings().home
    if (left := keeping.under_way(home, run)) is not None:
        tell_whose(home, run, left)
        found: dict[str, Any] = {"run": {"id": left.id}, "headline": UNENDED, "comparison": None}
    else:
        found = document_of(ctx, run, against)
    if as_json:
        output.data_json({name: found[name] for name in ("headline", "comparison")})
    else:
        tell(found)
    comparison = found["comparison"]
    verdict = Verdict.CANNOT_TELL if comparison is None else Verdict(comparison["verdict"])
    raise typer.Exit(exits.DONE if fail_on == "never" else gate_code(verdict))


def gate_code(verdict: "Verdict") -> int:
    """Exit code of a verdict."""
    return {"worse": exits.WORSE, "cannot tell": exits.CANNOT_TELL}.get(verdict.value, exits.DONE)


def document_of(ctx: typer.Context, run: str, against: str | None) -> dict[str, Any]:
    """Document of a run."""
    from conserve.evals.plan_file import plan_of
    from conserve.nightly import keeping
    from conserve.nightly.report.document import against_of, at_least_one_suite, document

    context: Context = ctx.obj
    home = context.settings().home
    found = keeping.resolve(home, run)
    tell_whose(home, run, found)
    at_least_one_suite(found)
    return document(home, found, against_of(home, found, against, plan_of(found.plan).against))


def tell_whose(home: Path, wanted: str, found: "RunRecord") -> None:
    """Say of which evaluation `last` is, where the store has runs of several."""
    from conserve.nightly import keeping
    from conserve.store.files import nights

    known = keeping.runs(home)
    name = keeping.RunName.parse(wanted, known, nights.names(home))
    others = [run.evaluation for run in known if run.evaluation != found.evaluation]
    if others and name.evaluation is None and name.back is not None:
        output.say(
            f"{wanted} is a run of {found.evaluation!r}; for one of another evaluation write its name too: "
            f"conserve eval report {others[-1]}:{wanted}"
        )


def tell(found: dict[str, Any]) -> None:
    """Print the facts that differ, a table of verdicts, and the headline."""
    comparison = found["comparison"]
    if comparison is not None:
        for one in comparison["differences"]:
            output.say(
                f"{fact_in_words(one['fact'])} differs ({', '.join(one['suites'])}): "
                f"{one['before'] or 'none'} before, {one['after'] or 'none'} now"
            )
        rows = [
            [
                one["suite"],
                one["metric"],
                f"{one['before']:.4g}",
                f"{one['after']:.4g}",
                f"{one['difference']:+.3g}",
                f"{one['fell']:,}",
                f"{one['rose']:,}",
                f"{one['items']:,}",
                one["sentence"] if one["verdict"] == "cannot tell" else one["verdict"],
            ]
            for one in comparison["suites"]
        ]
        if rows:
            header = ("SUITE", "METRIC", "BEFORE", "NOW", "DIFFERENCE", "FELL", "ROSE", "ITEMS", "VERDICT")
            output.data("\n".join(output.columns(header, rows, right=(2, 3, 4, 5, 6, 7))))
        for suite, why in comparison["missing"].items():
            output.say(f"{suite} {why}")
        for suite in comparison["new"]:
            output.say(f"{suite} is new: it has nothing to compare with")
        for suite, first in comparison["since"].items():
            output.say(f"{suite}: its history begins with {first}, when its questions or its scores changed")
        for one in comparison["changes"]:
            output.say(
                f"{one['suite']} {one['metric']}: {one['since']:.4g} since {one['night']}, "
                f"{one['before']:.4g} before (p = {one['p']:.2g})"
            )
    output.data(f"{found['run']['id']}: {found['headline']}")


def fact_in_words(fact: str) -> str:
    """A fact, and what a digest is of."""
    return f"{fact} ({DIGESTS[fact]})" if fact in DIGESTS else fact


def short(answer: str | None, most: int = 100) -> str:
    """An answer on one line."""
    line = " ".join((answer or "no answer").split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
