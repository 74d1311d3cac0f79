"""A database that is damaged, emptied, gone or an older copy: the jobs come back from it and from their folders."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from conserve.config import Settings, load
from conserve.errors import StoreError, StoreFull
from conserve.store.books import batches, catalog, harvested, keys, servers, shards
from conserve.store.books.readings import read_jobs
from conserve.store.books.servers import Sighting
from conserve.store.books.states import FailedBy
from conserve.store.database import lineage
from conserve.store.database.connection import engine_of
from conserve.store.database.migrations import batch_of_tags
from conserve.store.database.store import Store
from conserve.store.files import job_folders, layout
from conserve.store.files.marks import Mark
from conserve.store.files.place import place_of
from conserve.store.upkeep import mending, rebuild
from tests.batch_rig import client, create, live, reaches
from tests.commands import Done, conserve, until
from tests.conftest import own_environment
from tests.store_rows import add_job, claim, finish, job, leased, positions, select
from tests.tiers import named

ROWS = 20


class Jobs(NamedTuple):
    """A finished job, one half done whose results are in the journal, and one queued."""

    done: str
    half: str
    queued: str
    expected: dict[str, list[dict[str, Any]]]


def submit(folder: Path, name: str) -> str:
    path = folder / f"{name}.jsonl"
    rows = [{"q": f"{name} {n}" + (" REJECT" if n % 8 == 5 else "")} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return conserve("submit", str(path), "--prompt", "{{ q }}").stdout.strip()


def run(*jobs: str) -> Done:
    done = conserve("run", *jobs, "--endpoint", "fake:")
    assert "Traceback" not in done.stderr
    return done


def results(job_id: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in conserve("results", job_id).stdout.splitlines()]
    return [{name: row[name] for name in ("row_index", "text", "error_type")} for row in rows]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Jobs]:
    """A place for a store, a copy of the store that was made there, and its jobs."""
    folder = tmp_path_factory.mktemp("made")
    place, copy = folder / "home", folder / "copy"
    with pytest.MonkeyPatch.context() as patch:
        own_environment(patch, place)
        done, half, queued = (submit(folder, name) for name in ("done", "half", "queued"))
        run(done)
        with patch.context() as uncompacted:
            uncompacted.setattr("conserve.store.books.shards.compact", lambda *_, **__: 0)
            run(half)
        expected = {job_id: results(job_id) for job_id in (done, half)}
    assert [len(rows) for rows in expected.values()] == [ROWS, ROWS]
    place.rename(copy)
    return place, copy, Jobs(done, half, queued, expected)


@pytest.fixture
def jobs(made: tuple[Path, Path, Jobs], monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Jobs of a store at the place at which it was made: elsewhere it would be a store that was moved."""
    place, copy, jobs = made
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(copy, place, symlinks=True)
    monkeypatch.setenv("CONSERVE_HOME", str(place))
    return jobs


def database(settings: Settings) -> Path:
    return settings.home / "conserve.db"


def overwrite(path: Path, start: int, stop: int, content: bytes = b"\0") -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content * ((stop - start) // len(content)))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "garbage": lambda path: path.write_bytes(b"no database at all " * 1000),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 8192 * 4096]),
    "without a header": lambda path: overwrite(path, 0, 100),
    "without the first page": lambda path: overwrite(path, 0, 4096),
    "without a page in the middle": lambda path: overwrite(path, 16_384, 20_480, b"\xff"),
}
IN_MINUTES = {"gone", "without the first page", "without a page in the middle"}


@pytest.mark.parametrize("damage", named(DAMAGES, in_minutes=IN_MINUTES))
def test_every_job_comes_back_with_all_its_rows(
    jobs: Jobs, settings: Settings, damage: Callable[[Path], Any]
) -> None:
    damage(database(settings))
    found = conserve("check")
    assert found.returncode == 1, found
    assert "run: conserve check --repair" in found.stdout
    mended = conserve("check", "--repair")
    assert mended.returncode == 0, mended
    assert {job.id for job in read_jobs(settings, now=0.0)} == {jobs.done, jobs.half, jobs.queued}
    assert results(jobs.done) == jobs.expected[jobs.done]
    run()
    assert results(jobs.half) == jobs.expected[jobs.half]
    assert len(results(jobs.queued)) == ROWS
    assert conserve("check").returncode == 0


def test_jobs_submitted_since_a_copy_was_made_come_back_when_it_is_restored(
    settings: Settings, tmp_path: Path
) -> None:
    """Answers that were computed since the copy count."""
    before = submit(tmp_path, "before")
    shutil.copy(database(settings), tmp_path / "copy.db")
    since = submit(tmp_path, "since")
    run(since)
    expected = results(since)
    shutil.copy(tmp_path / "copy.db", database(settings))
    assert [job.id for job in read_jobs(settings, now=0.0)] == [before]
    found = conserve("check")
    assert f"it does not name 1 job whose folders are here: {since}" in found.stdout
    assert f"job {since} was taken in from its folder" in conserve("check", "--repair").stdout
    assert results(since) == expected
    assert len(results(before)) == 0
    assert conserve("check").returncode == 0


def test_jobs_of_another_database_over_the_same_home_are_not_taken(
    settings: Settings, tmp_path: Path
) -> None:
    elsewhere = {"CONSERVE_STORE": f"sqlite:///{tmp_path / 'other.db'}"}
    ours = submit(tmp_path, "ours")
    assert conserve("jobs", **elsewhere).returncode == 0
    assert conserve("check", **elsewhere).returncode == 0
    assert conserve("check", "--repair", **elsewhere).returncode == 0
    assert conserve("jobs", "--json", **elsewhere).stdout.strip() == "[]"
    assert conserve("check").returncode == 0
    assert [job.id for job in read_jobs(settings, now=0.0)] == [ours]


def test_a_job_that_was_removed_does_not_come_back(settings: Settings, tmp_path: Path) -> None:
    job_id = submit(tmp_path, "gone")
    conserve("rm", job_id, "--yes", "--force")
    assert conserve("check", "--repair").returncode == 0
    assert read_jobs(settings, now=0.0) == []


def test_epochs_of_a_lost_database_are_not_given_out_again(jobs: Jobs, settings: Settings) -> None:
    """A late writer that held one must find it gone."""
    database(settings).write_bytes(b"damaged" * 1000)
    assert conserve("check", "--repair").returncode == 0
    store = Store.open(settings)
    assert select(store, "select max(epoch) from lease") == [(None,)]
    lease = claim(store, limit=1)
    assert lease is not None
    assert lease.epoch > 1_000_000
    store.close()


def test_the_damaged_database_is_kept(jobs: Jobs, settings: Settings) -> None:
    database(settings).write_bytes(b"damaged" * 1000)
    conserve("check", "--repair")
    kept = min(settings.home.glob("conserve.db.damaged-*"), key=lambda path: len(path.name))
    assert kept.read_bytes() == b"damaged" * 1000


def test_a_damaged_database_that_another_process_has_open_stays(jobs: Jobs, settings: Settings) -> None:
    """A process that has the file open would commit to the one put aside."""
    path = database(settings)
    holds = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('select * from job'); input(print())"
    command = [sys.executable, "-S", "-c", holds, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        overwrite(path, 0, 100)
        done = conserve("check", "--repair")
        other.communicate(b"\n")
    assert done.returncode == 1
    assert f"another process has {path} open; stop what runs, and run: conserve check --repair" in done.stderr
    assert not list(settings.home.glob("conserve.db.damaged-*"))
    assert conserve("check", "--repair").returncode == 0


def test_rows_on_both_sides_of_a_damaged_page_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table meta (key text primary key, value text)")
        rows = [(f"{number:05}", "x" * 300) for number in range(400)]
        connection.executemany("insert into meta values (?, ?)", rows)
    connection.close()
    overwrite(path, 40_960, 45_056, b"\xff")
    found = rebuild.salvage(path)
    keys = [row["key"] for row in found["meta"]]
    assert 0 < len(keys) < 400
    assert {"00000", "00399"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert found["job"] == []


def test_a_store_on_another_database_is_not_rebuilt(tmp_path: Path) -> None:
    settings = load({"home": tmp_path, "store": "postgresql://x/y"}, environ={})
    assert settings.sqlite_file is None
    with pytest.raises(StoreError, match="only an SQLite store can be rebuilt; restore the database"):
        rebuild.rebuild(settings, now=0.0)


def marked(store: Store, name: str, **mark: Any) -> Path:
    """A job's folder, of this store and once registered unless said otherwise."""
    folder = layout.job_folder(store.home, name)
    folder.mkdir(parents=True)
    values: dict[str, Any] = {"store_id": store.id, "registered": True, "record": {"id": name}}
    place_of(folder).set_mark(Mark(**values | mark))
    return folder


def test_jobs_of_earlier_databases_at_the_place_are_strangers(store: Store) -> None:
    lineage.note(store.home, store.place, "earlier")
    lineage.note(store.home, "elsewhere.db", "other")
    marked(store, "ours")
    marked(store, "earlier", store_id="earlier")
    marked(store, "others", store_id="other")
    marked(store, "never-registered", registered=False)
    marked(store, "no-record", record=None)
    marked(store, ".new-1")
    (layout.jobs_folder(store.home) / "no-mark").mkdir()
    add_job(store, "known")
    job_folders.register(layout.job_folder(store.home, "known"), store.id, {"id": "known"})
    found = rebuild.strangers(store)
    assert [(stranger.job_id, stranger.mark.store_id) for stranger in found] == [
        ("earlier", "earlier"),
        ("ours", store.id),
    ]


def test_jobs_of_a_database_that_is_at_another_place_by_now_are_no_strangers(store: Store) -> None:
    """It was moved there by a command that knew another home; the one there answers its rows."""
    for store_id in ("before", "moved"):
        lineage.note(store.home, store.place, store_id)
        lineage.note(store.home, "elsewhere.db", store_id)
        marked(store, store_id, store_id=store_id)
    assert [stranger.job_id for stranger in rebuild.strangers(store)] == ["before"]


def test_a_job_that_is_taken_in_has_its_answers_a_batch_and_its_mark(store: Store) -> None:
    """Answers are registered before errors; what is no file of results is passed over."""
    add_job(store, "job-1", rows=5, priority=3, tags={"by": "ann"})
    with store.read() as tx:
        record = catalog.record(tx, "job-1")
    job_folders.register(layout.job_folder(store.home, "job-1"), store.id, record)
    finish(store, leased(store, limit=4), failed=[0], prompt_tokens=0, model="A")
    shards.compact(store, "job-1", now=0.0)
    named = "select file, failed, num_rows, digest, bytes from shard order by failed"
    before = select(store, named)
    assert [(failed, rows) for _, failed, rows, *_ in before] == [(0, 3), (1, 1)]
    folder = layout.job_folder(store.home, "job-1") / layout.RESULTS
    (folder / "half.tmp").write_bytes(b"no file of results")
    (folder / "damaged.parquet").write_bytes(b"nor this")
    with store.write() as tx:
        tx.exec_driver_sql("delete from shard")
        tx.exec_driver_sql("delete from job")
    add_job(store, "job-2")
    lineage.note(store.home, store.place, "earlier")
    place_of(folder.parent).set_mark(Mark(store_id="earlier", registered=True, record=record))
    marked(store, "job-3", record={"id": "job-3"})  # which is not enough for a job
    said = rebuild.adopt(store, rebuild.strangers(store), now=7.0)
    assert said == ["job job-1 was taken in from its folder"]
    assert select(store, f"{named}, id") == before
    assert select(store, "select created_at from shard") == [(7.0,), (7.0,)]
    found = job(store)
    assert (found.seq, found.priority, found.tags, found.state) == (2, 3, {"by": "ann"}, "queued")
    assert (found.succeeded, found.failed, found.next_position, found.model) == (3, 1, 4, "A")
    assert claim(store, only=["job-1"], model="B") is None, "its answers are of A"
    assert select(store, "select job_id from batch order by seq") == [("job-2",), ("job-1",)]
    mark = place_of(layout.job_folder(store.home, "job-1")).mark()
    assert mark == Mark(store_id=store.id, registered=True, record=record)
    assert leased(store, only=["job-1"], limit=1).epoch > 7000
    assert [stranger.job_id for stranger in rebuild.strangers(store)] == ["job-3"]


def forgotten(store: Store) -> list[rebuild.Stranger]:
    """A job of four rows whose first three have answers of A, and that the database no longer names."""
    add_job(store, "job-1", rows=4)
    with store.read() as tx:
        record = catalog.record(tx, "job-1")
    job_folders.register(layout.job_folder(store.home, "job-1"), store.id, record)
    finish(store, leased(store, limit=3), model="A")
    shards.compact(store, "job-1", now=0.0)
    with store.write() as tx:
        tx.exec_driver_sql("delete from shard")
        tx.exec_driver_sql("delete from job")
    return rebuild.strangers(store)


def test_a_job_is_taken_in_with_its_rows_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A harvester that looks right behind the commit leases no answered row, and none for another model."""
    found, register = forgotten(store), job_folders.register
    claimed = []

    def harvested(*given: Any) -> None:
        claimed.append(claim(store, model="B"))
        claimed.append(claim(store, model="A"))
        register(*given)

    monkeypatch.setattr(job_folders, "register", harvested)
    assert rebuild.adopt(store, found, now=7.0) == ["job job-1 was taken in from its folder"]
    assert [positions(lease) for lease in claimed] == [[], [3]]


def test_a_kill_leaves_no_job_whose_rows_are_not_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = forgotten(store)
    with monkeypatch.context() as kill:
        kill.setattr(mending, "mend", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rebuild.adopt(store, found, now=7.0)
    assert rebuild.strangers(store) == found
    rebuild.adopt(store, found, now=7.0)
    assert job(store).succeeded == 3


def test_of_two_repairs_at_once_one_takes_a_job_in(store: Store) -> None:
    found = forgotten(store)
    assert [len(rebuild.adopt(store, found, now=7.0)) for _ in range(2)] == [1, 0]
    assert select(store, "select failed, num_rows from shard") == [(0, 3)]


def test_a_job_of_an_earlier_version_is_taken_in_with_the_cause_of_its_failure(store: Store) -> None:
    """Its mark has the cause in a sentence alone; other jobs stay as they are."""
    (found,) = forgotten(store)
    add_job(store, "other")
    with store.write() as tx:
        tx.exec_driver_sql("update job set state = 'failed', error = 'the requests of it' where id = 'other'")
    assert found.mark.record is not None
    del found.mark.record["failed_by"]
    found.mark.record.update(state="failed", error="the requests of job job-1 cannot be read")
    rebuild.adopt(store, [found], now=7.0)
    said = select(store, "select id, failed_by from job order by id")
    assert said == [("job-1", "damage"), ("other", None)]


def salvaged(**tables: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that were read of a damaged database."""
    return {name: [] for name in rebuild.TABLES} | tables


def test_rows_that_can_be_used_are_put_into_the_new_database(store: Store, settings: Settings) -> None:
    """Rows of jobs that are not there, and rows that make no sense, are left out."""
    add_job(store, "job-1", rows=6)
    finish(store, leased(store, limit=3))
    store.close()
    rows = rebuild.salvage(database(settings))
    (record,) = rows["job"]
    half, whole, damaged = rows["journal"]
    database(settings).unlink()
    waiting = {
        "job_id": "job-1",
        "position": 3,
        "epoch": 9,
        "attempts": 2,
        "failures": 1,
        "available_at": 5.0,
    }
    again = Store.open(settings)
    said = rebuild.refill(
        again,
        salvaged(
            job=[record, {**record, "id": "job-2", "seq": 2, "state": None}, {"id": "job-3", "seq": 3}],
            journal=[
                {name: value for name, value in half.items() if name != "checksum"},
                whole,
                {**damaged, "checksum": 1},
                {**whole, "job_id": "missing"},
            ],
            request=[
                {**waiting, "unknown": 1},
                {**waiting, "position": 3},
                {**waiting, "job_id": "missing"},
                {**waiting, "position": 4, "attempts": None},
            ],
            shard=[{"job_id": "job-1", "file": 7}, {"job_id": "missing", "file": "x"}],
        ),
        now=1.0,
    )
    assert said == ["1 job was read from it", "1 row is back in the queue", *COUNTED]
    assert select(again, "select id from job") == [("job-1",)]
    assert select(again, "select position from journal order by 1") == [(0,), (1,)]
    assert select(again, "select position, epoch, attempts, failures from request order by 1") == [
        (2, None, 0, 0),
        (3, None, 2, 1),
    ]
    assert select(again, "select file from shard") == []
    again.close()


COUNTED = ["the counters were counted again"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_job_that_failed_for_damage_is_known_in_the_new_database(
    store: Store, settings: Settings, earlier: bool
) -> None:
    """Also where the damaged database is of a version that had the sentence alone."""
    add_job(store, "job-1")
    reason = "the requests of job job-1 cannot be read" if earlier else "it cannot be read"
    with store.write() as tx:
        catalog.refuse(tx, "job-1", reason, FailedBy.DAMAGE, now=0.0)
    store.close()
    rows = rebuild.salvage(database(settings))
    if earlier:
        del rows["job"][0]["failed_by"]
    database(settings).unlink()
    with closing(Store.open(settings)) as again:
        rebuild.refill(again, rows, now=1.0)
        assert select(again, "select state, error, failed_by from job") == [("failed", reason, "damage")]


def test_the_new_database_has_the_id_and_the_place_of_the_old_one(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    """An id that the home knows of comes before one that was read."""
    place = str(tmp_path / "data")
    rows: list[dict[str, Any]] = [
        {"key": "store_id", "value": 7},
        {"key": "store_id", "value": "read"},
        {"key": "other", "value": "x"},
    ]
    rows += [
        {"key": "data", "value": 7},
        {"key": "data", "value": place},
        {"key": "x", "value": "y"},
    ]
    for known, wanted in ((["first", "last"], "last"), ([], "read")):
        store.close()
        (settings.home / lineage.FILE).unlink()
        database(settings).unlink()
        store = Store.open(settings)
        (settings.home / lineage.FILE).unlink()
        for store_id in (*known, store.id):
            lineage.note(store.home, store.place, store_id)
        rebuild.refill(store, salvaged(meta=rows), now=1.0)
        again = Store.open(settings)
        assert (again.id, str(again.data)) == (wanted, place)
        again.close()
    store.close()


def test_what_was_done_is_told(jobs: Jobs, settings: Settings) -> None:
    database(settings).write_bytes(b"garbage" * 1000)
    assert rebuild.rebuild(settings, now=7.9) == [
        "the damaged database is kept as conserve.db.damaged-7",
        "0 jobs were read from it",
        *(f"job {job_id} was taken in from its folder" for job_id in sorted(jobs[:3])),
        rebuild.KEYS_UNREAD,
        rebuild.HOOKS_UNREAD,
        rebuild.SERVERS_UNREAD,
    ]


def test_rows_that_are_in_the_log_of_the_database_alone_are_read(store: Store, settings: Settings) -> None:
    add_job(store)
    assert (settings.home / "conserve.db-wal").stat().st_size > 0
    assert rebuild.rebuild(settings, now=7.0)[:2] == [
        "the damaged database is kept as conserve.db.damaged-7",
        "1 job was read from it",
    ]


def test_a_database_that_can_be_read_is_told_so(jobs: Jobs, settings: Settings) -> None:
    assert rebuild.rebuild(settings, now=7.0) == [
        "the damaged database is kept as conserve.db.damaged-7",
        "3 jobs were read from it",
    ]
    assert results(jobs.half) == jobs.expected[jobs.half]
    assert results(jobs.done) == jobs.expected[jobs.done]


def test_a_table_that_an_earlier_version_never_had_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    assert not rebuild.is_whole_table(path, "hook"), "there is no database"
    path.write_bytes(b"")
    assert not rebuild.is_whole_table(path, "hook"), "nothing of it is left"
    connection = sqlite3.connect(path)
    connection.execute("create table api_key (seq integer primary key, name text)")
    connection.executemany("insert into api_key values (?, ?)", [(n, "x" * 900) for n in range(90)])
    connection.commit()
    connection.close()
    assert rebuild.is_whole_table(path, "hook")
    assert rebuild.is_whole_table(path, "api_key")
    overwrite(path, 40_960, 45_056, b"\xff")
    assert not rebuild.is_whole_table(path, "api_key")


def test_of_a_damaged_text_what_can_be_decoded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    connection = sqlite3.connect(path)
    connection.execute("create table meta (key text primary key, value text)")
    connection.execute("insert into meta values ('a', cast(x'61ff62' as text))")
    connection.commit()
    connection.close()
    assert rebuild.salvage(path)["meta"] == [{"key": "a", "value": "a\ufffdb"}]
    assert rebuild.salvage(tmp_path / "gone" / "rows.db") == {name: [] for name in rebuild.TABLES}


def test_the_ids_of_each_place_are_kept(tmp_path: Path) -> None:
    for store_id in ("a", "b", "a"):
        lineage.note(tmp_path, "conserve.db", store_id)
    lineage.note(tmp_path, "postgresql://x/y", "c")
    assert lineage.ids(tmp_path, "conserve.db") == ["a", "b"]
    assert lineage.ids(tmp_path, "postgresql://x/y") == ["c"]
    for damaged in ("", "{", "[]", '{"conserve.db": 7}'):
        (tmp_path / lineage.FILE).write_text(damaged)
        assert lineage.ids(tmp_path, "conserve.db") == []
        lineage.note(tmp_path, "conserve.db", "d")
        assert lineage.ids(tmp_path, "conserve.db") == ["d"]


def test_a_place_is_a_path_in_the_home_or_an_address(store: Store, tmp_path: Path) -> None:
    assert store.place == "conserve.db"
    for url, expected in (
        (f"sqlite:///{store.home}/more/a.db", "more/a.db"),
        (f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/a.db"),
        ("sqlite://", "sqlite://"),
        ("postgresql://me:secret@there/store", "postgresql+psycopg://me:***@there/store"),
    ):
        assert lineage.place(store.home, engine_of(url)) == expected


def test_ids_stand_in_the_order_in_which_they_were_first_seen(tmp_path: Path) -> None:
    """An id that is noted already stays where it is, and nothing is written."""
    for store_id in ("a", "b", "c"):
        lineage.note(tmp_path, "conserve.db", store_id)
    os.utime(tmp_path / lineage.FILE, (0, 0))
    lineage.note(tmp_path, "conserve.db", "a")
    assert lineage.ids(tmp_path, "conserve.db") == ["a", "b", "c"]
    assert (tmp_path / lineage.FILE).stat().st_mtime == 0


def test_the_id_of_a_store_that_was_moved_is_forgotten_at_its_place_alone(tmp_path: Path) -> None:
    for at, store_id in (("one", "a"), ("one", "b"), ("two", "a")):
        lineage.note(tmp_path, at, store_id)
    lineage.forget(tmp_path, "one", "a")
    assert (lineage.ids(tmp_path, "one"), lineage.ids(tmp_path, "two")) == (["b"], ["a"])
    lineage.forget(tmp_path, "three", "a")
    assert lineage.ids(tmp_path, "three") == []


def test_scratch_files_of_killed_processes_go_after_an_hour(tmp_path: Path) -> None:
    for name, age_s in ((f".{lineage.FILE}.1", 3700), (f".{lineage.FILE}.2", 3500), (".other.json.1", 3700)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age_s,) * 2)
    lineage.drop_scratch(tmp_path, now=1e9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.json.1", f".{lineage.FILE}.2"]
    lineage.note(tmp_path, "conserve.db", "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.json.1", lineage.FILE]


def test_ids_that_cannot_be_written_hold_nothing_up(tmp_path: Path) -> None:
    (tmp_path / lineage.FILE).mkdir()
    lineage.note(tmp_path, "conserve.db", "a")
    lineage.forget(tmp_path, "conserve.db", "a")
    assert lineage.ids(tmp_path, "conserve.db") == []


def test_two_processes_that_note_their_ids_at_once_lose_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writes while the first one has read the file and not yet replaced it, unless it is kept waiting."""
    other = threading.Thread(target=lineage.note, args=(tmp_path, "two.db", "b"))
    waits, write, lock = threading.Event(), Path.replace, fcntl.flock

    def locked(held: int, how: int) -> None:
        if threading.current_thread() is other:
            try:
                lock(held, how | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                waits.set()
        lock(held, how)

    def interleaved(path: Path, target: Path) -> Path:
        if threading.current_thread() is not other:
            other.start()
            until(lambda: waits.is_set() or not other.is_alive())
        return write(path, target)

    monkeypatch.setattr(fcntl, "flock", locked)
    monkeypatch.setattr(Path, "replace", interleaved)
    lineage.note(tmp_path, "one.db", "a")
    other.join()
    assert (lineage.ids(tmp_path, "one.db"), lineage.ids(tmp_path, "two.db")) == (["a"], ["b"])
    assert [path.name for path in tmp_path.iterdir()] == [lineage.FILE]


def test_batches_keep_their_ids_and_projects(store: Store, settings: Settings) -> None:
    with store.write() as tx:
        key = keys.add(tx, "ann", project="search", now=0.0)
    with live(store) as url:
        made = [create(client(url, key), ["one"]).id for _ in range(2)]
        for batch_id in made:
            reaches(client(url, key), batch_id, "in_progress")
    store.close()
    salvaged = rebuild.salvage(database(settings))
    salvaged["job"] = []
    salvaged["batch"] = [row for row in salvaged["batch"] if row["id"] == made[0]]
    database(settings).unlink()
    again = Store.open(settings)
    rebuild.refill(again, salvaged, now=1.0)
    with again.read() as tx:
        found = {batch.id: batch for batch in batches.page(tx, "search", before=None, limit=9)}
        assert batches.page(tx, "default", before=None, limit=9) == []
    assert found.keys() == set(made)
    assert found[made[0]].file_id is not None, "its record was read"
    again.close()


def test_tags_of_a_user_make_no_batch_of_another_project() -> None:
    for tags in (None, "", "no JSON", "[]", '{"batch":"mine","project":"search"}', '{"project":"search"}'):
        assert batch_of_tags(tags)[1] == "default"


def test_keys_that_could_not_be_read_are_told(jobs: Jobs, settings: Settings) -> None:
    assert rebuild.is_whole_table(database(settings), "api_key")
    database(settings).write_bytes(b"garbage" * 1000)
    assert rebuild.KEYS_UNREAD in rebuild.rebuild(settings, now=1.0)


def test_drained_servers_stay_drained_and_forecasts_keep_their_history(
    jobs: Jobs, store: Store, settings: Settings
) -> None:
    with store.write() as tx:
        for url in ("http://gpu-1:8000", "http://gpu-2:8000"):
            servers.see(tx, sighting(url), 5.0)
        servers.drain(tx, "gpu-2", now=7.0)
        for slot in range(3):
            harvested.add(tx, slot, 10.0 * slot, 900.0 * slot, 900.0 * slot + 60.0)
        quarters = harvested.slots(tx)
    store.close()
    break_table(database(settings), "message")
    assert rebuild.SERVERS_UNREAD not in rebuild.rebuild(settings, now=1.0)
    with closing(Store.open(settings)) as again, again.read() as tx:
        assert select(again, "select url, seen_at, drained_at from server order by 1") == [
            ("http://gpu-1:8000", 5.0, None),
            ("http://gpu-2:8000", 5.0, 7.0),
        ]
        assert harvested.slots(tx) == quarters
        assert len(quarters) > 1


def sighting(url: str) -> Sighting:
    """A server that serves."""
    return Sighting(
        url=url, state="serving", model="m", version="1", alive=True, in_flight=0, waiting=0, tokens_per_s=0.0,
        why=None,
    )  # fmt: skip


@pytest.mark.parametrize("begun_again", [1, 2])
def test_a_repair_that_is_interrupted_begins_again_and_loses_nothing(
    jobs: Jobs, settings: Settings, monkeypatch: pytest.MonkeyPatch, begun_again: int
) -> None:
    conserve("cancel", jobs.queued)
    conserve("keys", "add", "ann")
    database = settings.sqlite_file
    assert database is not None
    break_table(database, "shard")
    with monkeypatch.context() as full:
        full.setattr(rebuild.counters, "never_again", Mock(side_effect=StoreFull("no space left")))
        for _ in range(begun_again):
            assert conserve("check", "--repair").returncode != 0
    found = conserve("check")
    assert found.returncode == 1
    assert "its repair was interrupted" in found.stdout + found.stderr
    move = ("store", "move", settings.store_url, f"sqlite:///{settings.home}/other.db")
    for words in (
        move,
        ("status",),
        ("run", "--endpoint", "fake:"),
        ("cancel", jobs.half),
        ("sql", "select 1"),
    ):
        done = conserve(*words)
        assert (done.returncode, "run: conserve check --repair" in done.stderr) == (1, True), done
    repaired = conserve("check", "--repair")
    assert repaired.returncode == 0, repaired.stderr
    assert conserve("check").returncode == 0
    states = {reading.id: reading.state for reading in read_jobs(settings, now=0.0)}
    assert states[jobs.queued] == "cancelled"
    assert "ann" in conserve("keys", "list").stdout
    assert results(jobs.half) == jobs.expected[jobs.half]


def test_a_process_that_waits_out_the_damage_does_not_open_the_half_made_database(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would claim rows of jobs that lack their answers, and take files of results for orphans."""
    add_job(store)
    store.close()  # as a harvester does in an outage
    refill = rebuild.refill

    def meanwhile(*given: Any, **named: Any) -> list[str]:
        with pytest.raises(StoreError, match="is under way or was interrupted"):
            claim(store)
        return refill(*given, **named)

    monkeypatch.setattr(rebuild, "refill", meanwhile)
    rebuild.rebuild(settings, now=7.0)
    assert claim(store) is not None


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("read", [True, False])
def test_a_store_that_is_rebuilt_more_than_once_keeps_its_id(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, interrupted: bool, read: bool
) -> None:
    """The id of a database before it takes the old one's is none of the place's."""
    add_job(store)
    store.close()
    lineage.note(store.home, store.place, "other")  # as an earlier version left it
    lineage.forget(store.home, store.place, "" if read else "other")
    for number in range(2):
        if not read:
            database(settings).write_bytes(b"garbage" * 1000)
        with monkeypatch.context() as full:
            if interrupted:
                full.setattr(rebuild.counters, "never_again", Mock(side_effect=StoreFull("no space left")))
                with pytest.raises(StoreFull):
                    rebuild.rebuild(settings, now=float(number))
        rebuild.rebuild(settings, now=10.0 + number)
        with closing(Store.open(settings)) as again:
            assert again.id == store.id
    assert lineage.ids(store.home, store.place) == [store.id, *["other"] * read]


@pytest.mark.parametrize("kept", ["", "-wal"])
def test_a_kill_between_two_renames_parts_no_log_from_its_database(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """The log of a database that was begun in its place goes with that."""
    add_job(store)
    path, rename = database(settings), Path.rename
    held = {file: file.read_bytes() for suffix in ("", "-wal") if (file := Path(f"{path}{suffix}"))}
    store.close()  # which empties the log
    for file, content in held.items():
        file.write_bytes(content)

    def killed(source: Path, to: Path) -> Path:
        if source == path.with_name(f"{path.name}{kept}"):
            raise KeyboardInterrupt
        return rename(source, to)

    with monkeypatch.context() as kill:
        kill.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            rebuild.rebuild(settings, now=7.0)
    with monkeypatch.context() as full:
        full.setattr(rebuild, "refill", Mock(side_effect=StoreFull("no space left")))
        with pytest.raises(StoreFull):
            rebuild.rebuild(settings, now=7.0)
    assert rebuild.rebuild(settings, now=8.0)[:2] == [
        "the damaged database is kept as conserve.db.damaged-7",
        "1 job was read from it",
    ]
    assert path.with_name(f"{path.name}.unfinished-8").exists()


def break_table(database: Path, table: str) -> None:
    """Overwrite the root page of a table."""
    with sqlite3.connect(database) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
        ((page,),) = connection.execute(
            "select rootpage from sqlite_master where name = ?", [table]
        ).fetchall()
        ((size,),) = connection.execute("pragma page_size").fetchall()
    connection.close()
    content = bytearray(database.read_bytes())
    content[(page - 1) * size : (page - 1) * size + 40] = b"\xff" * 40
    database.write_bytes(content)
