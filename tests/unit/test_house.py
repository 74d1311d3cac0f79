"""The house stands as docs/explanation/house.md says: what loads what, what ships, how a store comes to be."""

import ast
import functools
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import inspect, text

from conserve.config import Settings
from conserve.errors import StoreTooNew
from conserve.jobs.task import Kind, Task
from conserve.store.books.readings import read_jobs
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from tests.class_index import statements
from tests.conftest import WriteInput
from tests.submitting import submit

REPOSITORY = Path(__file__).parents[2]
ENGINE = {"torch", "vllm", "transformers"}
DATA = {"duckdb", "pyarrow", "sqlalchemy"}
OTHERS = {"httpx", "jinja2", "rich"}
SLOW = {"typer", "pydantic", "asyncio", "msgspec", "psutil", "platformdirs", "tomllib", "difflib", "numpy"}
RUN = "from conserve.__main__ import main\ntry: main()\nexcept SystemExit: pass"
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
LOADS_NOTHING = (
    "from conserve.engine.vllm.launching import loading; loading.WORDS = ('-c', 'raise SystemExit(1)')"
)


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after running this code."""
    listing = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{listing}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import conserve",
            ENGINE | DATA | OTHERS | SLOW | {"dataclasses", "pathlib", "json", "sqlite3"},
        ),
        ("import conserve; conserve.Store, conserve.Engine, conserve.map", ENGINE | DATA | OTHERS),
        ("import conserve.cli.app", ENGINE | DATA | OTHERS),
        (
            f"import sys; sys.argv[1:] = ['--help']\n{RUN}",
            ENGINE | DATA | OTHERS | SLOW | {"dataclasses", "pathlib", "json", "sqlite3"},
        ),
        (
            f"import sys; sys.argv[1:] = ['status']\n{RUN}",
            ENGINE | DATA | OTHERS | SLOW | {"http", "ssl"},
        ),
        (
            f"import sys; sys.argv[1:] = ['jobs']\n{RUN}",
            ENGINE | DATA | OTHERS | {"msgspec", "psutil"},
        ),
        (
            f"import sys; sys.argv[1:] = ['doctor']\n{LOADS_NOTHING}\n{RUN}",
            ENGINE | {"duckdb"},
        ),
        ("import conserve.engine.vllm.embedded", ENGINE | DATA),
        ("import conserve.jobs.harvest.harvester", ENGINE),
        ("import conserve.bench.load", ENGINE | {"duckdb", "sqlalchemy"}),
        ("import conserve.engine.policy.policies", ENGINE | DATA | OTHERS),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str, heavy: set[str], store: Store) -> None:
    assert loaded_by(code) & heavy == set()


def test_a_run_says_its_first_word_before_anything_slow_is_imported(
    store: Store, write_input: WriteInput
) -> None:
    submit(store, str(write_input(q=["a"])), Task(kind=Kind.PROMPT, template="{{ q }}"))
    run = (
        "from conserve.cli import output, run\n"
        "from conserve.config import load\n"
        "def leave(message): assert message.startswith('starting '); raise SystemExit\n"
        "output.say = leave\n"
        "try: run.drain(load(), [], [], run.ProfileFlags(), as_json=False); raise AssertionError\n"
        "except SystemExit: pass"
    )
    assert loaded_by(run) & (ENGINE | DATA | OTHERS | {"numpy", "scipy", "msgspec"}) == set()


def test_the_migrations_arrive_at_the_schema(store: Store) -> None:
    found = inspect(store.engine)
    assert set(found.get_table_names()) == set(schema.metadata.tables)
    for name, table in schema.metadata.tables.items():
        assert {column["name"] for column in found.get_columns(name)} == set(table.columns.keys())
        assert {index["name"] for index in found.get_indexes(name)} == {index.name for index in table.indexes}
    with store.read() as tx:
        assert tx.scalar(text("select value from meta where key = 'version'")) == str(LATEST)


def test_a_store_is_opened_again_without_change(store: Store, settings: Settings) -> None:
    again = Store.open(settings)
    with again.read() as tx:
        assert tx.scalar(text("select count(*) from meta")) == 2
    again.close()


def test_a_store_of_the_future_is_refused(store: Store, settings: Settings) -> None:
    with store.write() as tx:
        tx.execute(
            text("update meta set value = :version where key = 'version'"), {"version": str(LATEST + 1)}
        )
    with pytest.raises(StoreTooNew):
        Store.open(settings)
    with pytest.raises(StoreTooNew):
        read_jobs(settings, now=0.0)


def test_a_wheel_built_from_the_sdist_is_whole(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        top = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert not top & {"cli", "jobs", "store", "profiles"}
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for kind in ("*.py", "*.html", "derived/*.json", "py.typed"):
        ours = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "conserve").rglob(kind)}
        assert ours
        assert ours <= {path.relative_to(site) for path in site.rglob(kind)}
    command = [
        sys.executable,
        "-c",
        "import runpy; runpy.run_module('conserve', run_name='__main__')",
        "--version",
    ]
    done = subprocess.run(
        command, cwd=site, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("conserve ")


HOUSE = REPOSITORY / "docs" / "explanation" / "house.md"


def drawn_rooms(folder: str) -> dict[str, int]:
    """Rooms of `folder` in the drawing of the house, each with its line."""
    lines = HOUSE.read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("    conserve/")) + 1
    path: list[tuple[int, str]] = []
    rooms: dict[str, int] = {}
    for place, line in enumerate(lines[start:], start):
        if not line.strip():
            break
        depth, names = len(line) - len(line.lstrip()), re.split(r"\s{2,}", line.strip())[0]
        path = [(above, name) for above, name in path if above < depth]
        if "/".join(name for _, name in path) == folder:
            rooms |= {name.removesuffix("/"): place for name in names.split(", ")}
        path.append((depth, names.removesuffix("/")))
    return rooms


class ReadModule(NamedTuple):
    """Facts of a module, which is parsed once for all tests."""

    lines: int
    classes: list[str]
    functions: dict[str, int]  # the longest of each name, in lines
    imported: list[str]  # names with their modules


@functools.cache
def read(module: Path) -> ReadModule:
    text = module.read_text()
    facts = ReadModule(text.count("\n"), [], {}, [])
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            facts.classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.body[0].lineno
            facts.functions[node.name] = max(length, facts.functions.get(node.name, 0))
        elif isinstance(node, ast.ImportFrom):
            facts.imported.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return facts


def imported_rooms(folder: str) -> set[tuple[str, str]]:
    """Pairs of rooms of `folder`: one that imports, and one that it imports."""
    place = REPOSITORY / "conserve" / folder
    prefix = f"conserve.{folder.replace('/', '.')}."
    pairs = set()
    for module in place.rglob("*.py"):
        room = module.relative_to(place).parts[0].removesuffix(".py")
        targets = [name.removeprefix(prefix) for name in read(module).imported if name.startswith(prefix)]
        pairs |= {(room, target.partition(".")[0]) for target in targets}
    return {(above, below) for above, below in pairs if above != below}


@pytest.mark.parametrize("folder", ["jobs", "store", "engine/vllm"])
def test_a_room_imports_only_rooms_that_are_drawn_below_it(folder: str) -> None:
    drawn = drawn_rooms(folder)
    there = {path.stem for path in (REPOSITORY / "conserve" / folder).iterdir() if path.name[0] != "_"}
    assert drawn.keys() == there
    pairs = {(above, below) for above, below in imported_rooms(folder) if below in drawn}
    assert pairs
    assert {(above, below) for above, below in pairs if drawn[above] >= drawn[below]} == set()


def test_a_class_has_a_name_of_its_own() -> None:
    """`Store` alone stands twice: the handle that users have, and the open database behind it."""
    homes: dict[str, list[Path]] = {}
    for module in (REPOSITORY / "conserve").rglob("*.py"):
        for name in read(module).classes:
            homes.setdefault(name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1}.keys() == {"Store"}


def test_modules_and_functions_are_short_enough_to_be_read() -> None:
    """Signatures do not count: that of a command declares its flags. Test modules do not either: they are read test
    by test."""
    for folder in ("conserve", "tools"):
        for module in (REPOSITORY / folder).rglob("*.py"):
            assert read(module).lines < MOST_LINES, module
            for name, lines in read(module).functions.items():
                assert lines < MOST_FUNCTION_LINES, (module, name)


VLLMS = {"scheduler", "request", "manager"}  # names of vLLM's objects in the scheduler's half
OURS = {"restores_pause", "row_terms", "batches", "checkpoints", "arrival_monitor"}  # that it has of ours
CHANGES = {
    "add",
    "remove",
    "discard",
    "free",
    "sort",
    "touch",
    "free_blocks",
    "add_request",
    "remove_requests",
}
CHANGES |= {"cache_blocks", "_preempt_request", "_handle_blocked_waiting_request"}


def writes_into_vllm(module: Path) -> bool:
    """True if the module sets an attribute of vLLM's scheduler or requests, or calls what changes them."""
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        path = ast.unparse(node).split(".")
        if path[0] in VLLMS and not isinstance(node.ctx, ast.Load) and path[1] not in OURS:
            return True
        whose = path[0] in VLLMS or path[:2] == ["self", "_device"]
        if node.attr == "_handle_blocked_waiting_request" or (whose and node.attr in CHANGES):
            return True
    return False


def test_the_page_names_every_module_that_writes_into_vllms_scheduler() -> None:
    engine = REPOSITORY / "conserve" / "engine" / "vllm"
    modules = [
        one for room in ("scheduling", "preemption", "checkpoint") for one in (engine / room).glob("*.py")
    ]
    writing = {module.stem for module in modules if writes_into_vllm(module)}
    page = (REPOSITORY / "docs" / "explanation" / "co-serving.md").read_text()
    steps = page.partition("## What a policy sees")[2].partition("Equal views")[0]
    named = {words.rpartition("/")[2] for words in steps.split("`")[1::2]}
    assert writing == named
    assert len(named) == 3
