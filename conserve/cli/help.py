"""`conserve help`."""

from typing import Annotated

import typer

from conserve.cli import output
from conserve.errors import UsageError

EXAMPLE = "conserve help submit"


def help(
    ctx: typer.Context,
    command: Annotated[str | None, typer.Argument(metavar="COMMAND", help="The command to explain.")] = None,
) -> None:
    """Explain the program, or one command."""
    parent = ctx.parent
    assert parent is not None
    group = parent.command
    if command is None:
        output.data(group.get_help(parent))
        return
    found = group.get_command(parent, command)  # type: ignore[attr-defined]
    if found is None:
        raise UsageError(f"there is no command {command!r}; run: conserve help")
    output.data(found.get_help(type(parent)(found, info_name=command, parent=parent)))
