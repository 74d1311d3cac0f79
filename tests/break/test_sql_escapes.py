"""`conserve sql` reads its views and the files it was given, writes nothing, and changes no setting."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.errors import ConserveError
from conserve.jobs.requests.wording import Tasks
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.sql import child, query, scratch
from conserve.store.sql.batches import rows_of
from conserve.store.sql.bounds import Bounds
from conserve.store.sql.child import Send
from conserve.store.sql.named_files import named_file
from conserve.store.sql.snapshot import Snapshot, snapshot
from conserve.units import MIB
from tests.conftest import WriteInput
from tests.store_rows import finish, leased
from tests.submitting import submit

from .statements import Function, Generator, known
from .table import report
from .watch import Watch

PER_ROUND = 500
SECRET = "no query may read this"
BOUNDS = Bounds(threads=2, memory_bytes=512 * MIB, disk_bytes=64 * MIB)
SETTINGS = "select name, value from duckdb_settings() order by name"

pytestmark = pytest.mark.breakage


@dataclass(frozen=True)
class Place:
    """A store with two jobs, files that were given to the query, and files beside that were not."""

    taken: Snapshot
    given: Path
    outside: Path

    @property
    def targets(self) -> list[Path]:
        """Files that no statement may reach."""
        return [path for folder in (self.outside, self.given.parent) for path in secrets(folder)]


def secrets(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("secret"))


@pytest.fixture
def place(store: Store, write_input: WriteInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in ("one", "two"):
        submit(
            store,
            str(write_input(f"{name}.parquet", q=["a", "b"])),
            Task(kind=Kind.PROMPT, template="{{ q }}"),
        )
        finish(store, leased(store), of=[0])
    outside = tmp_path / "outside"
    for folder in (outside, tmp_path / "given", outside / ".duckdb" / "stored_secrets", outside / ".aws"):
        folder.mkdir(parents=True)
    for folder in (outside, tmp_path / "given"):
        (folder / "secret.txt").write_text(SECRET)
        (folder / "secret.csv").write_text(f"a,b\n{SECRET},1\n")
        (folder / "secret.json").write_text(json.dumps({"a": SECRET}) + "\n")
        pq.write_table(pa.table({"a": [SECRET]}), folder / "secret.parquet")
    with duckdb.connect(str(outside / "secret.db")) as database:
        database.execute(f"create table t as select '{SECRET}' as a")
    (outside / ".duckdbrc").write_text(f"select '{SECRET}'")
    (outside / ".aws" / "credentials").write_text(SECRET)
    given = tmp_path / "given" / "given.csv"
    given.write_text("a,b\nx,1\n")
    (given.parent / "secret-link.csv").symlink_to(outside / "secret.csv")
    monkeypatch.setenv("HOME", str(outside))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(given.parent)
    return Place(snapshot(store, now=0.0), given, outside)


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, and what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def functions() -> list[Function]:
    """DuckDB's table functions and others that take text, as its catalogue has them."""
    with duckdb.connect(":memory:") as duck:
        rows = duck.execute(
            "select distinct function_name, parameters, parameter_types::varchar[], function_type <> 'scalar' "
            "from duckdb_functions() where function_type in ('table', 'pragma', 'table_macro') "
            "or (function_type = 'scalar' and list_contains(parameter_types::varchar[], 'VARCHAR')) order by all"
        ).fetchall()
    return [
        Function(name, parameters, [str(kind) for kind in kinds], rows)
        for name, parameters, kinds, rows in rows
    ]


class Found:
    """Result of a batch of statements."""

    def __init__(self) -> None:
        self.escapes: list[str] = []
        self.crashes: list[str] = []
        self.answered = 0
        self.tried = 0


def run(place: Place, statements: Sequence[str]) -> Found:
    """Put statements to sealed views one after the other, as `conserve sql` does; a crash costs one of them."""
    found = Found()
    rest = list(statements)
    folders = [place.outside, *(path for path in place.outside.rglob("*") if path.is_dir())]
    with scratch.place() as spill:
        watch = Watch(folders)
        while rest:
            done = batch(place, spill, rest, watch, found)
            found.tried += done
            rest = rest[done:]
        found.escapes += [str(seen) for seen in watch.seen()]
        watch.close()
    return found


def batch(place: Place, spill: Path, statements: Sequence[str], watch: Watch, found: Found) -> int:
    """Run statements in one process until it ends; returns how many that were."""
    done = 0
    try:
        with child.working(
            lambda send: attempt(place, spill, statements, send), memory_bytes=1024 * MIB
        ) as frames:
            for frame in frames:
                if frame.kind == b"!":
                    found.escapes.append(frame.payload.decode())
                    continue
                done += 1
                found.answered += frame.kind == b"A"
                found.escapes += [f"{seen} by {statements[done - 1]} or the next" for seen in watch.seen()]
    except child.Died as death:  # the statement brought its process down, and nothing else
        if "exit code" in str(death):
            raise
        found.crashes.append(statements[done])
        done += 1
    return done


def attempt(place: Place, spill: Path, statements: Sequence[str], send: Send) -> None:
    """Run statements in this process; says of each whether it was answered or refused, and what it reached."""
    named = (named_file(f"given={place.given}"),)
    wording = Tasks(place.taken.catalog)
    with query.opened(place.taken, spill=spill, bounds=BOUNDS, wording=wording, named=named) as views:
        duck = views.duck
        before = duck.execute(SETTINGS).fetchall()
        for number, statement in enumerate(statements):
            try:
                rows = str(list(rows_of(query.ask(duck, statement, limit=20)).tuples()))
                answered = True
            except (ConserveError, duckdb.Error, MemoryError, OSError, pa.ArrowException) as error:
                rows, answered = str(error), False
            if SECRET in rows:
                send(b"!", f"{statement} read {rows[:200]}".encode())
            if answered or number % 20 == 0:
                after = duck.execute(SETTINGS).fetchall()
                if after != before:
                    send(b"!", f"{statement} or one before changed {set(after) - set(before)}".encode())
                    before = after
            send(b"A" if answered else b"R", b"")
        if duck.execute(SETTINGS).fetchall() != before:
            send(b"!", b"one of the last statements changed a setting")


def test_no_known_way_out_is_open(place: Place, tmp_path: Path) -> None:
    before = tree(tmp_path)
    statements = list(known(place.targets[:3]))
    found = run(place, statements)
    assert found.escapes == []
    assert tree(tmp_path) == before
    report("SQL: known ways out of the sandbox", tried=found.tried, lost=0, doubled=0)


def test_no_generated_statement_gets_out(place: Place, tmp_path: Path, rounds: int, seed: int) -> None:
    before = tree(tmp_path)
    catalogue = functions()
    for number in range(seed, seed + rounds):
        statements = list(Generator(number, place.targets, catalogue).statements(PER_ROUND))
        found = run(place, statements)
        assert found.escapes == []
        assert found.tried == PER_ROUND
        assert tree(tmp_path) == before
        report("SQL: generated statements", tried=found.tried, lost=0, doubled=0)


def test_what_is_allowed_is_answered_all_the_while(place: Place) -> None:
    """Otherwise the statements above could all fail for another reason."""
    allowed = [
        "from jobs", "from results", "from inputs", "from requests", "from given", "summarize given",
        "describe given", "pivot given on a using sum(b)", f"from read_csv('{place.given}')",
        "select body, prompt from requests", "from query('from results')", "from query_table('jobs')",
        "with t as (from given) from t join inputs on true", f"from '{place.given}'", "from duckdb_settings()",
    ]  # fmt: skip
    random.Random(1).shuffle(allowed)
    found = run(place, allowed)
    assert (found.answered, found.escapes) == (len(allowed), [])


def test_the_watch_sees_a_file_that_is_read(place: Place) -> None:
    watch = Watch([place.outside])
    (place.outside / "secret.csv").read_text()
    assert place.outside / "secret.csv" in [seen.path for seen in watch.seen()]
    watch.close()
