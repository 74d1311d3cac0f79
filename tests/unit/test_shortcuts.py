"""Answers without typer equal typer's, and command lines that are not known are left to typer."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import typer

from conserve.cli import app, commands, shortcuts
from tests.conftest import WriteInput
from tests.unit.test_cli import conserve, submit

PROGRAM = typer.main.get_command(app.app)


def with_typer(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line past the shortcuts."""
    monkeypatch.setattr(sys, "argv", ["conserve", *words])
    return app.main()


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h"],
        ["help"],
        ["status"],
        ["status", "last"],
        ["status", "--json"],
        ["status", "--json", "last"],
        ["status", "last", "--json", "--watch"],
        ["status", "nowhere"],
        ["--home", "elsewhere", "status"],
    ],
)
def test_a_shortcut_prints_and_exits_as_typer_does(
    words: list[str],
    write_input: WriteInput,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    job_id = submit(write_input(q=["a", "b"]))
    assert conserve("cancel", job_id).returncode == 0  # final: nothing shown depends on the time
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", ["conserve", *words])
    code = shortcuts.answer(words)
    quick = capfd.readouterr()
    assert code is not None
    assert (with_typer(words, monkeypatch), capfd.readouterr()) == (code, quick)
    assert quick.out or quick.err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["run"],
        ["jobs"],
        ["status", "--help"],
        ["status", "-h"],
        ["status", "--frobnicate"],
        ["status", "one", "two"],
        ["--home", "--help"],
        ["--home=x", "status"],
        ["--home", "x"],
        ["help", "status"],
    ],
)
def test_everything_else_is_left_to_typer(words: list[str]) -> None:
    assert shortcuts.answer(words) is None


def test_shell_completion_is_left_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, shortcuts.COMPLETION, "complete_bash")
    assert shortcuts.answer(["status"]) is None


def test_the_overview_shows_the_options_that_typer_takes() -> None:
    taken = {opt for parameter in PROGRAM.params for opt in parameter.opts} | {"-h", "--help"}
    shown = {word for term in commands.OPTIONS for word in term.replace(",", "").split() if word[0] == "-"}
    assert shown == taken
    assert max(map(len, commands.overview().splitlines())) <= 80


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_overview_shows_each_command_with_its_own_words(name: str) -> None:
    summary = commands.COMMANDS[name].summary
    widest = max(map(len, commands.COMMANDS))
    assert f"  {name:<{widest}}  {summary}\n" in commands.overview()
    command = PROGRAM.commands[name]  # type: ignore[attr-defined]
    assert command.name == name
    assert command.help.split()[:3] == summary.split()[:3]


@pytest.mark.parametrize("words", [["--help"], ["status"]])
def test_a_reader_that_leaves_ends_a_shortcut_quietly(words: list[str], write_input: WriteInput) -> None:
    submit(write_input(q=["a"]))
    assert conserve_into_closed_pipe(*words) == (141, "")


def conserve_into_closed_pipe(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose standard output has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "conserve", *words]
    with subprocess.Popen(
        command, stdout=writer, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as running:
        os.close(writer)
        assert running.stderr is not None
        return running.wait(600), running.stderr.read()
