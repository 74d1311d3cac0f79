"""Child processes with a limit of time; all their descendants end with them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.gpu.results import FAILED

STOP_PATIENCE_S = 20.0


def conserve(*words: str) -> list[str]:
    """A command line of ConServe."""
    return [sys.executable, "-m", "conserve", *words]


def within(*words: str) -> list[str]:
    """A command line of this kit's own children."""
    return [sys.executable, "-m", "tools.gpu.within", *words]


class Kept:
    """A process that an earlier call left running; the used part of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._process = psutil.Process(pid) if psutil.pid_exists(pid) else None

    def poll(self) -> int | None:
        """None while it runs; its exit code is its own parent's to know."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""
        if self._process is not None:
            try:
                self._process.wait(timeout)
            except psutil.TimeoutExpired as late:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from late


def start(
    words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a child in a session of its own, whose output is added to the log."""
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(words)}\n".encode())
        file.flush()
        return subprocess.Popen(
            words,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def run(
    words: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a child to its end or its limit; returns the JSON that it printed, and `failed` if it ended badly."""
    begins = log.stat().st_size if log.exists() else 0
    process, late = start(words, log, environment), ""
    try:
        process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        late = f"ended after its {limit_s:.0f} s"
    finally:
        end(process)
    printed = log.read_bytes()[begins:].decode(errors="replace")
    why = late or (f"exit {process.returncode}" if process.returncode else "")
    return outcome(printed, why)


def outcome(printed: str, why: str) -> dict[str, Any]:
    """Findings that a child printed, one JSON object a line, later ones over earlier ones.

    A child that ended early keeps its findings; `failed` has the reason and `log` the last lines.
    """
    found: dict[str, Any] = {}
    for line in re.findall(r"^\{.*\}$", printed, re.MULTILINE):
        with contextlib.suppress(ValueError):
            found |= json.loads(line)
    if why or not found:
        found |= {FAILED: why or "it printed no result", "log": last_lines(printed)}
    return found


def last_lines(text: str, lines: int = 25) -> str:
    """The end of a log, without command lines and JSON."""
    return "\n".join([line for line in text.splitlines() if line and line[0] not in "{$"][-lines:])[-4000:]


def tail(log: Path) -> str:
    """The end of a log file, if there is one."""
    return last_lines(log.read_text(errors="replace")) if log.exists() else ""


def end(process: "subprocess.Popen[bytes] | Kept", patience_s: float = STOP_PATIENCE_S) -> None:
    """Ask a child to stop, then kill it, its group and all its descendants that are left."""
    members = family(process.pid) if process.poll() is None else []
    if members:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    for member in members:
        with contextlib.suppress(psutil.Error):  # it is gone; its number may belong to another process by now
            member.kill()
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def family(root: int) -> list[psutil.Process]:
    """A process and all its descendants; none if the process is gone."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
