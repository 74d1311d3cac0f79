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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from tools.mutants.children import Fate, Outcome, Task, allow, in_children, say
from tools.mutants.mutations import Mutant
from tools.mutants.survey import Survey, survey

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
                    say(pipe, Fate.ELSEWHERE)
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


Places = Mapping[tuple[str, str, int], Sequence[FunctionType]]


def functions_by_place() -> Places:
    """All functions of the package that exist: file, qualified name and first line -> functions."""
    here = str(Path.cwd() / "conserve") + os.sep
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    gc.unfreeze()  # frozen objects are not listed, and the tests' set-up freezes what has been imported
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
            allow(tested.cpu_s, tested.seconds)
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
                say(pipe, Fate.KILLED, item.nodeid)

    # Most mutants need few examples: all tests with those first, then the property tests with all of theirs.
    full = [(item, asked) for item in items if (asked := _examples(item)) and asked.max_examples > FEW]
    fewer_examples(items, FEW)
    run(items)
    for item, asked in full:
        _set_examples(item, asked)
    run([item for item, _ in full])
    say(pipe, Fate.SURVIVED)


def _import_changed(mutant: Mutant) -> None:
    path = Path.cwd() / mutant.path
    changed = compile(mutant.source(), str(path), "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader
    usual = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        return changed if self.path == str(path) else usual(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign]


def _try_collected(names: Sequence[str], surveyed: Survey, examples: int, pipe: int) -> None:
    allow(
        sum(surveyed[name].cpu_s for name in names) + 10, sum(surveyed[name].seconds for name in names) + 10
    )
    failed = pytest.main([*OPTIONS, "-x", *names], plugins=[FewerExamples(examples)])
    say(pipe, Fate.KILLED if failed else Fate.SURVIVED, names[0] if failed and len(names) == 1 else "")
