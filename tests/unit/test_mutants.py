"""The mutation run: what it changes, and that a change is there wherever the code is used."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.mutants.mutations import Mutant, mutants_of
from tools.mutants.trial import functions_by_place, put_in_place


def mutants(folder: Path, source: str) -> list[Mutant]:
    path = folder / f"source{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    return mutants_of(str(path))


@pytest.mark.parametrize(
    ("source", "mutations"),
    [
        ("def f(a):\n    return a < 1\n", {"(a <= 1)", "(a >= 1)", "2"}),
        ("def f(a, b):\n    if a and not b:\n        g()\n", {"True", "False", "(not b)", "(a)", "(b)", "pass"}),
        ("def f(a):\n    while a.more:\n        a.take()\n", {"False", "pass"}),
        ("def f() -> bool:\n    return g()\n", {"return True", "return False"}),
        ("def f() -> list[int]:\n    return g(key=len)\n", {"return []", "g()"}),
        ("def f(a):\n    a.b += 0.5\n", {"pass", "a.b -= 0.5", "1.0"}),
        ("def f(a):\n    try:\n        g()\n    except ValueError:\n        h()\n", {"pass", "raise"}),
        ("LIMIT = 4\n", {"5"}),
        ("def f(a, b=4):\n    pass\n", {"5"}),
        ("@property\ndef f(a):\n    return max(a)\n", {"min"}),
        ('"""Text."""\n\n\ndef f(a: "int") -> None:\n    """Text."""\n    raise ValueError("text", f"{a + 1}")\n',
         {"pass", "return None"}),
    ],
)  # fmt: skip
def test_each_place_is_changed_in_its_ways(tmp_path: Path, source: str, mutations: set[str]) -> None:
    assert {mutant.text for mutant in mutants(tmp_path, source)} == mutations


def test_constants_that_are_given_together_are_looked_for_by_all_their_names(tmp_path: Path) -> None:
    for mutant in mutants(tmp_path, 'ON, OFF = "on", "off"\n'):
        assert mutant.names == {"ON", "OFF"}


def test_every_mutant_is_another_program() -> None:
    path = "conserve/engine/policy/conserve.py"
    programs = {mutant.source() for mutant in mutants_of(path)}
    assert len(programs) == len(mutants_of(path)) > 30
    for program in programs:
        compile(program, path, "exec")


SAMPLE = """
from contextlib import contextmanager
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Sample:
    at: int

    @property
    def next(self):
        return self.at + 1

    @classmethod
    def of(cls, at):
        return cls(at + 1)

    def up_to(self, end):
        yield from range(self.at, end + 1)

@contextmanager
def opened(at):
    yield at + 1

def inner(at):
    return (lambda: at + 1)()
"""


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # of whatever is imported by now
def test_a_mutant_is_where_its_function_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that imported the function have it too, as do decorators and functions within it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conserve" / "sample.py"
    path.parent.mkdir()
    path.write_text(SAMPLE)
    sample = loaded(path, monkeypatch)
    made, opened, inner = sample.Sample, sample.opened, sample.inner

    def seen() -> tuple[object, ...]:
        with opened(1) as value:
            return made(1).next, made.of(1).at, list(made(1).up_to(2)), value, inner(1)

    before = seen()
    places = functions_by_place()
    for mutant in mutants_of("conserve/sample.py"):
        if mutant.kind == "arithmetic":
            assert put_in_place(mutant, places)
    assert before == (2, 2, [1, 2], 2, 2)
    assert seen() == (0, 0, [], 0, 0)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("conserve_sample", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "conserve_sample", module)
    spec.loader.exec_module(module)
    return module
