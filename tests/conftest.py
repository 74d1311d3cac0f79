"""Every test gets an environment of its own; the stores and inputs that most of them need; where the time goes."""

import functools
import gc
import importlib
import os
import shutil
import signal
import sqlite3
import ssl
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.api import servers
from conserve.config import Settings, load
from conserve.store.database.migrations import STORE_ID
from conserve.store.database.store import Store
from conserve.store.files.place import place_of
from tests import commands, postgres, reach, shared_imports
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked, Forks
from tests.distribution import KINDS, Together, kind_of, starts_servers
from tests.held_port import held_port
from tests.tiers import in_full

StartForked = Callable[..., Forked]
THAWED = {"tests.acceptance.forks:thawed": ""}

ON_BOTH = frozenset(
    {
        *(
            "test_away",
            "test_catalog",
            "test_choice",
            "test_hooks",
            "test_journal",
            "test_ledger",
            "test_losses",
            "test_models",
            "test_polls",
        ),
        *("test_queue", "test_removal", "test_shards", "test_spans", "test_views"),
    }
)
"""Modules whose tests with a store run on SQLite and on PostgreSQL."""

ON_POSTGRESQL_IN_FULL = frozenset({"test_models", "test_views"})
"""Those of them that run on PostgreSQL before a release alone: their statements are those of the others."""

# A library of vLLM's API server sets the level of the root logger, and of pytest's handler, to this or to ERROR.
os.environ["SAGEMAKER_CONTAINER_LOG_LEVEL"] = "WARNING"
os.environ["CONSERVE_FORK_SERVER"] = "keep"  # engines of one process import vLLM once

MEMORY = Path("/dev/shm")
NEEDED = 4 << 30  # bytes; the files of all tests together take a quarter, of which those of failed ones stay

# Databases sync at every commit, and the tests make tens of thousands: a slow disk would take most of the time.
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= NEEDED:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Each HTTP client reads the machine's certificates, for 20 ms. Tests that trust others have files of their own.
ssl.create_default_context = functools.cache(ssl.create_default_context)

COUNT_FROZEN = gc.get_freeze_count  # which takes 40 ms where as much is imported as in the tests

# Of the examples that a property names, a run of minutes tries a quarter and one before a release twice as many.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("local", deadline=None, max_examples=25)
hypothesis.settings.register_profile("full", deadline=None, max_examples=200, print_blob=True)
# For mutation runs: the first failure is enough, and a slow test is none.
hypothesis.settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    suppress_health_check=tuple(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """Hand tests to workers in these groups, whatever `--dist` says."""
    return Together(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Rounds and seed of the tests in `tests/break`."""
    group = parser.getgroup("breakage")
    group.addoption("--break-rounds", type=int, default=os.environ.get("BREAK_ROUNDS", 1))
    group.addoption("--break-seed", type=int, default=os.environ.get("BREAK_SEED", 1))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of the store on both databases."""
    both = metafunc.module.__name__.rpartition(".")[2] in ON_BOTH and "store" in metafunc.fixturenames
    if both and not metafunc.definition.get_closest_marker("sqlite"):
        in_minutes = metafunc.module.__name__.rpartition(".")[2] not in ON_POSTGRESQL_IN_FULL
        shared = ["postgresql"] if in_minutes else in_full("postgresql")
        metafunc.parametrize("database", ["sqlite", *shared], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start vLLM's processes, and let those that fork come first."""
    items.sort(key=lambda item: -KINDS.index(kind_of(item.nodeid)))
    for item in items:
        if starts_servers(item.path):
            item.add_marker(pytest.mark.server)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, which make next to none; rewrite each of them once."""
    gc.disable()
    try:
        with shared_imports.kept():
            shared_imports.import_share(session.config)
            return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what is imported out of collections: with vLLM in the process each would take half a second."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # each harvester asks


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many seconds each folder of tests took, all processes together."""
    importlib.import_module("tests.break.table").summarise(terminalreporter)  # `break` is a keyword
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (report for of in terminalreporter.stats.values() for report in of):
        if isinstance(report, pytest.TestReport):
            folder = report.nodeid.partition("::")[0].rpartition("/")[0]
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        for folder, total in seconds.most_common():
            terminalreporter.write_line(f"{folder:<20} {tests[folder]:>6,} tests {total:>8,.1f} s")


def examples(number: int) -> int:
    """Number of examples: `number` where the profile has Hypothesis's hundred, else as large a share of it."""
    return number * hypothesis.settings.default.max_examples // 100


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Fail a test whose guarded assertions were hardly ever reached."""
    reach.begin()
    yield
    seldom = reach.seldom_reached()
    assert not seldom, f"hardly ever reached: {'; '.join(seldom)}"


def own_environment(patch: pytest.MonkeyPatch, home: Path) -> None:
    """No setting of the developer's reaches a test, or what those of a module share: the store is at this place."""
    for name in [name for name in os.environ if name.startswith("CONSERVE_")]:
        patch.delenv(name)
    patch.setenv("CONSERVE_FAKE", "1")
    patch.setenv("CONSERVE_HOME", str(home))
    patch.setenv("XDG_CONFIG_HOME", str(home.parent / "config"))


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's reaches a test."""
    own_environment(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("CONSERVE_FORK_SERVER", "keep")
    monkeypatch.setenv("CONSERVE_MODELS", str(tmp_path / "models"))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines of a recording are waited for however long they take to be written."""
    monkeypatch.setattr("conserve.engine.runtime.recording.CLOSE_S", commands.HANGS_S)


@pytest.fixture
def slow_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are asked about themselves have far longer to answer than a slow machine needs."""
    monkeypatch.setitem(servers.ask.__kwdefaults__, "seconds", commands.HANGS_S)
    monkeypatch.setattr("conserve.cli.top.ANSWER_S", commands.HANGS_S)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other process is given, for a server of the test."""
    with held_port() as number:
        yield number


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Processes end with the test that started them."""
    yield
    commands.end_all()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that commands are forked off. Their clocks can be set (`tests/break/clocks.py`)."""
    with closing(Forks(first=["tests.break.clocks:install"])) as opened:
        yield opened


@pytest.fixture
def forked(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartForked]:
    """Starts a command in a process of its own that need not import it, where the imports are not the point.

    With `thawed` its stderr ends without complaints of DuckDB's, for a tenth of a second.
    """
    folder, running = tmp_path_factory.mktemp("forked"), list[Forked]()

    def start(
        *arguments: str,
        shots: Sequence[Shot] = (),
        also: Mapping[str, str] | None = None,
        constants: Mapping[str, float] | None = None,
        output: Path | None = None,
        source: Path | None = None,
        thawed: bool = False,
        **variables: str,
    ) -> Forked:
        number = len(running)
        started = forks.start(
            aimed.command(
                shots, *arguments, also={**(THAWED if thawed else {}), **(also or {})}, **(constants or {})
            ),
            env={**os.environ, **variables},
            errors=folder / f"errors-{number}",
            output=output or folder / f"output-{number}",
            source=source,
        )
        running.append(started)
        return started

    yield start
    for one in running:
        one.send_signal(signal.SIGKILL)
        one.communicate()


@pytest.fixture(scope="session")
def databases() -> Iterator[postgres.Databases]:
    """Databases of a PostgreSQL server that runs for this process of the tests."""
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.databases() as found:
        yield found


@pytest.fixture
def database(
    request: pytest.FixtureRequest, clean_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Kind of the store's database, which is empty."""
    kind = getattr(request, "param", "sqlite")
    if kind == "sqlite":
        yield kind
        return
    monkeypatch.setenv("CONSERVE_STORE", request.getfixturevalue("databases").emptied())
    yield kind


@pytest.fixture
def settings(database: str) -> Settings:
    return load()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SQLite database of a store without jobs."""
    settings = load({"home": tmp_path_factory.mktemp("empty")}, environ={})
    Store.open(settings).close()
    assert settings.sqlite_file is not None
    return settings.sqlite_file


def put_empty(empty: Path, to: Path) -> None:
    """Copy the database of a store, which gets an id of its own: a third of the time that making one takes."""
    place_of(to.parent).make_with_parents()
    shutil.copyfile(empty, to)
    with closing(sqlite3.connect(to, isolation_level=None)) as database:
        database.execute(f"update meta set value = ? where key = '{STORE_ID}'", (uuid.uuid4().hex,))


@pytest.fixture
def store(settings: Settings, empty_database: Path) -> Iterator[Store]:
    path = settings.sqlite_file
    if path is not None and not path.exists():
        put_empty(empty_database, path)
    opened = Store.open(settings)
    yield opened
    opened.close()


WriteInput = Callable[..., Path]


@pytest.fixture
def write_input(tmp_path: Path) -> WriteInput:
    """Writes columns as a Parquet file."""

    def write(name: str = "input.parquet", **columns: Sequence[Any]) -> Path:
        path = tmp_path / name
        pq.write_table(pa.table(dict(columns)), path)
        return path

    return write
