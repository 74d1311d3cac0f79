"""Commands for tests: in this process, or in one of their own where the process itself is the point."""

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TextIO
from unittest import mock

import typer.main

from conserve.cli.app import main

REPOSITORY = Path(__file__).parents[1]
HANGS_S = 600.0  # only a command that hangs takes as long; below the limit of a test, to show what it said

STARTED: list["subprocess.Popen[str] | Fork"] = []
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


class Fork:
    """A command in a fork of this process, as `subprocess.Popen` would show it."""

    returncode: int | None = None

    def __init__(self, pid: int, said: list[Any]) -> None:
        self.pid, self._said, self._texts = pid, said, list[str]()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._waited(os.WNOHANG)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; returns stdout and stderr."""
        until_s = time.monotonic() + (HANGS_S if timeout is None else timeout)
        while self._waited(os.WNOHANG) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("conserve", HANGS_S if timeout is None else timeout)
            time.sleep(0.02)
        while self._said:
            with self._said.pop(0) as file:
                file.seek(0)
                self._texts.append(file.read().decode())
        return self._texts[0], self._texts[1]

    def _waited(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork(*arguments: str, **variables: str) -> Fork:
    """Start a command in a fork of this process, in a process group of its own that ends with the test.

    That saves the seconds of imports, and shows what `conserve` shows; signals and kills meet a real process.
    """
    said = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  they are read after its end
    if (pid := os.fork()) == 0:
        become(arguments, variables, [file.fileno() for file in said])
    running = Fork(pid, said)
    STARTED.append(running)
    return running


def become(arguments: Sequence[str], variables: Mapping[str, str], said: Sequence[int]) -> NoReturn:
    """Be the command, in a forked process, which ends without what this process does at its exit."""
    code = 1
    try:
        os.setsid()
        for stream, descriptor in enumerate(said, start=1):
            os.dup2(descriptor, stream)
        os.environ.update(variables)
        sys.argv = ["conserve", *arguments]
        with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
            code = main()
    finally:
        os._exit(code)


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
