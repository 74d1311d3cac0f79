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
SETTINGS = dict.fromkeys(("serve", "bench", "tune", "profile measure"), PASSING_ON)
"""Settings of commands whose words behind MODEL go to vLLM."""


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
        if hasattr(module, "VERBS"):
            return group_of(name, module, entry.summary)
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


class VerbGroup(ExampleGroup):
    """A command with verbs; a line without one means the default verb, if there is any."""

    default_verb: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.default_verb is not None and self._means(self.default_verb, args):
            args = [self.default_verb, *args]
        return super().parse_args(ctx, args)

    def _means(self, default_verb: str, args: list[str]) -> bool:
        """True if these words are the default verb's: flags, or a first argument if it takes any."""
        if not args or args[0] in (*self.commands, "-h", "--help"):
            return not args
        takes_words = any(param.param_type_name == "argument" for param in self.commands[default_verb].params)
        return takes_words or args[0].startswith("-")


def group_of(name: str, module: Any, summary: str) -> Any:
    """The command of a module with `VERBS`, perhaps with a `DEFAULT_VERB` and `HELP` longer than its summary."""
    default_verb = getattr(module, "DEFAULT_VERB", None)
    group = typer.Typer(
        name=name,
        cls=VerbGroup,
        help=getattr(module, "HELP", summary),
        short_help=summary,
        epilog=module.EXAMPLE,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=default_verb is None,
    )
    examples = getattr(module, "EXAMPLES", {})
    for verb, function in module.VERBS.items():
        group.command(
            verb,
            cls=ExampleCommand,
            epilog=examples.get(verb, module.EXAMPLE),
            context_settings=SETTINGS.get(f"{name} {verb}"),
        )(function)
    made: Any = typer.main.get_command(group)
    made.default_verb = default_verb
    return made


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
        return output.say_error(error)
    return exits.DONE
