"""The command line: its commands, and how errors leave it."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from conserve import __version__
from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.errors import ConserveError


def example_first(self: Any, ctx: Any, formatter: Any) -> None:
    """Help that begins with an example (kept in `epilog`), since that is what most people look for."""
    if self.epilog:
        with formatter.section("Example"):
            for line in self.epilog.strip().splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line.strip()}\n")
        formatter.write_paragraph()
    self.format_usage(ctx, formatter)
    self.format_help_text(ctx, formatter)
    self.format_options(ctx, formatter)


class Command(TyperCommand):
    """A command whose help shows an example first."""

    format_help = example_first


class Group(TyperGroup):
    """The program itself; commands in the order in which one needs them."""

    format_help = example_first

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(exits.INTERRUPTED) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


class MeasuringGroup(Group):
    """`conserve profile MODEL` is short for `conserve profile measure MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "-h", "--help"):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="conserve",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""
    conserve submit data.parquet --prompt "Summarize: {{ text }}" --max-tokens 128
    conserve run
    conserve results last -o answers.parquet
    """,
)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        output.data(f"conserve {__version__}")
        raise typer.Exit


@app.callback()
def program(
    ctx: typer.Context,
    home: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the store, instead of CONSERVE_HOME.")
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Run batch LLM work from a durable queue; no row is lost or answered twice."""
    ctx.obj = Context(home=home)


def command(name: str, example: str, **settings: Any) -> Any:
    """Register a command with the example that its help begins with."""
    return app.command(name, cls=Command, epilog=example, **settings)


def register() -> None:
    """Attach every command, in the order of the help."""
    from conserve.cli import (
        bench,
        control,
        doctor,
        harvest,
        help,
        jobs,
        profile,
        results,
        run,
        serve,
        sql,
        status,
        submit,
    )

    command("submit", submit.EXAMPLE)(submit.submit)
    command("run", run.EXAMPLE)(run.run)
    passing_on = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": True}
    command("serve", serve.EXAMPLE, context_settings=passing_on)(serve.serve)
    command("harvest", harvest.EXAMPLE)(harvest.harvest)
    command("status", status.EXAMPLE)(status.status)
    command("jobs", jobs.EXAMPLE)(jobs.jobs)
    command("results", results.EXAMPLE)(results.results)
    command("sql", sql.EXAMPLE)(sql.sql)
    command("pause", "conserve pause gsm8k-k3f9")(control.pause)
    command("resume", "conserve resume gsm8k-k3f9")(control.resume)
    command("cancel", "conserve cancel gsm8k-k3f9")(control.cancel)
    command("retry", "conserve retry gsm8k-k3f9 && conserve run")(control.retry)
    profiles = typer.Typer(cls=MeasuringGroup, rich_markup_mode=None, epilog=profile.EXAMPLE)
    profiles.command("measure", cls=Command, epilog=profile.EXAMPLE)(profile.measure)
    profiles.command("show", cls=Command, epilog=profile.SHOW_EXAMPLE)(profile.show)
    help_text = "Measure how long the engine's iterations take, and show it; `profile MODEL` measures."
    app.add_typer(profiles, name="profile", help=help_text)
    command("bench", bench.EXAMPLE, context_settings=passing_on)(bench.bench)
    command("doctor", "conserve doctor")(doctor.doctor)
    command("help", "conserve help submit")(help.help)


register()


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        app(prog_name="conserve")
    except SystemExit as leaving:  # how typer ends, with the code of the command or of a usage error
        return leaving.code if isinstance(leaving.code, int) else exits.DONE
    except ConserveError as error:
        output.say(f"{output.coloured('conserve:', 'red', sys.stderr)} {error}")
        return error.exit_code
    return exits.DONE
