"""`conserve help`."""

from typing import Annotated

import typer

from conserve.cli import output
from conserve.errors import UsageError

EXAMPLE = "conserve help submit"


def help(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="The command to explain, as eval run.")
    ] = None,
) -> None:
    """Explain the program, or one command."""
    explained = ctx.parent
    assert explained is not None
    for number, word in enumerate(words or [], start=1):
        command_of = getattr(explained.command, "get_command", lambda context, name: None)
        found = command_of(explained, word)
        if found is None:
            first = " ".join((words or [])[:number])
            upper = " ".join(["conserve help", *(words or [])[: number - 1]])
            raise UsageError(f"there is no command {first!r}; run: {upper}")
        explained = type(explained)(found, info_name=word, parent=explained)
    output.data(explained.command.get_help(explained))
