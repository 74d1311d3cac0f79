"""Command lines that are answered without typer, whose import takes longer than all the rest of them.

`--help`, `--version` and `status` in their plain spelling: what is spelled otherwise, or wrongly, is left to typer.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from conserve.cli import exits
from conserve.errors import ConserveError

COMPLETION = "_CONSERVE_COMPLETE"  # set by the shell that asks for completions


class StatusCommand(NamedTuple):
    """Arguments of a `conserve status` command line."""

    home: str | None
    job: str | None
    flags: frozenset[str]


def answer(words: Sequence[str]) -> int | None:
    """Answer a command line and return its exit code; None if typer must parse it."""
    if COMPLETION in os.environ:
        return None
    command = parse_status(words)
    if command is None and (len(words) != 1 or words[0] not in ("--help", "-h", "help")):
        return None
    try:
        return overview() if command is None else status(command)
    except KeyboardInterrupt:
        return exits.INTERRUPTED


def parse_status(words: Sequence[str]) -> StatusCommand | None:
    """Parse `[--home DIR] status [JOB] [--watch] [--json]`; None for anything else."""
    home = None
    if len(words) > 2 and words[0] == "--home" and not words[1].startswith("-"):
        home, words = words[1], words[2:]
    if not words or words[0] != "status":
        return None
    flags = frozenset(word for word in words[1:] if word.startswith("-"))
    jobs = [word for word in words[1:] if not word.startswith("-")]
    if flags - {"--watch", "--json"} or len(jobs) > 1:
        return None
    return StatusCommand(home, jobs[0] if jobs else None, flags)


def overview() -> int:
    """Print `conserve --help`; returns the exit code."""
    from conserve.cli import commands

    print(commands.overview(), end="", flush=True)
    return exits.DONE


def status(command: StatusCommand) -> int:
    """Print `conserve status`; returns the exit code."""
    from conserve.cli import output, status_report
    from conserve.cli.context import tell_of_database
    from conserve.config import load

    tell_of_database(command.home)
    question = status_report.StatusArguments(
        command.job, "--watch" in command.flags, "--json" in command.flags
    )
    try:
        status_report.answer(load({"home": command.home}), question)
    except ConserveError as error:
        return output.say_error(error)
    return exits.DONE
