"""Commands forked off a process that has imported them, so that a thousand need not import a thousand times.

Importing takes a second of processor time, ten times as much as all else until the store is open. A fork is a
process like any other: only kills during the imports need an interpreter of their own.

    python -m tests.acceptance.forks '{"first": []}'

It takes one order a line on stdin and gives one answer a line on stdout. `first` names functions, as
"module:function", that are called before anything of the program is imported.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.acceptance.rewiring import named
from tests.commands import REPOSITORY

IMPORTED = (
    *("conserve.cli.app", "conserve.cli.run", "conserve.jobs.harvest.harvester", "conserve.endpoints.fake"),
    *("conserve.cli.submit", "conserve.cli.control", "conserve.cli.results", "conserve.cli.harvest"),
    *("conserve.endpoints.http", "conserve.store.sql.query", "conserve.store.sql.export"),
    *("conserve.jobs.requests.submit", "conserve.jobs.hooks.courier", "conserve.jobs.telemetry.otlp"),
    *("conserve.cli.shortcuts", "typer._adapters", "duckdb", "jinja2.sandbox", "pyarrow.dataset"),
    *("httpcore", "h11", "anyio._backends._asyncio", "conserve.installation"),
    *("conserve.cli.api", "conserve.batch_api.serving"),
    *("conserve.cli.evaluations", "conserve.nightly.rounds"),
    *("tests.acceptance.aimed", "tests.acceptance.phases"),
)
"""Modules that commands import, early or late, so that a fork need not."""
POLL_S = 0.005


class Forks:
    """The process that forks. Close it; forks that still run then end with it."""

    def __init__(self, *, first: Sequence[str] = ()) -> None:
        prepared = json.dumps({"first": first})
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.forks", prepared],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        errors: Path,
        output: Path | None = None,
        source: Path | None = None,
    ) -> "Forked":
        """Fork `tests.acceptance.aimed` with these arguments; what it says on stderr goes to a file.

        So does its stdout if there is one for it, and its stdin comes from `source`, a file or a named pipe.
        """
        for path in filter(None, (output, errors)):
            if not path.exists():
                path.touch()  # a fork may be killed before it opens them
        streams = [str(path or os.devnull) for path in (source, output, errors)]
        pid = self.ask(fork=list(arguments), env=dict(env), streams=streams)
        return Forked(self, pid, errors, output)

    def ask(self, **order: Any) -> Any:
        """Give an order and return the answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._server.communicate()


def environment() -> dict[str, str]:
    """The variables for all forks: no settings, and no threads, which do not live on in a fork."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CONSERVE_")}
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}


class Forked:
    """A forked command, as `subprocess.Popen` would show it."""

    def __init__(self, forks: Forks, pid: int, errors: Path, output: Path | None) -> None:
        self.pid, self.returncode, self._forks = pid, None, forks
        self.errors, self._output = errors, output

    returncode: int | None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._forks.ask(wait=self.pid, timeout_s=0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; returns stdout, if there is a file for it, and stderr."""
        while self.returncode is None:
            self.returncode = self._forks.ask(wait=self.pid, timeout_s=60.0 if timeout is None else timeout)
            if self.returncode is None and timeout is not None:
                raise subprocess.TimeoutExpired("conserve", timeout)
        kept = self._output is not None and self._output.is_file()  # no device
        return self._output.read_text() if kept else "", self.errors.read_text()

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(*, first: Sequence[str] = ()) -> None:
    """Take orders until stdin ends; a fork leaves through `become`."""
    for at in first:
        named(at)()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork goes through all of this as it ends: four fifths of its processor time
    gc.get_freeze_count = lambda: 1  # each harvester asks, which takes 40 ms where as much is imported
    children: set[int] = set()
    try:
        while line := sys.stdin.readline():
            order = json.loads(line)
            if "wait" in order:
                answer = waited(order["wait"], time.monotonic() + order["timeout_s"])
                if answer is not None:
                    children.discard(order["wait"])
            elif (answer := os.fork()) == 0:
                children.clear()  # they are its siblings
                become(order)
                return
            else:
                children.add(answer)
            print(json.dumps(answer), flush=True)
        gc.unfreeze()  # DuckDB complains at the end of what was not collected
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def thawed(_: str) -> None:
    """Let a fork collect its garbage as it ends, without which DuckDB complains on stderr."""
    gc.unfreeze()


def heeds(number: str) -> None:
    """Take back that a signal is ignored, as `nohup` leaves one, which a command would go on with."""
    of_python = int(number) == signal.SIGINT
    signal.signal(int(number), signal.default_int_handler if of_python else signal.SIG_DFL)


def waited(pid: int, until: float) -> int | None:
    """The exit code of a child, or None if it still runs at that time (monotonic clock)."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(POLL_S)


def become(order: Mapping[str, Any]) -> None:
    """Be the command, in a process group of its own."""
    from tests.acceptance.aimed import main

    os.setsid()
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for stream, path in enumerate(order["streams"]):
        descriptor = os.open(path, written if stream else os.O_RDONLY, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.update(order["env"])
    sys.argv[1:] = order["fork"]
    main()


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
