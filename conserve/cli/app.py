"""The command line: typer's groups and commands, and the exit code of each error."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from conserve import __version__
from conserve.cli import exits, output
from conserve.cli.commands import COMMANDS, OPTIONS, SUMMARY, overview
from conserve.cli.context import Context, tell_of_database
from conserve.errors import ConserveError


def example_first(self: Any, ctx: Any, formatter: Any) -> None:
    """Print help that begins with the example (kept in `epilog`), which is what most readers look for."""
    if self.epilog:
        with formatter.section("Example"):
            for line in self.epilog.strip().splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line.strip()}\n")
        formatter.write_paragraph()
    self.format_usage(ctx, formatter)
    self.format_help_text(ctx, formatter)
    self.format_options(ctx, formatter)


class ExampleCommand(TyperCommand):
    """A command whose help shows an example first."""

    format_help = example_first


PASSING_ON = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": True}
SETTINGS = {"serve": PASSING_ON, "bench": PASSING_ON, "tune": PASSING_ON}  # words behind MODEL go to vLLM


class ExampleGroup(TyperGroup):
    """Commands in the order in which one needs them."""

    format_help = example_first

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


class Program(ExampleGroup):
    """The program; a command's module is imported when the command is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()  # type: ignore[assignment]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(overview())

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(exits.INTERRUPTED) from None


class LazyCommands(Mapping[str, Any]):
    """Commands by name; each is made when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        entry = COMMANDS[name]
        module = entry.load()
        if name == "profile":
            return measuring(module, entry.summary)
        if name == "store":
            return grouped(name, module, entry.summary, size=module.show_size, **module.VERBS)
        if name == "keys":
            return grouped(
                name, module, entry.summary, add=module.add, list=module.show, revoke=module.revoke
            )
        if name == "fleet":
            verbs = {"list": module.show, "drain": module.drain, "undrain": module.undrain}
            return grouped(name, module, entry.summary, ListingGroup, **verbs)
        if name == "eval":
            return grouped(name, module, entry.summary, **module.COMMANDS)
        if name == "hooks":
            verbs = {"add": "add", "list": "show"}
            verbs |= {verb: verb for verb in ("remove", "log", "test", "resend", "deliver")}
            named = {verb: getattr(module, function) for verb, function in verbs.items()}
            return grouped(name, module, entry.summary, **named)
        example = getattr(module, "EXAMPLES", {}).get(name) or module.EXAMPLE
        alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        alone.command(
            name,
            cls=ExampleCommand,
            epilog=example,
            short_help=entry.summary,
            context_settings=SETTINGS.get(name),
        )(getattr(module, name))
        return typer.main.get_command(alone)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class MeasuringGroup(ExampleGroup):
    """`conserve profile MODEL` is short for `conserve profile measure MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "-h", "--help"):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


def measuring(module: Any, summary: str) -> Any:
    """`conserve profile`, a group of its own."""
    profiles = typer.Typer(
        name="profile",
        cls=MeasuringGroup,
        help=f"{summary[:-1]}; `profile MODEL` measures.",
        short_help=summary,
        epilog=module.EXAMPLE,
        rich_markup_mode=None,
        add_completion=False,
    )
    profiles.command("measure", cls=ExampleCommand, epilog=module.EXAMPLE, context_settings=PASSING_ON)(
        module.measure
    )
    profiles.command("show", cls=ExampleCommand, epilog=module.SHOW_EXAMPLE)(module.show)
    return typer.main.get_command(profiles)


class ListingGroup(ExampleGroup):
    """`conserve fleet` is short for `conserve fleet list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def grouped(
    name: str, module: Any, summary: str, cls: type[ExampleGroup] = ExampleGroup, /, **commands: Any
) -> Any:
    """`conserve store`, `keys`, `hooks`, `fleet` or `eval`, a group of its own."""
    group = typer.Typer(
        name=name,
        cls=cls,
        help=summary,
        short_help=summary,
        epilog=module.EXAMPLE,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=cls is ExampleGroup,
    )
    group.callback()(lambda: None)  # makes typer keep a group also where it has one command
    examples = getattr(module, "EXAMPLES", {})
    for verb, function in commands.items():
        group.command(verb, cls=ExampleCommand, epilog=examples.get(verb, module.EXAMPLE))(function)
    return typer.main.get_command(group)


app = typer.Typer(
    name="conserve",
    cls=Program,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        output.data(f"conserve {__version__}")
        raise typer.Exit


@app.callback(help=SUMMARY)
def program(
    ctx: typer.Context,
    home: Annotated[str | None, typer.Option(metavar="DIR", help=OPTIONS["--home DIR"])] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help=OPTIONS["--version"])
    ] = False,
) -> None:
    """Store the program's own flags in the context."""
    ctx.obj = Context(home=home)
    tell_of_database(home)


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        app(prog_name="conserve")
    except SystemExit as leaving:  # typer's way to end, with the code of the command or of a usage error
        return leaving.code if isinstance(leaving.code, int) else exits.DONE
    except ConserveError as error:
        return output.failed(error)
    return exits.DONE
