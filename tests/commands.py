"""Commands for tests: in this process, or in one of their own where the process itself is the point."""

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO
from unittest import mock

import typer.main

from conserve.cli.app import main

REPOSITORY = Path(__file__).parents[1]
HANGS_S = 600.0  # only a command that hangs takes as long; below the limit of a test, to show what it said

STARTED: list["subprocess.Popen[str]"] = []
OPENED: list[Callable[[], object]] = []  # what closes the connections of a test


# Each call makes its command anew, and with it a validator for each option: a third of the time of a small command.
MADE_ONCE = functools.cache(typer.main._get_params_name_from_function)


def parameters(function: Callable[..., Any] | None) -> tuple[list[Any], str | None]:
    """Parameters of a command's function, and the name of that which takes typer's context."""
    found, context = MADE_ONCE(function)
    return [*found], context


typer.main._get_params_name_from_function = parameters  # type: ignore[assignment]


class Done(NamedTuple):
    """A command that has ended, as `subprocess.run` would show it."""

    returncode: int
    stdout: str
    stderr: str


class Command(Protocol):
    """A command in a process of its own: a `Popen`, or one that was forked."""

    @property
    def returncode(self) -> Any: ...

    def poll(self) -> int | None: ...

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...


def conserve(*arguments: str, stdin: str = "", **variables: str) -> Done:
    """Run a command in this process, from its arguments to its exit code as `conserve` itself does.

    That saves the second an interpreter takes to start. What it cannot show is a function that forgets an
    import which the tests made, output that is lost at exit, a thread that keeps the process alive, and
    settings that are read at import: `process` is for these.
    """
    with redirected(stdin) as (stdout, stderr), mock.patch.dict(os.environ, variables):
        with mock.patch.object(sys, "argv", ["conserve", *arguments]):
            code = main()
        sys.stdout.flush()
        return Done(code, stdout.getvalue().decode(), stderr.getvalue())


@contextlib.contextmanager
def redirected(stdin: str) -> Iterator[tuple[io.BytesIO, io.StringIO]]:
    """Standard streams that are no terminals; stdin and stdout have a `buffer`."""
    out, err = io.BytesIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.TextIOWrapper(out, "utf-8", write_through=True)))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        )
        yield out, err


def process(*arguments: str, stdin: str = "", **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "conserve", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
        **options,
    )


def start(
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stdout: int | TextIO = subprocess.PIPE,
    stderr: int | TextIO = subprocess.PIPE,
) -> "subprocess.Popen[str]":
    """Start Python with these arguments, in a process group of its own that ends with the test."""
    running = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    STARTED.append(running)
    return running


def end_all() -> None:
    """Close connections, and kill what a test that failed has left behind, also where it stands still."""
    while OPENED:
        OPENED.pop()()
    while STARTED:
        running = STARTED.pop()
        if running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.communicate()


def ended(running: Command, hangs_s: float = HANGS_S) -> Done:
    """Wait until a command has ended."""
    stdout, stderr = running.communicate(timeout=hangs_s)
    return Done(running.returncode, stdout, stderr)


def threads_of(process_id: int | str) -> set[int]:
    """Numbers of a process's threads; `self` names this process."""
    return {int(path.name) for path in Path(f"/proc/{process_id}/task").iterdir()}


def until(
    condition: Callable[[], bool],
    running: Command | None = None,
    *,
    every_s: float = 0.01,
) -> None:
    """Return once the condition holds; fail if the process that should bring it about has ended without."""
    while not condition():
        if running is not None and running.poll() is not None and not condition():
            raise AssertionError(f"ended with {running.returncode}: {ended(running).stderr}")
        time.sleep(every_s)
