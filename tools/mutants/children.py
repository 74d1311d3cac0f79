"""Children that try mutants: forked, bounded in time and memory, and judged by what they write."""

import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from tools.mutants.mutations import Mutant
from tools.mutants.survey import silence

CPU_S, WALL_S, FACTOR = 5, 60, 8  # a test may take FACTOR times as long as without a mutant, and so much more
MEMORY_BYTES = 3 << 30  # that a child may have beyond what it begins with


class Fate(StrEnum):
    """End of a mutant."""

    KILLED = "killed"  # a test failed, or ended neither in time nor within the memory
    SURVIVED = "survived"
    UNREACHED = "not reached"  # no test runs the statement
    UNKNOWN = "unknown"  # the tests end without a result, and do so without the mutant too
    ELSEWHERE = "elsewhere"  # the function cannot be replaced in place: try it by importing


class Outcome(NamedTuple):
    """A mutant, what became of it, and by which test."""

    mutant: Mutant
    fate: Fate
    test: str = ""
    tests: int = 0  # that ran, or would have


class Task(NamedTuple):
    """A mutant and the tests to try it with."""

    mutant: Mutant
    names: Sequence[str]
    run: Callable[..., None]  # run(pipe, changed=True): with the mutant, else without it


TOOK_TOO_LONG = (-signal.SIGXCPU, -signal.SIGALRM)


def in_children(tasks: Iterator[Task], jobs: int) -> Iterator[Outcome]:
    """Run each task in a child, `jobs` at a time. A child writes `fate<tab>test`.

    A child that was ended by its limit of time has killed its mutant. One that ended in another way and wrote
    nothing tells nothing yet: the same tests run without the mutant, and must survive for it to be killed.
    """
    running: dict[int, tuple[Task, int, str]] = {}
    controls: dict[tuple[str, ...], bool] = {}

    def start(task: Task, *, changed: bool = True) -> int:
        folder = tempfile.mkdtemp(prefix="mutant-")
        Path(folder).chmod(0o711)  # of root, PostgreSQL's server runs as another user
        ours, its = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                os.close(ours)
                _begin(folder)
                task.run(its, changed=changed)
            finally:
                os._exit(1)
        os.close(its)
        running[pid] = task, ours, folder
        return pid

    def end(pid: int = -1) -> tuple[Task, str, str, int]:
        pid, status = os.waitpid(pid, 0)
        task, pipe, folder = running.pop(pid)
        with os.fdopen(pipe, "rb") as file:
            os.set_blocking(pipe, False)  # a process that the child left behind may hold the other end
            fate, _, test = (file.read() or b"").decode().partition("\t")
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        return task, fate, test, os.waitstatus_to_exitcode(status)

    def ended() -> Outcome:
        task, fate, test, code = end()
        if not fate and code not in TOOK_TOO_LONG and not survives_unchanged(task):
            fate = Fate.UNKNOWN
        return Outcome(task.mutant, Fate(fate or Fate.KILLED), test, len(task.names))

    def survives_unchanged(task: Task) -> bool:
        names = tuple(task.names)
        if names not in controls:
            controls[names] = end(start(task, changed=False))[1] == Fate.SURVIVED
        return controls[names]

    for task in tasks:
        if len(running) >= jobs:
            yield ended()
        start(task)
    while running:
        yield ended()


def _begin(folder: str) -> None:
    os.setsid()
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = folder
    silence()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, in_use + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow(cpu_s: float, wall_s: float) -> None:
    """End this process after so much more time: of its own, or by the clock if it waits for ever."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + CPU_S + FACTOR * cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(WALL_S + FACTOR * wall_s))


def say(pipe: int, fate: Fate, test: str = "") -> None:
    """Write the result, and end this process."""
    os.write(pipe, f"{fate}\t{test}".encode())
    os._exit(0)
