"""Python code of the documentation runs: the tutorial's examples, the typed example, the notebook's cells."""

import ast
import asyncio
import doctest
import inspect
import json
import os
import re
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import conserve

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "examples" / "from-python.ipynb"
KERNEL = {"nbclient", "nbformat", "ipykernel"}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONSERVE_ENDPOINT", "fake:?tokens=4")


def test_the_examples_of_the_tutorial_run() -> None:
    page = REPOSITORY / "docs" / "tutorials" / "python.md"
    blocks = re.findall(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("".join(blocks), {}, page.name, str(page), 0)
    assert len(examples.examples) >= 25
    said: list[str] = []
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL * 0
    runner = doctest.DocTestRunner(optionflags=options)
    outcome = runner.run(examples, out=said.append)
    assert outcome.failed == 0, "".join(said)


def test_the_typed_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_file_location("typed", REPOSITORY / "examples" / "typed.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert "2 of 2 answered" in capsys.readouterr().out


def cells() -> list[str]:
    return [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def executed(cell: str, names: dict[str, Any]) -> None:
    """Run a cell as a kernel does, with awaits at its top level."""
    code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(code, names)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)


def test_the_cells_of_the_notebook_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    others = conserve.open().submit([{"q": "of another"}], prompt="{{ q }}", name="gsm8k")
    for _ in range(2):
        names: dict[str, Any] = {"__name__": "__main__"}
        for cell in cells():
            executed(cell, names)
        assert names["answers"].num_rows == 20
    assert others.progress().done == 0, "a job of that name is not the notebook's"
    assert len(conserve.open().jobs(tags={"notebook": "gsm8k"})) == 1


@pytest.mark.full
@pytest.mark.skipif(not all(map(find_spec, KERNEL)), reason="there is no kernel: make test-notebook")
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "20 of 20 rows done" in shown
    assert "Traceback" not in shown


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell["cell_type"] != "code" or (cell["outputs"] == [] and cell["execution_count"] is None)
