"""`conserve check` finds what is damaged and names the job; `--repair` recovers what the rest allows."""

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow.parquet as pq
import pytest

from conserve.cli.check import mend_jobs
from conserve.config import Settings, load
from conserve.engine.runtime import spill_file
from conserve.errors import StoreDamaged
from conserve.jobs.requests.file import RequestFile
from conserve.jobs.task import Kind, Task
from conserve.owners import this_process
from conserve.store.books import catalog, shards
from conserve.store.books.saved_tokens import SavedTokens, save_tokens
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database import connection
from conserve.store.database.store import Store
from conserve.store.files import digests, layout, marks, trash
from conserve.store.files.place import place_of
from conserve.store.upkeep import checking
from conserve.store.upkeep.damage import StorePart, damaged, unreadable
from tests.commands import Done, conserve
from tests.conftest import own_environment
from tests.store_rows import add_job, finish, job, leased, select, while_writing
from tests.submitting import submit as submit_job
from tests.tiers import in_full, named

ROWS = 40


def submitted(folder: Path, name: str = "one", rows: int = ROWS, **options: str) -> str:
    """Submit JSON lines, of which every tenth will fail; returns the job's id."""
    path = folder / f"{name}.jsonl"
    lines = [{"q": f"{name} {n}" + (" REJECT" if n % 10 == 3 else ""), "n": n} for n in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [word for option in options.items() for word in (f"--{option[0]}", option[1])]
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., str]:
    """Submits a job; returns its id."""
    return lambda *arguments, **named: submitted(tmp_path, *arguments, **named)


@contextlib.contextmanager
def at_home_in(folder: Path) -> Iterator[Settings]:
    """Settings of a home in the folder, which commands have too; for what is prepared once."""
    with pytest.MonkeyPatch.context() as patch:
        own_environment(patch, folder / "home")
        yield load()


@contextlib.contextmanager
def copied(prepared: Path, settings: Settings) -> Iterator[Store]:
    """Open a copy of a home that was prepared, which commands have too."""
    shutil.copytree(prepared, settings.home)
    with contextlib.closing(Store.open(settings)) as store:
        yield store


@pytest.fixture(scope="module")
def home_with_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home with two jobs that were computed."""
    folder = tmp_path_factory.mktemp("computed")
    with at_home_in(folder):
        submitted(folder, "one")
        submitted(folder, "two")
        run()
    return folder / "home"


class ComputedJobs(NamedTuple):
    """A store with two jobs that were computed, of which one is about to be damaged."""

    store: Store
    hurt: str
    other: str


@pytest.fixture
def computed(home_with_results: Path, settings: Settings) -> Iterator[ComputedJobs]:
    """A store of its own with two jobs that were computed."""
    with copied(home_with_results, settings) as store:
        found = select(store, "select id from job order by source")
        yield ComputedJobs(store, *(job_id for (job_id,) in found))


@pytest.fixture(scope="module")
def home_half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home with a job whose rows are in every place, and whose books add up."""
    folder = tmp_path_factory.mktemp("half-done")
    with at_home_in(folder) as settings, contextlib.closing(Store.open(settings)) as store:
        job_id = submitted(folder, rows=16, order="input")
        finish(store, leased(store, limit=10))
        dead = this_process().rsplit(":", 2)[0] + ":0:abcdef"
        held = leased(store, limit=3, owner=dead)
        with store.write() as tx:  # so that row 11 has a record, and 10 and 12 are in a span
            save_tokens(tx, [SavedTokens(held.epoch, job_id, 11, b"", "model")])
        shards.compact(store, job_id, now=0.0)
        finish(store, leased(store, limit=1))
        assert check(code=0)["damages"] == []
    return folder / "home"


def run(*jobs: str) -> Done:
    done = conserve("run", *jobs, "--endpoint", "fake:")
    assert "Traceback" not in done.stderr
    return done


COMPARED = ["row_index", "text", "error_type"]  # times differ from run to run


def results(store: Store, job_id: str) -> list[dict[str, Any]]:
    """The answers of a job that was computed, as its shards have them."""
    with store.read() as tx:
        found = shards.files(tx, [job_id])
    tables = [pq.read_table(store.home / shard.file, columns=COMPARED) for shard in found]
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["row_index"])


def exported(job_id: str) -> list[dict[str, Any]]:
    """The answers of a job, as `conserve results` has them."""
    done = conserve("results", job_id)
    assert done.returncode == 0, done.stderr
    return [{name: row[name] for name in COMPARED} for row in map(json.loads, done.stdout.splitlines())]


def check(*words: str, code: int | None = 1) -> dict[str, Any]:
    """Document of `conserve check --json`."""
    done = conserve("check", *words, "--json")
    assert code is None or done.returncode == code, done
    return dict(json.loads(done.stdout))


def shard_files(store: Store, job_id: str, *, failed: bool = False) -> list[Path]:
    found = select(store, f"select file from shard where job_id = '{job_id}' and failed = {int(failed)}")
    return [store.home / file for (file,) in found]


def flip(path: Path, share: float = 0.5) -> None:
    """Turn one bit round, so far into the file."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "empty": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped at the beginning": lambda path: flip(path, 0),
    "flipped in a page": lambda path: flip(path, 0.2),
    "flipped in the footer": lambda path: flip(path, 0.97),
}
IN_MINUTES = {"missing", "flipped in a page", "flipped in the footer"}
damaged_ways = pytest.mark.parametrize("damage", named(DAMAGES, in_minutes=IN_MINUTES))


def test_a_whole_store_is_said_to_be_whole(store: Store, submit: Callable[..., str]) -> None:
    submit()
    run()
    submit("two")
    found = check(code=0)
    assert (found["jobs"], found["damages"], found["left"]) == (2, [], [])
    assert found["files"] == 2 + 2 + 2, "requests, inputs and shards"
    done = conserve("check")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("nothing is damaged (2 jobs, 6 files, ")


def test_an_empty_store_is_whole(store: Store) -> None:
    assert check(code=0)["jobs"] == 0


@damaged_ways
def test_the_rows_of_a_damaged_shard_are_computed_again(
    computed: ComputedJobs, damage: Callable[[Path], Any]
) -> None:
    """Rows of other shards are not; what is there of the file goes to the trash."""
    store, hurt, other = computed
    answers = results(store, hurt), results(store, other)
    files = shard_files(store, other), shard_files(store, hurt, failed=True)
    (file,) = shard_files(store, hurt)
    damage(file)
    (found,) = check()["damages"]
    assert (found["job_id"], found["part"], found["file"]) == (
        hurt,
        "shard",
        str(file.relative_to(store.home)),
    )
    assert found["fix"] == f"run: conserve check --repair {hurt} (its 36 rows are computed again)"
    assert check(other, code=0)["damages"] == []
    repaired = check("--repair", code=0)
    assert repaired["left"] == []
    assert "36 rows are back in the queue" in repaired["repairs"]
    assert (job(store, hurt).state, job(store, hurt).succeeded, job(store, hurt).failed) == ("queued", 0, 4)
    assert job(store, hurt).prompt_tokens == 0
    assert job(store, other).state is JobState.COMPLETED
    run()
    assert (results(store, hurt), results(store, other)) == answers
    assert (shard_files(store, other), shard_files(store, hurt, failed=True)) == files
    assert check(code=0)["damages"] == []
    assert not file.exists()


def test_a_shard_that_was_swept_by_mistake_comes_back_from_the_trash(
    computed: ComputedJobs,
) -> None:
    store, job_id, _ = computed
    before = results(store, job_id)
    (file,) = shard_files(store, job_id)
    trash.throw_away(store.home, file, now=1e9)
    (found,) = check()["damages"]
    assert found["what"] == "is missing"
    assert check("--repair", code=0)["repairs"] == [f"{file.relative_to(store.home)} was found in the trash"]
    assert results(store, job_id) == before


@damaged_ways
def test_damaged_requests_are_rendered_again_from_the_input(
    store: Store, submit: Callable[..., str], damage: Callable[[Path], Any]
) -> None:
    """A run refuses the job meanwhile, and that job alone."""
    hurt, other = submit(), submit("two")
    path = layout.requests_file(store.home, hurt)
    before = path.read_bytes()
    damage(path)
    done = run()
    assert done.returncode == 1
    assert f"refused: the requests of job {hurt} cannot be read" in done.stderr
    assert f"run: conserve check {hurt}" in done.stderr
    assert (job(store, hurt).state, job(store, other).state) == ("failed", "completed")
    (found,) = check()["damages"]
    assert (found["job_id"], found["part"]) == (hurt, "requests")
    repaired = check("--repair", code=0)
    assert any("was rendered from" in said for said in repaired["repairs"])
    assert path.read_bytes() == before
    assert job(store, hurt).state is JobState.QUEUED
    assert run().returncode == 5
    assert len(results(store, hurt)) == ROWS


@damaged_ways
def test_damaged_inputs_are_copied_again(
    store: Store, submit: Callable[..., str], damage: Callable[[Path], Any]
) -> None:
    hurt = submit()
    path = layout.inputs_file(store.home, hurt)
    before = path.read_bytes()
    damage(path)
    (found,) = check()["damages"]
    assert (found["job_id"], found["part"]) == (hurt, "inputs")
    assert check("--repair", code=0)["left"] == []
    assert path.read_bytes() == before
    assert run().returncode == 5


@pytest.mark.parametrize("files", [1, 2])
def test_an_input_that_is_read_again_has_the_partitions_of_its_folders(
    store: Store, tmp_path: Path, files: int
) -> None:
    for number in range(files):
        folder = tmp_path / "rows" / f"day={number}"
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    task = Task(kind=Kind.PROMPT, template="{{ q }} {{ day }}")
    job_id = submit_job(store, str(tmp_path / "rows"), task).job_id
    for path in (layout.inputs_file(store.home, job_id), layout.requests_file(store.home, job_id)):
        before = path.read_bytes()
        path.unlink()
        assert check("--repair", code=0)["left"] == []
        assert path.read_bytes() == before


def test_a_job_whose_requests_and_input_are_lost_fails_alone_and_keeps_its_results(
    store: Store, submit: Callable[..., str], tmp_path: Path
) -> None:
    half, done, other = submit(), submit("two"), submit("three")
    run(done)
    with store.write() as tx:
        catalog.move(tx, other, "pause", now=0.0)
    finish(store, leased(store, limit=10, only=[half]))
    for job_id, name in ((half, "one"), (done, "two")):
        layout.requests_file(store.home, job_id).unlink()
        layout.inputs_file(store.home, job_id).unlink()
        (tmp_path / f"{name}.jsonl").unlink()
    repaired = check("--repair")
    assert {(damage["job_id"], damage["part"]) for damage in repaired["left"]} == {
        (job_id, part) for job_id in (half, done) for part in ("requests", "inputs")
    }
    failed = job(store, half)
    assert (failed.state, failed.failed_by) == (JobState.FAILED, FailedBy.DAMAGE)
    assert "its input is not as it was; submit it again, the 10 results it has stay" in (failed.error or "")
    assert job(store, done).state is JobState.COMPLETED
    assert job(store, other).state is JobState.PAUSED
    assert len(conserve("results", half).stdout.splitlines()) == 10


def test_standard_input_is_rendered_again_from_its_copy(store: Store, submit: Callable[..., str]) -> None:
    lines = "".join(json.dumps({"q": f"row {n}"}) + "\n" for n in range(9))
    job_id = conserve("submit", "-", "--prompt", "{{ q }}", stdin=lines).stdout.strip()
    path = layout.requests_file(store.home, job_id)
    before = path.read_bytes()
    flip(path)
    assert check("--repair", code=0)["left"] == []
    assert path.read_bytes() == before


def test_requests_that_another_version_would_render_otherwise_must_fit_the_results(
    store: Store, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order of rows would give results to rows that they do not answer."""
    job_id = submit(order="random:1")
    finish(store, leased(store, limit=10))
    path = layout.requests_file(store.home, job_id)
    indexes = pq.read_table(path)["row_index"].to_pylist()
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("conserve.jobs.requests.submit.in_order", lambda rows, task, *_: iter(()))
        assert [damage["part"] for damage in check("--repair")["left"]] == ["requests"]
    assert indexes != list(range(ROWS))


@pytest.mark.parametrize("column", ["payload", "failed", "checksum", "position"])
def test_a_damaged_row_of_the_journal_is_computed_again(
    store: Store, submit: Callable[..., str], column: str
) -> None:
    job_id = submit(rows=20, order="input")
    finish(store, leased(store, limit=10), prompt_tokens=7)
    with store.write() as tx:
        change = {
            "payload": "payload = cast(replace(cast(payload as text), 'yes', 'yet') as blob)",
            "failed": "failed = 1",
            "checksum": "checksum = checksum + 1",
            "position": "position = 12",
        }[column]
        tx.exec_driver_sql(f"update journal set {change} where position = 4")
    found = check()["damages"]
    assert {damage["job_id"] for damage in found} == {job_id}
    assert "journal" in {damage["part"] for damage in found}
    assert shards.compact(store, job_id, now=0.0) == 9
    assert check("--repair", code=0)["left"] == []
    assert (job(store, job_id).succeeded, job(store, job_id).prompt_tokens) == (9, 63)
    assert select(store, "select count(*) from journal") == [(0,)]
    run()
    assert [row["row_index"] for row in results(store, job_id)] == list(range(20))


@pytest.mark.parametrize(
    "change",
    [
        "update job set succeeded = succeeded + 1",
        "update job set failed = 7",
        "update job set prompt_tokens = 5",
        "update job set next_position = 12",
        "update job set next_position = 9",
        "update job set next_position = 0",
        "delete from request where position = 11",
        "delete from journal where position = 2",
        "update request set position = 14 where position = 11",
        "update request set position = 99 where position = 11",
        "insert into request select job_id, 3, epoch, attempts, failures, available_at, suspect, started_at, "
        "tokens, tokens_by, checksum, deaths, losses from request where position = 11",
        "delete from span",
        "update span set stop = 12, held = 1",
        "update span set gone = x'00', held = 3",
        "update span set start = 9, held = 4",
        "update job set state = 'completed'",
    ],
)
def test_books_that_do_not_add_up_are_found_and_mended(
    home_half_done: Path, settings: Settings, change: str
) -> None:
    """Each position is in exactly one place, and the counters are the sums over the results."""
    with copied(home_half_done, settings) as store:
        ((job_id,),) = select(store, "select id from job")
        with store.write() as tx:
            tx.exec_driver_sql(change)
            if "journal" in change:
                tx.exec_driver_sql("delete from journal")
        found = check()["damages"]
        assert {damage["job_id"] for damage in found} == {job_id}
        assert {damage["part"] for damage in found} <= {"rows", "counters"}
        assert check("--repair", code=0)["left"] == []
        run()
        assert [row["row_index"] for row in results(store, job_id)] == list(range(16))


LOST = "update job set task = '{' where id = :id"
MISCOUNTED = "update job set num_rows = 8 where id = :id"
UNKNOWN = "update job set state = 'quexed' where id = :id"
RECORDS = (
    "update job set source = 'x' where id = :id",
    "update job set files = '[1]' where id = :id",
    "update job set num_rows = 41 where id = :id",
    "update job set num_rows = 'x' where id = :id",
    "update job set succeeded = 'many' where id = :id",
)


@pytest.mark.parametrize(
    ("change", "marked"),
    [
        *((LOST, True), (MISCOUNTED, True), (MISCOUNTED, False), (UNKNOWN, False)),
        *in_full((UNKNOWN, True), (LOST, False)),
        *in_full(*((change, marked) for change in RECORDS for marked in (True, False))),
    ],
)
def test_a_damaged_record_is_taken_from_the_jobs_folder(
    computed: ComputedJobs, change: str, marked: bool
) -> None:
    """If the folder's record is lost too, the job runs no more, and keeps its results. Others work all the time."""
    from sqlalchemy import text

    store, hurt, other = computed
    expected = results(store, hurt), results(store, other)
    with store.write() as tx:
        tx.execute(text(change), {"id": hurt})
    if not marked:
        (layout.job_folder(store.home, hurt) / marks.MARK).unlink()
    assert conserve("status").returncode == 0
    assert conserve("jobs").returncode == 0
    assert exported(other) == expected[1]
    found = check()["damages"]
    assert {damage["job_id"] for damage in found} == {hurt}
    assert check("--repair", code=0)["left"] == []
    assert results(store, other) == expected[1]
    assert exported(hurt) == expected[0]


def test_a_job_whose_question_is_lost_fails_and_is_not_queued_again(
    store: Store, submit: Callable[..., str]
) -> None:
    job_id = submit()
    with store.write() as tx:
        tx.exec_driver_sql("""update job set task = '{"kind": "none"}'""")
    (layout.job_folder(store.home, job_id) / marks.MARK).unlink()
    for _ in range(2):
        check("--repair")
        found = job(store, job_id)
        assert (found.state, found.failed_by) == (JobState.FAILED, FailedBy.LOSS)
        assert f"what job {job_id} asks is lost (" in (found.error or "")


@damaged_ways
def test_a_damaged_mark_is_written_anew(
    store: Store, submit: Callable[..., str], damage: Callable[[Path], Any]
) -> None:
    hurt, other = submit(), submit("two")
    path = layout.job_folder(store.home, hurt) / marks.MARK
    before = place_of(path.parent).mark()
    damage(path)
    assert place_of(path.parent).mark() is None
    (found,) = check()["damages"]
    assert (found["job_id"], found["part"]) == (hurt, "mark")
    assert check("--repair", code=0)["left"] == []
    assert place_of(path.parent).mark() == before
    assert job(store, other).state is JobState.QUEUED


def test_a_mark_of_another_store_is_written_anew(store: Store, submit: Callable[..., str]) -> None:
    folder = layout.job_folder(store.home, submit())
    place_of(folder).set_mark(marks.Mark(store_id="another", registered=True))
    (found,) = check()["damages"]
    assert "is of another store (another)" in found["what"]
    assert check("--repair", code=0)["left"] == []


@pytest.mark.parametrize(
    "change",
    ["task = replace(task, 'q }}', 'p }}')", "submitted_at = 7", "source = replace(source, 'one', 'two')"],
)
def test_a_record_that_is_not_what_was_submitted_is_taken_from_the_folder(
    store: Store, submit: Callable[..., str], change: str
) -> None:
    """A flipped bit in a template would ask something else."""
    job_id = submit()
    before = job(store, job_id)
    with store.write() as tx:
        tx.exec_driver_sql(f"update job set {change}")
    (found,) = check()["damages"]
    assert (found["job_id"], found["part"]) == (job_id, "record")
    assert "not what was submitted: " + change.split()[0] in found["what"]
    assert check("--repair", code=0)["left"] == []
    assert job(store, job_id) == before


@pytest.mark.parametrize("marked", [True, False], ids=["with a mark", "without"])
def test_a_task_that_makes_no_sense_is_taken_from_the_folder_or_fails_its_job_alone(
    store: Store, submit: Callable[..., str], marked: bool
) -> None:
    hurt, other = submit(), submit("two")
    with store.write() as tx:
        tx.exec_driver_sql(f"update job set task = replace(task, 'prompt', 'promqt') where id = '{hurt}'")
    if not marked:
        (layout.job_folder(store.home, hurt) / marks.MARK).unlink()
    done = run()
    assert f"refused: the record of job {hurt} is damaged" in done.stderr
    assert job(store, other).state is JobState.COMPLETED
    (found,) = check()["damages"]
    assert (found["job_id"], found["part"]) == (hurt, "record")
    if marked:
        assert check("--repair", code=0)["left"] == []
        assert run().returncode == 5
    else:
        assert len(check("--repair")["left"]) == 1
        assert "what job" in (job(store, hurt).error or "")


def test_a_damage_of_the_database_itself_is_named(store: Store, submit: Callable[..., str]) -> None:
    job_id = submit()
    finish(store, leased(store))
    with store.engine.begin() as connection:
        connection.exec_driver_sql("pragma foreign_keys = off")
    raw = store.engine.raw_connection()
    raw.execute("pragma foreign_keys = off")  # type: ignore[attr-defined]
    raw.execute("update journal set job_id = 'nobody' where position = 1")  # type: ignore[attr-defined]
    raw.close()
    found = check()["damages"]
    assert {(damage["job_id"], damage["part"]) for damage in found} >= {(None, "database"), (job_id, "rows")}
    assert check("--repair", code=0)["left"] == []


OBSTACLES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Any]]] = {
    "another process writes": lambda path: writing(path),
    "the file cannot be opened": lambda path: in_the_way(path),
    "PostgreSQL is down": lambda _: mock.patch.dict(
        os.environ, CONSERVE_STORE="postgresql://127.0.0.1:1/store"
    ),
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Hold the write lock of a database."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("begin immediate")
        yield


@contextlib.contextmanager
def in_the_way(path: Path) -> Iterator[None]:
    """Have a folder where the database was."""
    aside = path.rename(path.with_name("aside"))
    path.mkdir()
    yield
    path.rmdir()
    aside.rename(path)


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
def test_a_database_out_of_reach_is_no_damage_and_stays_where_it_is(
    store: Store,
    submit: Callable[..., str],
    obstacle: Callable[[Path], contextlib.AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.0)
    submit()
    store.close()
    path = store.home / "conserve.db"
    before = path.stat().st_ino
    with obstacle(path):
        done = conserve("check", "--repair")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done
    assert not {"damaged", "--repair", "backup"} & set(done.stderr.split())
    assert path.stat().st_ino == before
    assert list(store.home.glob("*damaged*")) == []
    assert check(code=0)["damages"] == []


def test_a_job_that_is_removed_while_it_is_looked_at_is_not_damaged(store: Store, settings: Settings) -> None:
    add_job(store)
    checked = checking.Checked()
    assert checking.check_job(store, "gone", checked) == []
    assert mend_jobs(settings, [damaged("gone", StorePart.ROWS, "the queue", "lacks rows")]) == []


def test_what_is_repaired_and_what_is_left_is_said(computed: ComputedJobs) -> None:
    store, job_id, _ = computed
    (file,) = shard_files(store, job_id)
    flip(file)
    layout.requests_file(store.home, job_id).unlink()
    done = conserve("check", job_id)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first == (
        f"job {job_id}: jobs/{job_id}/requests.parquet is missing; run: conserve check --repair {job_id} "
        "(they are rendered again if the input is as it was)"
    )
    assert second.startswith(f"job {job_id}: {file.relative_to(store.home)} is not what was written; run: ")
    assert done.stderr.startswith("2 damages (1 job, 3 files, ")
    done = conserve("check", "--repair")
    assert done.returncode == 0
    assert f"repaired: {file.relative_to(store.home)} was taken out of the store" in done.stdout.splitlines()


def test_a_job_that_was_refused_is_queued_again_if_its_requests_are_whole(
    home_half_done: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are read while nobody waits for the database."""
    refused = "update job set state = 'failed', failed_by = 'damage', succeeded = 1"
    with copied(home_half_done, settings) as store:
        ((job_id,),) = select(store, "select id from job")
        found = [damaged(job_id, StorePart.COUNTERS, "its record", "says 1")]
        read = while_writing(monkeypatch, (digests, "damage"), (digests, "seal"))
        for whole in (True, False):
            with store.write() as tx:
                tx.exec_driver_sql(refused)
            if not whole:
                layout.requests_file(store.home, job_id).unlink()
            said = mend_jobs(settings, found)
            assert (f"job {job_id} is queued again" in said) is whole
            assert job(store, job_id).state is (JobState.QUEUED if whole else JobState.FAILED)
        assert read == []


def test_a_job_that_is_not_there_is_a_mistake_of_the_users(store: Store) -> None:
    done = conserve("check", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no job 'nope'" in done.stderr


def test_files_of_an_earlier_version_are_read_to_their_end(store: Store, submit: Callable[..., str]) -> None:
    """Such files have no digest; a page that cannot be read is found all the same."""
    job_id = submit(rows=2000)
    run()
    with store.write() as tx:
        tx.exec_driver_sql("update shard set digest = null, bytes = null")
        tx.exec_driver_sql("update job set files = null")
    assert check(code=0)["damages"] == []
    for path in (*shard_files(store, job_id), layout.requests_file(store.home, job_id)):
        flip(path, 0.3)
    assert {damage["part"] for damage in check()["damages"]} == {"shard", "requests"}
    assert check("--repair", code=0)["left"] == []


def test_what_cannot_be_read_is_named_for_queries(
    computed: ComputedJobs,
) -> None:
    """Each file with its job and the next command; only the parts that are asked for."""
    store, hurt, whole = computed
    (file,) = shard_files(store, hurt)
    flip(file)
    layout.inputs_file(store.home, whole).unlink()

    def damages(**named: Any) -> list[tuple[str | None, str, str, str]]:
        with store.read() as tx:
            jobs, found = catalog.everything(tx), shards.files(tx)
        found_ = unreadable(store.home, jobs, found, now=0.0, **named)
        return [(damage.job_id, damage.part, damage.what, damage.fix) for damage in found_]

    shard = (hurt, "shard", "is not what was written", f"run: conserve check {hurt}")
    inputs = (whole, "inputs", "is missing", f"run: conserve check {whole}")
    assert damages() == [inputs, shard]
    assert damages(parts=[StorePart.SHARD]) == [shard]
    assert damages(parts=[StorePart.REQUESTS]) == []


def test_a_flipped_bit_in_requests_is_noticed_by_its_page(store: Store, submit: Callable[..., str]) -> None:
    """The bit turns after the digest was compared."""
    path = layout.requests_file(store.home, submit(rows=3000))
    requests = RequestFile(path)
    flip(path, 0.3)
    with pytest.raises(StoreDamaged, match=r"cannot be read \(.*; run: conserve check"):
        requests.read(range(3000))
    requests.close()


@pytest.mark.parametrize("damage", named(DAMAGES, in_minutes={"missing", "flipped in a page"}))
def test_answers_of_a_damaged_shard_are_left_out_and_never_wrong(
    computed: ComputedJobs, damage: Callable[[Path], Any]
) -> None:
    """A sentence names the job and the next command, the exit code is 1, and other jobs are not affected."""
    store, hurt, other = computed
    (file,) = shard_files(store, hurt)
    damage(file)
    done = conserve("results", hurt)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 4, "the failed rows are in a shard of their own"
    assert f"job {hurt}: {file.relative_to(store.home)} " in done.stderr
    assert f"run: conserve check {hurt}" in done.stderr
    assert len(results(store, other)) == ROWS
    done = conserve("sql", "--json", "select job_id, count(*) as n from results group by 1")
    assert done.returncode == 1
    assert {row["job_id"]: row["n"] for row in map(json.loads, done.stdout.splitlines())} == {
        hurt: 4,
        other: ROWS,
    }
    assert f"run: conserve check {hurt}" in done.stderr
    assert conserve("sql", "--job", other, "select * from results").returncode == 0


def failed_shard_lost(computed: ComputedJobs) -> tuple[Store, str, Path]:
    store, job_id, _ = computed
    (file,) = shard_files(store, job_id, failed=True)
    file.unlink()
    return store, job_id, file


def test_failed_rows_whose_shard_is_missing_are_put_back_with_a_warning(
    computed: ComputedJobs,
) -> None:
    store, job_id, file = failed_shard_lost(computed)
    done = conserve("retry", job_id)
    assert (done.returncode, done.stdout) == (0, f"{job_id}: 4 failed rows back in the queue\n")
    assert f"warning: {file.relative_to(store.home)} is missing; its rows had failed" in done.stderr
    assert conserve("run", "--endpoint", "fake:?reject=NEVER").returncode == 0
    assert [row["error_type"] for row in results(store, job_id)] == [None] * ROWS
    assert check(code=0)["damages"] == []


def test_a_retry_beside_other_lost_rows_names_the_repair(computed: ComputedJobs) -> None:
    store, job_id, _ = failed_shard_lost(computed)
    (other,) = shard_files(store, job_id)
    other.unlink()
    done = conserve("retry", job_id)
    assert done.returncode == 1
    assert f"run: conserve check --repair {job_id}" in done.stderr
    assert check("--repair", code=0)["left"] == []
    run()
    assert len(results(store, job_id)) == ROWS


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    """A KV spill of two workers, five blocks each."""
    folder = tmp_path / "spill"
    folder.mkdir()
    keys = [f"{number:032x}" for number in range(5)]
    shards_ = [
        spill_file.write_shard(
            folder,
            f"id-{rank}.kv",
            [(key, [bytes([rank, number]) * 500, bytes(300)]) for number, key in enumerate(keys)],
            layout="a layout",
        )
        for rank in range(2)
    ]
    spill_file.write_index(folder, spill_file.Spill(identity={"model": "m"}, keys=keys, shards=shards_))
    return folder


def test_a_whole_spill_is_said_to_be_whole(store: Store, spill: Path) -> None:
    assert check("--kv-spill", str(spill), code=0)["damages"] == []
    for path in spill.iterdir():
        path.unlink()
    assert check("--kv-spill", str(spill), code=0)["damages"] == []


@damaged_ways
@pytest.mark.parametrize("name", ["id-0.kv", "id-1.kv", spill_file.INDEX])
def test_a_damaged_spill_is_named_and_removed(
    store: Store, spill: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    if damage is DAMAGES["missing"] and name == spill_file.INDEX:
        pytest.skip("without an index there is no spill")
    damage(spill / name)
    (found,) = check("--kv-spill", str(spill))["damages"]
    assert (found["job_id"], found["part"], found["file"]) == (None, "spill", str(spill))
    assert found["fix"].startswith(f"run: conserve check --repair --kv-spill {spill}")
    repaired = check("--repair", "--kv-spill", str(spill), code=0)
    assert repaired["repairs"] == [f"the spill in {spill} was removed"]
    assert list(spill.glob("*.kv")) == []


def test_a_spill_that_a_server_uses_is_not_removed(store: Store, spill: Path) -> None:
    flip(spill / "id-0.kv")
    with spill_file.claim(spill):
        done = conserve("check", "--repair", "--kv-spill", str(spill))
    assert done.returncode == 2
    assert "is in use by another server" in done.stderr
    assert (spill / "id-0.kv").is_file()


def test_a_spill_that_is_not_there_is_a_mistake_of_the_users(store: Store, tmp_path: Path) -> None:
    done = conserve("check", "--kv-spill", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "is no folder" in done.stderr


def test_another_deadline_is_no_damage(store: Store, submit: Callable[..., str]) -> None:
    job_id = submit(rows=4)
    for words in (["--within", "5h"], ["--within", "9h", "--on-late", "best-effort"], ["--none"]):
        changed = conserve("deadline", job_id, *words)
        assert changed.returncode == 0, changed.stderr
        assert conserve("check").returncode == 0


def test_a_job_that_expired_and_was_retried_is_no_damage(store: Store, submit: Callable[..., str]) -> None:
    job_id = submit(rows=4)
    assert conserve("deadline", job_id, "--within", "5h").returncode == 0
    with store.write() as tx:
        tx.exec_driver_sql("update job set deadline = 1.0")
        assert catalog.expire(tx, now=2.0) == [job_id]
    assert conserve("check").returncode == 0
    assert conserve("retry", job_id).returncode == 0
    assert conserve("check").returncode == 0


def test_an_expired_job_is_not_cancelled(store: Store, submit: Callable[..., str]) -> None:
    job_id = submit(rows=4)
    with store.write() as tx:
        tx.exec_driver_sql("update job set deadline = 1.0")
        catalog.expire(tx, now=2.0)
    done = conserve("cancel", job_id)
    assert done.returncode == 1
    assert "is expired, so there is nothing to cancel" in done.stderr
    assert conserve("retry", job_id).returncode == 0
