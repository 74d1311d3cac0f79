"""The commands' page, from their help."""

import os
import sys
from unittest import mock

import typer
from typer.testing import CliRunner

from conserve.cli.app import app
from conserve.cli.commands import COMMANDS

WIDTH = "100"  # columns of help
MORE = {
    "submit": ("Queue rows", "queue-rows"),
    "run": ("Run the queue", "run-the-queue"),
    "serve": ("Serve live traffic and the queue", "serve"),
    "harvest": ("Feed a server that runs already", "feed-a-server"),
    "status": ("Follow jobs and read answers", "read-answers"),
    "jobs": ("Follow jobs and read answers", "read-answers"),
    "results": ("Follow jobs and read answers", "read-answers"),
    "sql": ("Follow jobs and read answers", "read-answers"),
    "show": ("Follow jobs and read answers", "read-answers"),
    "pause": ("Follow jobs and read answers", "read-answers"),
    "resume": ("Follow jobs and read answers", "read-answers"),
    "cancel": ("Follow jobs and read answers", "read-answers"),
    "retry": ("Follow jobs and read answers", "read-answers"),
    "check": ("Repair and clean the store", "repair-and-clean"),
    "rm": ("Repair and clean the store", "repair-and-clean"),
    "prune": ("Repair and clean the store", "repair-and-clean"),
    "store": ("Repair and clean the store", "repair-and-clean"),
    "profile": ("Hold a pace", "hold-a-pace"),
    "bench": ("Measure the harm on your traffic", "compare-policies"),
    "doctor": ("Diagnose a machine", "diagnose"),
}
HEAD = """# Commands

This page is the program's own help, written by `make reference`. A job is named by its id, by the beginning of
its id if no other id begins so, or by `last`. Data goes to stdout, everything else to stderr.
`conserve --install-completion` installs shell completion, job ids included.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, block(help_of())]
    for name in COMMANDS:
        parts.append(f"## conserve {name}\n")
        if name in MORE:
            title, file = MORE[name]
            parts.append(f"[{title}](../how-to/{file}.md) explains it.\n")
        parts.append(block(help_of(name)))
        parts += [block(help_of(name, part)) for part in parts_of(name)]
    return "\n".join(parts)


def parts_of(name: str) -> list[str]:
    """Commands of a group; none of a command that is no group."""
    group = typer.main.get_group(app)
    return list(getattr(group.get_command(typer.Context(group), name), "commands", ()))


def help_of(*words: str) -> str:
    """Help of the program, or of a command, as it looks off a terminal."""
    argv = ["conserve", *words, "--help"]
    variables = {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH}
    with mock.patch.dict(os.environ, variables), mock.patch.object(sys, "argv", argv):
        done = CliRunner().invoke(app, argv[1:], prog_name="conserve", color=False)
    assert done.exit_code == 0, f"{argv}: {done.output}"
    return done.stdout


def block(text: str) -> str:
    """A block of code."""
    lines = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    return f"```text\n{lines}\n```\n"
