"""The mutation run: what it changes, and that a change is there wherever the code is used."""

import gc
import importlib.util
import os
import signal
import stat
import sys
from pathlib import Path
from types import ModuleType

import coverage
import pytest

from tools.mutants import survey
from tools.mutants.__main__ import of_share, share
from tools.mutants.children import Fate, Task, in_children, say
from tools.mutants.mutations import Mutant, mutants_of
from tools.mutants.named import as_toml, key, named, stripped
from tools.mutants.trial import functions_by_place, put_in_place, within


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


def test_shares_that_do_not_overlap_have_no_mutant_in_common_and_are_all_together() -> None:
    everything = mutants_of("conserve/engine/policy/composer.py")
    parts = [of_share(everything, share(text)) for text in ("0.3", "0.3:0.36", "0.36:0.57", "0.57:1")]
    assert sorted((m for part in parts for m in part), key=everything.index) == everything
    for part, expected in zip(parts, (0.3, 0.06, 0.21, 0.43), strict=True):
        assert len(part) / len(everything) == pytest.approx(expected, abs=0.1)
    assert of_share(everything[:9], share("0.3")) == [m for m in parts[0] if m in everything[:9]]


@pytest.mark.parametrize("text", ["", "0", "1.5", "0.4:0.3", "0.3:0.3", "-0.1:0.3", "a", "0.1:0.2:0.3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        share(text)


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
    gc.freeze()
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


SAYS, ENDS, RAISES, TOO_LONG = "says that it survived", "ends", "raises", "is ended by its limit of time"


@pytest.mark.parametrize(
    ("mutated", "as_it_is", "fate"),
    [
        (SAYS, ENDS, Fate.SURVIVED),
        (ENDS, SAYS, Fate.KILLED),
        (RAISES, SAYS, Fate.KILLED),
        (ENDS, ENDS, Fate.UNKNOWN),
        (RAISES, ENDS, Fate.UNKNOWN),
        (TOO_LONG, ENDS, Fate.KILLED),
    ],
)
def test_a_child_without_a_result_kills_only_what_survives_without_the_mutant(
    tmp_path: Path, mutated: str, as_it_is: str, fate: Fate
) -> None:
    def run(pipe: int, *, changed: bool) -> None:
        way = mutated if changed else as_it_is
        if way == SAYS:
            os.write(pipe, b"survived\ttest")
        elif way == TOO_LONG:
            os.kill(os.getpid(), signal.SIGXCPU)
        elif way == RAISES:
            raise KeyboardInterrupt
        os._exit(0)

    mutant = mutants(tmp_path, "LIMIT = 4\n")[0]
    outcomes = list(in_children(iter([Task(mutant, ["test"], run), Task(mutant, ["test"], run)]), jobs=2))
    assert [outcome.fate for outcome in outcomes] == [fate, fate]


def test_lines_that_a_forked_child_runs_are_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sample.py"
    path.write_text("def first():\n    return 1\n\n\ndef second():\n    return 2\n")
    sample = loaded(path, monkeypatch)
    measured = coverage.Coverage(data_file=None, include=[f"{tmp_path}/*"], config_file=False, messages=False)
    with survey.forks_followed(measured, tmp_path) as of_forks:
        measured.start()
        for name in ("first", "second"):
            measured.switch_context(name)
            pid = os.fork()
            if not pid:
                getattr(sample, name)()
                os._exit(0)
            os.waitpid(pid, 0)
        measured.stop()
        assert sorted(of_forks()) == [("first", "sample.py", [2]), ("second", "sample.py", [6])]


def test_tests_that_run_no_line_of_the_package_are_surveyed() -> None:
    assert survey._run([]) == {}


def test_a_child_keeps_its_files_where_a_server_of_another_user_reaches_its_own(tmp_path: Path) -> None:
    (mutant, *_) = mutants(tmp_path, "def f(a):\n    return a < 1\n")

    def run(pipe: int, *, changed: bool) -> None:
        mode = Path(os.environ["PYTEST_DEBUG_TEMPROOT"]).stat().st_mode
        say(pipe, Fate.SURVIVED if mode & stat.S_IXOTH else Fate.KILLED)

    assert [found.fate for found in in_children(iter([Task(mutant, ["test"], run)]), jobs=1)] == [
        Fate.SURVIVED
    ]


def test_the_most_specific_tests_have_the_time_of_a_mutant() -> None:
    surveyed = {
        name: survey.Tested(
            passed=True, seconds=1.0, cpu_s=1.0, lines={"conserve/file.py": frozenset(range(lines))}
        )
        for name, lines in (("broad", 300), ("narrow", 10), ("middle", 20), ("last killer", 400))
    }
    assert within(2.5, list(surveyed), surveyed, first="last killer") == ["last killer", "narrow"]
    assert within(9, list(surveyed), surveyed, first=None) == ["narrow", "middle", "broad", "last killer"]
    assert within(0.1, list(surveyed), surveyed, first=None) == ["narrow"]


ENTRY = """
[["conserve/a.py"]]
function = "Queue.fresh"
before = "    if not left:"
after = "    if False:"
why = "the early return spares a query"
"""


def test_a_survivor_with_a_reason_is_known_wherever_its_lines_are(tmp_path: Path) -> None:
    (tmp_path / "store.toml").write_text(ENTRY)
    known = key("conserve/a.py", "Queue.fresh", "        if not left:", "        if False:")
    assert named(tmp_path) == {known: "the early return spares a query"}


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (ENTRY + ENTRY, "named twice"),
        (ENTRY.replace("the early return spares a query", " "), "why is empty"),
        (ENTRY.replace('function = "Queue.fresh"', ""), "has no function"),
    ],
)
def test_an_entry_that_is_not_whole_is_told(tmp_path: Path, entry: str, fault: str) -> None:
    (tmp_path / "store.toml").write_text(entry)
    with pytest.raises(SystemExit, match=fault):
        named(tmp_path)


def test_survivors_are_written_as_entries_to_fill_in(tmp_path: Path) -> None:
    survivor = key("conserve/a.py", "f", 'return "\\n" in text', "return True")
    file = tmp_path / "unnamed.toml"
    file.write_text(as_toml([(survivor, "line 3")]))
    with pytest.raises(SystemExit, match="why is empty"):
        named(tmp_path)
    file.write_text(file.read_text().replace('why = ""', 'why = "text"'))
    assert named(tmp_path) == {survivor: "text"}


def test_reasons_in_the_repository_are_whole_and_of_code_that_there_is() -> None:
    for path, function, before, _ in named():
        source = Path(path).read_text()
        assert stripped(before) in stripped(source), f"{path}, {function}: {before!r} is not there any more"
