"""Workers of a run of the tests: which takes what, and what they rewrite once together."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler import loadscope

from tests import distribution, shared_imports
from tests.distribution import Together

ENGINE, PLAIN, COMMAND = (
    "tests/integration/test_lora.py::TestLora::test_a",
    "tests/unit/test_words.py::test_b",
    "tests/unit/test_cli.py::test_c",
)


class FakeNode:
    """A worker that is told of tests by their number."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.told: list[int] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.told += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Together, list[FakeNode]]]:
    """Two workers and the tests that each kind has so many of."""

    def scheduled(each: int) -> tuple[Together, list[FakeNode]]:
        monkeypatch.setattr(loadscope, "parse_tx_spec_config", lambda config: ["popen", "popen"])
        kinds = {ENGINE: "engine", PLAIN: "plain", COMMAND: "command"}
        modules = {name.partition("::")[0]: kind for name, kind in kinds.items()}
        monkeypatch.setattr(distribution, "kind_of_module", modules.__getitem__)
        option = SimpleNamespace(loadscopereorder=False, verbose=0)
        config: Any = SimpleNamespace(option=option, getvalue=lambda name: ["popen"])
        made, nodes = Together(config, None), [FakeNode("gw0"), FakeNode("gw1")]
        tests = [f"{name}[{n}]" for name in (COMMAND, PLAIN) for n in range(each)]
        for node in nodes:
            made.add_node(node)
            made.add_node_collection(node, [*tests, *(f"{ENGINE}[{n}]" for n in range(each))])
        made.schedule()
        return made, nodes

    return scheduled


def test_one_worker_begins_with_engines_and_the_other_with_commands(
    scheduled: Callable[..., tuple[Together, list[FakeNode]]],
) -> None:
    each = 20
    made, nodes = scheduled(each)
    done: list[list[int]] = [[], []]
    while any(node.told for node in nodes):
        for node, its in zip(nodes, done, strict=True):
            if node.told:
                its.append(node.told.pop(0))
                made.mark_test_complete(node, its[-1])
                assert len(made.assigned_work[node]) <= 4, "what is done is counted no more"
    engines, commands = range(2 * each, 3 * each), range(each)
    assert done[0][:each] == [*engines], "one class, so all at once"
    assert done[1][:each] == [*commands]
    assert sorted(done[0] + done[1]) == [*range(3 * each)]
    assert made.tests_finished
    assert all(node.shutting_down for node in nodes)


@pytest.mark.parametrize(("worker", "imported"), [("gw0", {"test_a", "test_c"}), ("gw1", {"test_b"})])
def test_each_worker_imports_its_share_of_the_modules_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, imported: set[str]
) -> None:
    names: list[str] = []
    for name, text in (
        ("test_a", ""),
        ("test_b", "raise OSError"),
        ("test_c", "import pytest; pytest.skip()"),
    ):
        path = tmp_path / "some" / "unit" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    monkeypatch.syspath_prepend(tmp_path)
    bring = shared_imports.importlib.import_module

    def noting(name: str) -> object:
        names.append(name)
        return bring(name)

    monkeypatch.setattr(shared_imports, "importlib", SimpleNamespace(import_module=noting))
    for asked in (["some"], ["some/unit/test_a.py"]):
        config: Any = SimpleNamespace(args=asked, getini={"testpaths": ["some"]}.get, rootpath=tmp_path)
        shared_imports.import_share(config)
    assert names == [f"some.unit.{name}" for name in sorted(imported)], "and none where modules are named"


def test_rewritten_modules_are_kept_while_they_are_collected_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (True, False):
        monkeypatch.setattr(shared_imports.sys, "dont_write_bytecode", before)
        with shared_imports.kept():
            assert not shared_imports.sys.dont_write_bytecode
        assert shared_imports.sys.dont_write_bytecode is before


def test_modules_that_start_processes_of_vllms_take_turns_and_unit_tests_do_not() -> None:
    integration = Path("tests/integration")
    names = {path.stem for path in (distribution.REPOSITORY / integration).glob("test_*.py")}
    servers = {name for name in names if distribution.starts_servers(integration / f"{name}.py")}
    assert servers >= {"test_serve", "test_served_modes", "test_pipeline", "test_embedded_engine"}
    assert not servers & {"test_modes", "test_checkpoints", "test_scheduler"}
    assert not distribution.starts_servers(Path("tests/unit/test_serve.py"))
