"""Trying a mutant: a forked child puts it in place and runs tests until one fails.

Of a function the child replaces the code object, wherever the function was imported to, so that tests are collected
once for all mutants. What runs at import (constants, fields, defaults) is tried in a child of a process that has
imported nothing of the package yet.
"""

import gc
import importlib
import importlib.machinery
import importlib.util
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from tools.mutants.mutations import Mutant
from tools.mutants.survey import Survey, silence, survey

CPU_S, WALL_S, FACTOR = 5, 60, 8  # a test may take FACTOR times as long as without a mutant, and so much more
MEMORY_BYTES = 3 << 30  # that a child may have beyond what it begins with
FEW = 10  # examples that property tests are tried with first
PROFILE = "mutants"
SETTINGS = "_hypothesis_internal_use_settings"  # of a test: Hypothesis has no other way to change them
OPTIONS = [
    *(
        "-qq",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--timeout=0",
        f"--hypothesis-profile={PROFILE}",
    ),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # this imports Hypothesis before pytest does
]


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


@dataclass(slots=True, kw_only=True)
class Trials:
    """A plugin of pytest: once tests are collected it surveys them and tries the mutants of functions."""

    mutants: Sequence[Mutant]
    examples: int
    seconds: float
    jobs: int
    on_outcome: Callable[[Outcome], None]
    survey: Survey = field(default_factory=dict)
    elsewhere: list[Mutant] = field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the mutants, in place of running the tests once."""
        fewer_examples(session.items, self.examples)
        self.survey = survey(session.items, examples=self.examples)
        for name, tested in self.survey.items():
            if not tested.passed:
                print(f"not used, since it fails without a mutant: {name}", flush=True)
        items = {item.nodeid: item for item in session.items}
        functions = functions_by_place()
        last_killer: dict[tuple[str, str | None], str] = {}
        gc.freeze()  # children share what they do not touch

        def child(mutant: Mutant, names: Sequence[str]) -> Task:
            tests = [items[name] for name in names]

            def run(pipe: int, *, changed: bool) -> None:
                if changed and not put_in_place(mutant, functions):
                    _say(pipe, Fate.ELSEWHERE)
                _try_all(tests, self.survey, pipe)

            return Task(mutant, names, run)

        def tasks() -> Iterator[Task]:
            for mutant in self.mutants:
                if mutant.function is None:
                    self.elsewhere.append(mutant)
                    continue
                names = reaching(mutant, self.survey)
                if not names:
                    self.on_outcome(Outcome(mutant, Fate.UNREACHED))
                    continue
                known = last_killer.get((mutant.path, mutant.function))
                names = within(self.seconds, names, self.survey, first=known)
                yield child(mutant, sorted(names, key=lambda name: (name != known, self.survey[name].cpu_s)))

        for outcome in in_children(tasks(), self.jobs):
            if outcome.fate == Fate.ELSEWHERE:
                self.elsewhere.append(outcome.mutant)
                continue
            if outcome.test:
                last_killer[outcome.mutant.path, outcome.mutant.function] = outcome.test
            self.on_outcome(outcome)
        return True


def fewer_examples(items: Sequence[pytest.Item], examples: int) -> None:
    """Bound the examples of property tests, also of those that ask for more than the profile has."""
    for item in items:
        asked = _examples(item)
        if asked is not None and asked.max_examples > examples:
            _set_examples(item, hypothesis.settings(asked, max_examples=examples))


def _examples(item: pytest.Item) -> hypothesis.settings | None:
    return getattr(getattr(item, "obj", None), SETTINGS, None)


def _set_examples(item: pytest.Item, asked: hypothesis.settings) -> None:
    test = item.obj  # type: ignore[attr-defined]
    setattr(getattr(test, "__func__", test), SETTINGS, asked)


class FewerExamples:
    """The same as a plugin of pytest."""

    def __init__(self, examples: int) -> None:
        self._examples = examples

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Once tests are collected."""
        fewer_examples(items, self._examples)


def reaching(mutant: Mutant, surveyed: Survey) -> list[str]:
    """The tests that run the statement that is changed."""
    lines = range(mutant.lines[0], mutant.lines[1] + 1)
    return [
        name
        for name, tested in surveyed.items()
        if tested.passed and not tested.lines.get(mutant.path, frozenset()).isdisjoint(lines)
    ]


def within(seconds: float, names: Sequence[str], surveyed: Survey, first: str | None) -> list[str]:
    """`first` and the most specific of the tests, those that run the fewest lines, for so much processor time."""

    def breadth(name: str) -> tuple[bool, int]:
        return name != first, sum(map(len, surveyed[name].lines.values()))

    chosen: list[str] = []
    for name in sorted(names, key=breadth):
        if chosen and seconds < surveyed[name].cpu_s:
            break
        chosen.append(name)
        seconds -= surveyed[name].cpu_s
    return chosen


def naming(mutant: Mutant, surveyed: Survey, words: Mapping[str, Mapping[str, frozenset[int]]]) -> list[str]:
    """The tests that run a line which names what is changed, or that stand in a file which does."""
    at: dict[str, set[int]] = {}
    for name in mutant.names:
        for path, lines in words.get(name, {}).items():
            at.setdefault(path, set()).update(lines)
    return [
        name
        for name, tested in surveyed.items()
        if tested.passed
        and (
            name.partition("::")[0] in at
            or any(not lines.isdisjoint(at.get(path, ())) for path, lines in tested.lines.items())
        )
    ]


def try_at_import(
    mutants: Sequence[Mutant],
    surveyed: Survey,
    words: Mapping[str, Mapping[str, frozenset[int]]],
    *,
    examples: int,
    seconds: float,
    jobs: int,
    on_outcome: Callable[[Outcome], None],
) -> None:
    """Try the mutants of what runs at import; call it before anything of the package is imported."""
    assert "conserve" not in sys.modules
    for name in (
        "hypothesis",
        "numpy",
        "pyarrow.parquet",
        "sqlalchemy",
        "duckdb",
        "scipy.optimize",
        "httpx",
        "typer",
    ):
        importlib.import_module(name)

    def child(mutant: Mutant, names: Sequence[str]) -> Task:
        def run(pipe: int, *, changed: bool) -> None:
            if changed:
                _import_changed(mutant)
            _try_collected(names, surveyed, examples, pipe)

        return Task(mutant, names, run)

    def tasks() -> Iterator[Task]:
        for mutant in mutants:
            names = within(seconds, naming(mutant, surveyed, words), surveyed, first=None)
            if names:
                yield child(mutant, sorted(names, key=lambda name: surveyed[name].cpu_s))
            else:
                on_outcome(Outcome(mutant, Fate.UNREACHED))

    for outcome in in_children(tasks(), jobs):
        on_outcome(outcome)


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
        ours, its = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.close(ours)
            _begin(folder)
            try:
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


def _allow(cpu_s: float, wall_s: float) -> None:
    """End this process after so much more time: of its own, or by the clock if it waits for ever."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + CPU_S + FACTOR * cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(WALL_S + FACTOR * wall_s))


def _say(pipe: int, fate: Fate, test: str = "") -> None:
    os.write(pipe, f"{fate}\t{test}".encode())
    os._exit(0)


Places = Mapping[tuple[str, str, int], Sequence[FunctionType]]


def functions_by_place() -> Places:
    """All functions of the package that exist: file, qualified name and first line -> functions."""
    here = str(Path.cwd() / "conserve") + os.sep
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    # `isinstance` would ask proxies, such as torch's of deprecated names, for their class.
    for function in (thing for thing in gc.get_objects() if type(thing) is FunctionType):
        code = function.__code__
        if code.co_filename.startswith(here):
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(function)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def put_in_place(mutant: Mutant, functions: Places) -> bool:
    """Replace the code of the mutant's function wherever it is used; False if that cannot be done."""
    path = Path.cwd() / mutant.path
    changed = compile(mutant.source(), str(path), "exec", dont_inherit=True)
    replaced = False
    for code in _codes(changed):
        qualname = code.co_qualname
        if qualname != mutant.function and not qualname.startswith(f"{mutant.function}.<locals>."):
            continue
        for function in functions.get((str(path), qualname, code.co_firstlineno), ()):
            if function.__code__.co_freevars != code.co_freevars:
                return False
            function.__code__ = code
            replaced = True
    return replaced


def _try_all(items: Sequence[pytest.Item], surveyed: Survey, pipe: int) -> None:
    def run(tests: Sequence[pytest.Item]) -> None:
        for item in tests:
            tested = surveyed[item.nodeid]
            _allow(tested.cpu_s, tested.seconds)
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
                _say(pipe, Fate.KILLED, item.nodeid)

    # Most mutants need few examples: all tests with those first, then the property tests with all of theirs.
    full = [(item, asked) for item in items if (asked := _examples(item)) and asked.max_examples > FEW]
    fewer_examples(items, FEW)
    run(items)
    for item, asked in full:
        _set_examples(item, asked)
    run([item for item, _ in full])
    _say(pipe, Fate.SURVIVED)


def _import_changed(mutant: Mutant) -> None:
    path = Path.cwd() / mutant.path
    changed = compile(mutant.source(), str(path), "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader
    usual = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        return changed if self.path == str(path) else usual(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign]


def _try_collected(names: Sequence[str], surveyed: Survey, examples: int, pipe: int) -> None:
    _allow(
        sum(surveyed[name].cpu_s for name in names) + 10, sum(surveyed[name].seconds for name in names) + 10
    )
    failed = pytest.main([*OPTIONS, "-x", *names], plugins=[FewerExamples(examples)])
    _say(pipe, Fate.KILLED if failed else Fate.SURVIVED, names[0] if failed and len(names) == 1 else "")
