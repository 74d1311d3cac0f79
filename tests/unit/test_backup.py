"""`conserve store backup` and `restore`: whole, at one moment, while the store is in use, and after kills."""

import errno
import itertools
import json
import os
import random
import resource
import shlex
import shutil
import signal
import sqlite3
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve import __version__
from conserve.cli.found_promises import tuned_file
from conserve.config import Settings, load
from conserve.errors import SettingsError, StoreDamaged, StoreError, StoreFull, StoreInUse
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog, shards
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import FailedBy
from conserve.store.copying import backup as backups
from conserve.store.copying import contents, filling, manifest, restore
from conserve.store.copying.backup import closing_engine
from conserve.store.copying.manifest import Manifest
from conserve.store.database import lineage, schema
from conserve.store.database.connection import address, engine_of
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from conserve.store.files import digests, layout, marks, nights
from conserve.store.files.place import place_of
from tests import commands, submitting
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked
from tests.commands import Done, conserve
from tests.conftest import StartForked
from tests.postgres import Databases
from tests.store_rows import LEASE_S, add_job, claim, finish, leased, select
from tests.tiers import in_full

ROWS = 40
BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
SQLITE_FIRST = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Points CONSERVE_STORE at a new database each time, the first with tables; for SQLite the home decides."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return lambda: None
    databases: Databases = request.getfixturevalue("databases")

    def another() -> None:
        monkeypatch.setenv("CONSERVE_STORE", databases.new(empty=True))

    monkeypatch.setenv("CONSERVE_STORE", databases.new())
    return another


def submit(folder: Path, name: str, rows: int = ROWS, **options: str) -> str:
    path = folder / f"{name}.jsonl"
    lines = [{"q": f"{name} {n}" + (" REJECT" if n % 8 == 5 else "")} for n in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [word for option in options.items() for word in (f"--{option[0]}", option[1])]
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run(*jobs: str) -> Done:
    done = conserve("run", *jobs, "--endpoint", "fake:")
    assert "Traceback" not in done.stderr
    return done


def results(job_id: str) -> dict[int, tuple[str | None, str | None]]:
    rows = [json.loads(line) for line in conserve("results", job_id).stdout.splitlines()]
    found = {row["row_index"]: (row["text"], row["error_type"]) for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


@pytest.fixture
def jobs(tmp_path: Path, database: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A job that is done, one whose results are in the journal, and one that is queued."""
    made = [submit(tmp_path, "done"), submit(tmp_path, "half"), submit(tmp_path, "queued")]
    run(made[0])
    with monkeypatch.context() as patch:
        patch.setattr("conserve.store.books.shards.compact", lambda *_, **__: 0)
        run(made[1])
    return made


def checked() -> Done:
    done = conserve("check")
    assert "nothing is damaged" in done.stderr, done
    return done


def restored(
    backup: Path, where: Path, another: Callable[[], None], patch: pytest.MonkeyPatch, *words: str
) -> Done:
    """Restore a backup into another home and another database, which commands use from then on."""
    another()
    patch.setenv("CONSERVE_HOME", str(where))
    done = conserve("store", "restore", str(backup), *words)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_restore_prints_the_command_that_checks_its_store(
    jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_flag: bool
) -> None:
    backup, where = tmp_path / "monday", tmp_path / "new home"
    assert conserve("store", "backup", str(backup)).returncode == 0
    named = ["--home", str(where)] if by_flag else []
    with monkeypatch.context() as patch:
        if not by_flag:
            patch.setenv("CONSERVE_HOME", str(where))
        done = conserve(*named, "store", "restore", str(backup))
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stderr.partition("look at it with: ")[2])
    at = words.index("conserve")
    variables = dict(word.split("=", 1) for word in words[:at])
    assert words[at + 1 :] == [*named, "check"]
    assert variables == ({} if by_flag else {"CONSERVE_HOME": str(where)})
    assert f"nothing is damaged ({len(jobs)} jobs" in conserve(*words[at + 1 :], **variables).stderr


@pytest.mark.parametrize(
    ("form", "database"),
    [
        *(("folder", "sqlite"), ("archive", "sqlite"), ("folder", "postgresql")),
        *in_full(("archive", "postgresql"), ("copies", "sqlite"), ("copies", "postgresql")),
    ],
    indirect=["database"],
)
def test_a_backup_is_the_store_at_one_moment(
    jobs: list[str],
    tmp_path: Path,
    database: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    expected = {job_id: results(job_id) for job_id in jobs[:2]}
    backup = tmp_path / ("monday.tar" if form == "archive" else "monday")
    done = conserve("store", "backup", str(backup), *["--copy"] * (form == "copies"))
    assert (done.returncode, done.stdout) == (0, f"{backup}\n"), done.stderr
    assert "backed up 3 jobs, " in done.stderr
    run()  # the store goes on: none of that is in the backup
    conserve("rm", jobs[0], "--yes")
    done = restored(backup, tmp_path / "again", database, monkeypatch)
    assert done.returncode == 0, done.stderr
    checked()
    assert {job_id: results(job_id) for job_id in jobs[:2]} == expected
    assert results(jobs[2]) == {}
    assert run().returncode == 5  # rows that are rejected
    assert len(results(jobs[2])) == ROWS
    checked()
    assert not list(tmp_path.glob(".*partial*"))
    assert not (tmp_path / "again" / restore.SCRATCH).exists()


def test_a_backup_on_the_same_disk_takes_no_room_for_files(jobs: list[str], tmp_path: Path) -> None:
    """Hard links, but of the mark, which is rewritten in its place."""
    made = conserve("store", "backup", str(tmp_path / "one"))
    assert made.returncode == 0
    folder = tmp_path / "one" / "jobs" / jobs[0]
    assert (folder / layout.REQUESTS).stat().st_nlink == 2
    assert (folder / marks.MARK).stat().st_nlink == 1
    conserve("store", "backup", str(tmp_path / "two"), "--copy")
    assert (tmp_path / "two" / "jobs" / jobs[0] / layout.REQUESTS).stat().st_nlink == 1


@pytest.mark.parametrize("files", [1, 2])
def test_an_input_that_is_a_link_is_copied_since_its_owner_may_overwrite_it(
    store: Store, tmp_path: Path, files: int
) -> None:
    """The rows of a restored job stay those of the backup."""
    inputs = [tmp_path / f"{number}.parquet" for number in range(files)]
    for path in inputs:
        pq.write_table(pa.table({"q": ["one", "two"]}), path)
    submitted = conserve("submit", *map(str, inputs), "--prompt", "{{ q }}", "--keep-input", "link")
    job_id = submitted.stdout.strip()
    assert conserve("store", "backup", str(tmp_path / "monday")).returncode == 0
    folder = tmp_path / "monday" / "jobs" / job_id
    kept = [folder / layout.INPUTS] if files == 1 else sorted((folder / layout.PARTS).iterdir())
    assert [path.stat().st_nlink for path in kept] == [1] * files
    assert (folder / layout.REQUESTS).stat().st_nlink == 2
    for path in inputs:
        path.write_bytes(b"overwritten in its place")
    assert [pq.read_table(path)["q"].to_pylist() for path in kept] == [["one", "two"]] * files
    where = {"CONSERVE_HOME": str(tmp_path / "again")}
    assert conserve("store", "restore", str(tmp_path / "monday"), **where).returncode == 0
    assert conserve("run", "--endpoint", "fake:", **where).returncode == 0


def test_a_backup_is_a_home_that_can_be_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(tmp_path, "one")
    run()
    expected = results(job_id)
    assert conserve("store", "backup", str(tmp_path / "monday")).returncode == 0
    before = sorted(path.name for path in (tmp_path / "monday").iterdir())
    monkeypatch.setenv("CONSERVE_HOME", str(tmp_path / "monday"))
    checked()
    assert results(job_id) == expected
    assert {"conserve.db", "jobs", "backup.json"} <= set(before)
    for words in (("check", "--repair"), ("retry", job_id), ("rm", job_id, "--yes")):
        done = conserve(*words)
        assert (done.returncode, "conserve --home NEW store restore" in done.stderr) == (1, True), done.stderr
    assert manifest.read(tmp_path / "monday").tables["job"] == 1, "its database is what was written"


@BOTH
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_backup_is_read_itself_whatever_database_the_settings_name(
    jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_flag: bool
) -> None:
    monkeypatch.setenv("CONSERVE_STORE", load().store_url)
    monkeypatch.setenv("CONSERVE_DATA", str(load().home))
    backup = tmp_path / "monday"
    assert conserve("store", "backup", str(backup)).returncode == 0
    conserve("rm", jobs[0], "--yes")  # from the live store
    named = ["--home", str(backup)] if by_flag else []
    with monkeypatch.context() as patch:
        if not by_flag:
            patch.setenv("CONSERVE_HOME", str(backup))
        listed = json.loads(conserve(*named, "jobs", "--json").stdout)
        assert [job["id"] for job in reversed(listed)] == jobs
        assert "nothing is damaged (3 jobs" in conserve(*named, "check").stderr
        (backup / "jobs" / jobs[2] / layout.REQUESTS).unlink()
        done = conserve(*named, "check")
        assert (done.returncode, jobs[2] in done.stdout) == (1, True), done
        assert conserve(*named, "rm", jobs[1], "--yes").returncode == 1
    assert "nothing is damaged (2 jobs" in conserve("check").stderr


@SQLITE_FIRST
def test_shards_that_go_meanwhile_are_not_missed(
    jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Callable[[], None]
) -> None:
    """A retry drops the shard of failed rows between the copy of the database and that of the files."""
    once = iter([None])
    real = contents.take

    def take(*arguments: Any, **named: Any) -> list[str]:
        for _ in once:
            assert conserve("retry", jobs[0]).returncode == 0
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(contents, "take", take)
        done = conserve("store", "backup", str(tmp_path / "monday"))
    assert (done.returncode, "1 files went meanwhile" in done.stderr) == (0, True), done.stderr
    assert restored(tmp_path / "monday", tmp_path / "again", database, monkeypatch).returncode == 0
    checked()
    assert len(results(jobs[0])) == ROWS - 5  # the others wait again


def test_a_file_that_the_store_lacks_is_named_and_the_rest_is_kept(jobs: list[str], tmp_path: Path) -> None:
    folder = settings_home(tmp_path) / "jobs" / jobs[2]
    for name in (layout.REQUESTS, layout.INPUTS, marks.MARK):
        (folder / name).unlink()
    done = conserve("store", "backup", str(tmp_path / "monday"))
    assert done.returncode == 1
    assert "3 files of the store are missing; run: conserve check" in done.stderr
    lost = (layout.INPUTS, marks.MARK, layout.REQUESTS)
    assert manifest.read(tmp_path / "monday").missing == tuple(f"jobs/{jobs[2]}/{name}" for name in lost)


def settings_home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_rows_under_a_lease_wait_again_and_a_late_writer_commits_nothing(
    store: Store, tmp_path: Path, settings: Settings
) -> None:
    job_id = submit(tmp_path, "one")
    lease = claim(store, owner="elsewhere:1:2:3", limit=4)
    assert lease is not None
    made = backups.backup(store, tmp_path / "monday", now=5.0, copy=False, say=print)
    where = load({"home": tmp_path / "again"}, environ={})
    restore.restore(where, tmp_path / "monday", now=1e9, copy=False, told=lambda *_: None)
    with closing(Store.open(where)) as again:
        assert again.id == store.id == made.store_id
        assert select(again, "select * from lease") == []
        next_one = claim(again, now=1.0, lease_s=LEASE_S)
        assert next_one is not None
        assert (next_one.job_id, next_one.epoch) == (job_id, 10**12 + 1)


@pytest.mark.parametrize("harm", ["folder", "manifest", "database", "archive", "later"])
def test_what_is_no_whole_backup_is_refused(
    store: Store, tmp_path: Path, harm: str, settings: Settings
) -> None:
    submit(tmp_path, "one")
    backup = tmp_path / ("monday.tar" if harm == "archive" else "monday")
    backups.backup(store, backup, now=5.0, copy=False, say=print)
    if harm == "folder":
        (backup / manifest.MANIFEST).unlink()
    elif harm == "manifest":
        (backup / manifest.MANIFEST).write_text('{"format": 1')
    elif harm == "database":
        content = bytearray((backup / manifest.DATABASE).read_bytes())
        content[5000] ^= 1
        (backup / manifest.DATABASE).write_bytes(content)
    elif harm == "archive":
        backup.write_bytes(b"nonsense" * 100)
    else:
        found = json.loads((backup / manifest.MANIFEST).read_text())
        (backup / manifest.MANIFEST).write_text(json.dumps({**found, "format": 99}))
    where = load({"home": tmp_path / "again"}, environ={})
    with pytest.raises(StoreError, match="backup"):
        restore.restore(where, backup, now=6.0, copy=False, told=lambda *_: None)
    assert not (tmp_path / "again" / "jobs").exists()


@SQLITE_FIRST
def test_a_home_or_a_database_that_is_in_use_is_not_restored_over(
    jobs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Callable[[], None]
) -> None:
    backup = tmp_path / "monday"
    assert conserve("store", "backup", str(backup)).returncode == 0
    done = conserve("store", "restore", str(backup))
    assert (done.returncode, "has jobs; set CONSERVE_HOME" in done.stderr) == (2, True), done.stderr
    shutil.rmtree(load().home / "jobs")
    done = conserve("store", "restore", str(backup))
    assert (done.returncode, "is not empty; set CONSERVE_STORE" in done.stderr) == (2, True), done.stderr
    database()
    monkeypatch.setenv("CONSERVE_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / "jobs" / "x").mkdir(parents=True)
    done = conserve("store", "restore", str(backup))
    assert (done.returncode, "has jobs" in done.stderr) == (2, True), done.stderr
    assert conserve("store", "restore", str(tmp_path / "none")).returncode == 2


def test_a_name_that_is_taken_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name in ("full", "full/file", "none/monday"):
        with pytest.raises(SettingsError):
            backups.backup(store, tmp_path / name, now=5.0, copy=False, say=print)
    with backups.scratch_folder(tmp_path / "monday"), pytest.raises(StoreInUse, match="another backup"):
        backups.backup(store, tmp_path / "monday", now=5.0, copy=False, say=print)


@pytest.fixture
def stored(store: Store, tmp_path: Path) -> Store:
    """A store with a job of ten rows, of which six are in shards, one of them failed."""
    path = tmp_path / "input.jsonl"
    path.write_text("".join(f'{{"q": "{n}"}}\n' for n in range(10)))
    job_id = submitting.submit(store, str(path), Task(kind=Kind.PROMPT, template="{{ q }}")).job_id
    finish(store, leased(store, limit=6), failed=(5,))
    assert shards.compact(store, job_id, now=0.0) == 6
    return store


def backed_up(store: Store, to: Path, *, copy: bool = False) -> Manifest:
    return backups.backup(store, to, now=5.0, copy=copy, say=lambda sentence: None)


def brought_back(where: Settings, backup: Path, *, copy: bool = False) -> Manifest:
    return restore.restore(where, backup, now=1e9, copy=copy, told=lambda *_: None)


def elsewhere(tmp_path: Path, **named: str) -> Settings:
    return load({"home": tmp_path / "again", **named}, environ={})


def open_files(part: str) -> list[str]:
    """Files that this process has open and whose paths have this part."""
    names = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for name in names if part in name]


def files(folder: Path) -> list[str]:
    """Files in a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@BOTH
def test_the_manifest_says_what_a_backup_holds(stored: Store, tmp_path: Path) -> None:
    made = backed_up(stored, tmp_path / "monday")
    folder = tmp_path / "monday"
    assert manifest.read(folder) == made
    held = [name for name in files(folder) if name not in (manifest.DATABASE, manifest.MANIFEST)]
    assert (made.files, made.missing) == (len(held), ())
    assert made.file_bytes == sum((folder / name).stat().st_size for name in held) > 0
    assert (made.version, made.made_at, made.store_id) == (__version__, 5.0, stored.id)
    assert made.source == address(stored.engine)
    assert made.database == digests.seal(folder / manifest.DATABASE)
    assert made.tables.keys() == set(schema.metadata.tables)
    assert [made.tables[name] for name in ("job", "shard", "lease", "hook")] == [1, 2, 0, 0]
    assert backed_up(stored, tmp_path / "tuesday").id != made.id
    assert open_files("monday") == []
    assert json.loads((folder / manifest.MANIFEST).read_text())["format"] == 1


@BOTH
def test_the_database_of_a_backup_is_one_file(stored: Store, tmp_path: Path) -> None:
    """A write-ahead log beside it would be part of it. A reader of a folder that is read-only could make none."""
    backed_up(stored, tmp_path / "monday")
    assert [path.name for path in (tmp_path / "monday").iterdir() if "conserve" in path.name] == [
        "conserve.db"
    ]
    with (tmp_path / "monday" / "conserve.db").open("rb") as file:
        assert file.read(20)[18:] == b"\1\1"  # versions of the format without such a log


@BOTH
def test_an_archive_holds_the_same_files(stored: Store, tmp_path: Path) -> None:
    backed_up(stored, tmp_path / "monday")
    made = backed_up(stored, tmp_path / "monday.tar")
    with tarfile.open(tmp_path / "monday.tar") as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == files(tmp_path / "monday")
        assert {member.type for member in members} == {tarfile.REGTYPE}
    assert sorted(path.name for path in tmp_path.glob("*monday*")) == ["monday", "monday.tar"]
    assert brought_back(elsewhere(tmp_path), tmp_path / "monday.tar") == made


def test_a_store_and_a_backup_may_have_names_with_marks_of_urls(stored: Store, tmp_path: Path) -> None:
    """Put the database into a folder as Jenkins names a branch's, feature%2Fx, and into no other."""
    backed_up(stored, tmp_path / "first")
    where = load({"home": tmp_path / "a%2Fb?c#d"}, environ={})
    brought_back(where, tmp_path / "first")
    assert where.sqlite_file == where.home / "conserve.db"
    assert where.sqlite_file.exists()
    with closing(Store.open(where)) as again, closing(Store.open_to_read(where)) as reader:
        made = backed_up(again, tmp_path / "b%20?k")
        assert again.place == reader.place == "conserve.db"
        assert (made.tables["job"], again.id) == (1, stored.id)
    assert manifest.read(tmp_path / "b%20?k") == made
    with closing_engine(engine_of(made.source)) as engine:
        assert Path(engine.url.database or "") == where.sqlite_file
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a%2Fb?c#d", "b%20?k", "first", "home", "input.jsonl"]
    )


def test_evaluations_profiles_and_tuned_promises_are_taken_and_locks_are_not(
    stored: Store, tmp_path: Path
) -> None:
    tuned = str(tuned_file(Settings(home=stored.home), "m").relative_to(stored.home))
    taken = ["evals/names.json", "evals/runs/a/run.json", "profiles/cpu.json", tuned]
    for name in (*taken, "evals/nightly.lock", "profiles/.cpu.json.17", "notes/mine.txt"):
        (stored.home / name).parent.mkdir(parents=True, exist_ok=True)
        (stored.home / name).write_text(name)
    made = backed_up(stored, tmp_path / "monday")
    assert made.files == len(files(tmp_path / "monday")) - len([manifest.DATABASE, manifest.MANIFEST])
    kept = [name for name in files(tmp_path / "monday") if not name.startswith("jobs/")]
    assert kept == sorted([manifest.DATABASE, manifest.MANIFEST, *taken])
    brought_back(elsewhere(tmp_path), tmp_path / "monday")
    assert [(tmp_path / "again" / name).read_text() for name in taken] == taken


def test_a_file_that_the_last_copy_does_not_name_is_left_out(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry drops the shard of failed rows after it was taken, and another file makes a second look needed."""
    ((job_id,),) = select(stored, "select id from job")
    real, first = contents.take, iter([True])

    def take(*arguments: Any, **named: Any) -> list[str]:
        missing = real(*arguments, **named)
        if next(first, False):
            assert shards.retry_failed(stored, job_id, now=0.0) == 1
            missing.append("another")
        return missing

    monkeypatch.setattr(contents, "take", take)
    made = backed_up(stored, tmp_path / "monday")
    held = files(tmp_path / "monday")
    assert sum("/results/" in name for name in held) == made.tables["shard"] == 1
    assert (made.files, made.missing) == (len(held) - 2, ())


def test_all_inputs_of_a_job_are_taken(stored: Store, tmp_path: Path) -> None:
    (job_id,) = (row[0] for row in select(stored, "select id from job"))
    folder = layout.job_folder(stored.home, job_id)
    (folder / layout.INPUTS).unlink()
    (folder / layout.PARTS).mkdir()
    names = [f"{layout.PARTS}/{number:05}.parquet" for number in range(2)]
    for name in names:
        (folder / name).write_text(name)
    parts = [{"path": f"/in/{name}", "size": 1, "mtime_ns": 1, "digest": "x", "kept": name} for name in names]
    source = json.dumps({"path": "/in", "format": "parquet", "parts": parts})
    with stored.write() as tx:
        tx.execute(schema.job.update().values(source=source))
    assert backed_up(stored, tmp_path / "monday").missing == ()
    assert files(tmp_path / "monday" / "jobs" / job_id) == files(folder)
    (folder / names[1]).unlink()
    assert backed_up(stored, tmp_path / "tuesday").missing == (f"jobs/{job_id}/{names[1]}",)


def test_a_folder_that_is_empty_may_be_named(stored: Store, tmp_path: Path) -> None:
    (tmp_path / "monday").mkdir()
    assert backed_up(stored, tmp_path / "monday") == manifest.read(tmp_path / "monday")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full", "full is there already"),
        ("full/file", "file is there already"),
        ("none/monday", "there is no folder .*none"),
        ("full/file/monday", "there is no folder .*file"),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused_with_the_reason(
    store: Store, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SettingsError, match=said):
        backed_up(store, tmp_path / name)
    assert files(tmp_path / "full") == ["file"]


def test_what_a_killed_backup_left_is_not_taken_for_a_file_of_the_next(stored: Store, tmp_path: Path) -> None:
    left = tmp_path / ".monday.partial"
    for name in [*files(stored.home), "jobs/other/job.json", manifest.MANIFEST]:
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text("half of it")
    backed_up(stored, tmp_path / "monday")
    for name in files(tmp_path / "monday"):
        if name.startswith("jobs/"):
            assert (tmp_path / "monday" / name).read_bytes() == (stored.home / name).read_bytes()
    assert "jobs/other/job.json" not in files(tmp_path / "monday")
    assert not left.exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "foreign"])
def test_a_backup_empties_no_folder_but_its_own(
    stored: Store, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, left = tmp_path / "target", tmp_path / ".monday.partial"
    target.mkdir()
    (target / "kept").write_text("mine")
    if kind == "file":
        left.touch()
    elif kind == "foreign":
        left.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    else:
        left.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(
        SettingsError, match=r"\.monday\.partial is in the way: it is not a folder of this user's"
    ):
        backed_up(stored, tmp_path / "monday")
    assert files(target) == ["kept"]
    assert open_files("monday") == []


def test_an_archive_is_not_written_through_a_link(stored: Store, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / ".monday.tar.tar-partial").symlink_to(target)
    backed_up(stored, tmp_path / "monday.tar")
    assert target.read_text() == "mine"
    assert not (tmp_path / "monday.tar").is_symlink()


@pytest.mark.parametrize("name", ["monday", "monday.tar", "monday-database"])
def test_a_full_disk_leaves_nothing(
    stored: Store, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a file of a job, the archive or the database is what no longer fits."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == "monday-database":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, most))
    else:
        monkeypatch.setattr(contents if name == "monday" else backups, "sync", full)
    try:
        with pytest.raises(StoreFull, match=f"no space left in {tmp_path};"):
            backed_up(stored, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert not list(tmp_path.glob("*monday*"))
    assert open_files("monday") == []


def test_a_source_that_cannot_be_read_is_told(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(backups, "reader", locked)
    with pytest.raises(StoreError, match=r"the store .*/home/conserve.db failed: database is locked"):
        backed_up(stored, tmp_path / "monday")


@BOTH
@pytest.mark.parametrize(("home_mode", "mode", "archive"), [(0o750, 0o640, 0o640), (0o700, 0o644, 0o600)])
def test_nobody_may_read_a_backup_who_may_not_read_the_store(
    stored: Store, tmp_path: Path, home_mode: int, mode: int, archive: int
) -> None:
    stored.home.chmod(home_mode)
    if stored.engine.dialect.name == "sqlite":
        (stored.home / manifest.DATABASE).chmod(mode)
    else:
        mode = archive = 0o600
    backed_up(stored, tmp_path / "monday")
    backed_up(stored, tmp_path / "monday.tar")
    names = ("monday", f"monday/{manifest.DATABASE}", "monday.tar")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in names] == [home_mode, mode, archive]


@pytest.mark.parametrize("name", ["monday", "monday.tar"])
def test_a_backup_is_flushed_before_it_gets_its_name_and_the_name_afterwards(
    stored: Store, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Path] = []
    after: list[Path] = []

    def sync(path: Path) -> None:
        (after if (tmp_path / name).exists() else before).append(path)

    for module in (backups, contents):
        monkeypatch.setattr(module, "sync", sync)
    backed_up(stored, tmp_path / name, copy=True)
    assert after == [tmp_path]
    if name == "monday.tar":
        assert before[-1] == tmp_path / ".monday.tar.tar-partial"
        return
    scratch = tmp_path / ".monday.partial"
    flushed = {path.relative_to(scratch).with_name(path.name.removeprefix(".").removesuffix(".partial"))
               for path in before if path != scratch}  # fmt: skip
    assert scratch in before
    everything = {path.relative_to(tmp_path / "monday") for path in (tmp_path / "monday").rglob("*")}
    assert flushed == everything


def test_files_that_stay_away_are_looked_for_once_more_and_those_that_go_five_times(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Path] = []
    real = backups.copy_database

    def copy_database(store: Store, path: Path) -> None:
        copied.append(path)
        real(store, path)

    monkeypatch.setattr(backups, "copy_database", copy_database)
    gone = sorted(
        name for name in files(stored.home) if name.endswith("requests.parquet") or "/results/" in name
    )
    for name in gone:
        (stored.home / name).unlink()
    said: list[str] = []
    made = backups.backup(stored, tmp_path / "monday", now=5.0, copy=False, say=said.append)
    assert (len(copied), said) == (2, ["3 files went meanwhile; the database is copied again"])
    assert made.missing == tuple(gone)
    numbers = iter(range(100))
    monkeypatch.setattr(contents, "take", lambda *_, **__: [f"jobs/{next(numbers)}"])
    copied.clear()
    with pytest.raises(StoreError):  # the made-up files are not there
        backups.backup(stored, tmp_path / "tuesday", now=5.0, copy=False, say=said.append)
    assert len(copied) == 5


def test_a_record_of_an_evaluation_names_no_file_that_its_backup_lacks(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite ends during the backup: its items are written, and then the record."""
    run = nights.folder_of(stored.home, "a")
    run.mkdir(parents=True)
    (run / nights.RECORD).write_text("{}")
    real, listings = contents.beside, itertools.count()

    def beside(where: Path) -> list[str]:
        found, number = list(real(where)), next(listings)
        (run / f"items-{number}.parquet").write_bytes(b"")
        (run / ".new").write_text(f'{{"file": "items-{number}.parquet"}}')
        (run / ".new").rename(run / nights.RECORD)
        return found

    monkeypatch.setattr(contents, "beside", beside)
    backed_up(stored, tmp_path / "monday")
    folder = nights.folder_of(tmp_path / "monday", "a")
    assert (folder / json.loads((folder / nights.RECORD).read_text())["file"]).exists()


def test_a_run_of_an_evaluation_that_begins_during_a_backup_is_left_out(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time its record is copied, that may name files which were not listed."""
    real, left = contents.beside, iter(["a", "b"])

    def beside(where: Path) -> list[str]:
        """List the files once a run has begun."""
        run = nights.folder_of(stored.home, next(left))
        run.mkdir(parents=True)
        (run / nights.RECORD).write_text("{}")
        (run / "items-sql.parquet").write_bytes(b"")
        return list(real(where))

    monkeypatch.setattr(contents, "beside", beside)
    backed_up(stored, tmp_path / "monday")
    assert [name for name in files(tmp_path / "monday") if name.startswith(nights.EVALS)] == [
        "evals/runs/a/items-sql.parquet",
        f"evals/runs/a/{nights.RECORD}",
    ]


@pytest.mark.parametrize("moment", ["listed", "recorded", "taken"])
def test_a_run_of_an_evaluation_that_is_removed_meanwhile_is_left_out(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    runs = [nights.folder_of(stored.home, name) for name in ("a", "b")]
    for run in runs:
        run.mkdir(parents=True)
        (run / nights.RECORD).write_text("{}")
        (run / "items-sql.parquet").write_bytes(b"")
    if moment != "listed":
        real, left = contents.beside, iter([0] if moment == "recorded" else [1, 0])

        def beside(where: Path) -> list[str]:
            found = list(real(where))
            if next(left, 1) == 0:
                shutil.rmtree(runs[0])
            return found

        monkeypatch.setattr(contents, "beside", beside)
    else:
        scan = os.scandir

        def listed(path: Any) -> Any:
            if not isinstance(path, int) and Path(path) == runs[0]:
                shutil.rmtree(path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", listed)
    made = backed_up(stored, tmp_path / "monday")
    assert [name for name in files(tmp_path / "monday") if name.startswith(nights.EVALS)] == [
        "evals/runs/b/items-sql.parquet",
        f"evals/runs/b/{nights.RECORD}",
    ]
    assert (made.missing, made.files) == ((), len(files(tmp_path / "monday")) - 2)


def test_an_evaluation_that_cannot_be_listed_ends_the_backup(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def failing(path: Any) -> Any:
        if not isinstance(path, int) and Path(path) == nights.runs_folder(stored.home):
            raise OSError(errno.EIO, "Input/output error")
        return scan(path)

    nights.runs_folder(stored.home).mkdir(parents=True)
    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(StoreError, match="Input/output error"):
        backed_up(stored, tmp_path / "monday")


@pytest.mark.parametrize("name", ["monday.tar.gz", "monday.tgz", "monday.tar.zst"])
def test_a_packed_archive_is_refused(stored: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"write a \.tar, and pack it afterwards"):
        backed_up(stored, tmp_path / name)
    assert not list(tmp_path.glob("*monday*"))


def test_files_elsewhere_are_not_taken(tmp_path: Path) -> None:
    where = load({"home": tmp_path / "home", "data": str(tmp_path / "files")}, environ={})
    with (
        closing(Store.open(where)) as store,
        pytest.raises(SettingsError, match=f"lie in {tmp_path / 'files'}"),
    ):
        backed_up(store, tmp_path / "monday")
    assert not list(tmp_path.glob("*monday*"))


# Files that are taken


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with a file and a mark, and an empty one."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "jobs" / "a").mkdir(parents=True)
    target.mkdir()
    (source / "jobs" / "a" / "file").write_bytes(b"new")
    place_of(source / "jobs" / "a").set_mark(marks.Mark(store_id="x"))
    return source, target


NAMES = ["jobs/a/file", f"jobs/a/{marks.MARK}"]


def test_files_that_are_there_stay_and_marks_are_taken_again(folders: tuple[Path, Path]) -> None:
    source, target = folders
    for _ in range(2):
        assert contents.take([*NAMES, "jobs/b/none"], source, target, copy=False) == ["jobs/b/none"]
    assert [(target / name).stat().st_nlink for name in NAMES] == [2, 1]
    (target / NAMES[0]).unlink()
    (target / NAMES[0]).write_bytes(b"old")
    place_of(source / "jobs" / "a").set_mark(marks.Mark(store_id="y"))
    assert contents.take(NAMES, source, target, copy=True) == []
    assert (target / NAMES[0]).read_bytes() == b"old"
    assert place_of(target / "jobs" / "a").mark() == marks.Mark(store_id="y")
    assert files(target) == NAMES


def test_another_file_system_gets_copies(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folders

    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    assert contents.take(NAMES, source, target, copy=False) == []
    assert (target / NAMES[0]).read_bytes() == b"new"
    assert (target / NAMES[0]).stat().st_nlink == 1


def test_a_file_that_cannot_be_flushed_is_not_left_half_done(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folders

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(contents, "sync", full)
    with pytest.raises(OSError, match="No space"):
        contents.take(NAMES, source, target, copy=True)
    assert files(target) == []


def test_a_mark_that_was_just_being_rewritten_is_read_again(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folders
    real, torn = shutil.copy2, iter([True])

    def copy(path: Path, to: Path) -> None:
        real(path, to)
        if path.name == marks.MARK and next(torn, False):
            to.write_bytes(to.read_bytes()[:7])

    monkeypatch.setattr(shutil, "copy2", copy)
    assert contents.take(NAMES, source, target, copy=True) == []
    assert place_of(target / "jobs" / "a").mark() == marks.Mark(store_id="x")


# Restores


@BOTH
def test_a_restore_brings_every_row_and_file_back(
    stored: Store, tmp_path: Path, database: Callable[[], None]
) -> None:
    made = backed_up(stored, tmp_path / "monday")
    database()
    told: Counter[str] = Counter()

    def tell(name: str, rows: int) -> None:
        told[name] += rows

    where = replace(elsewhere(tmp_path), store=os.environ.get("CONSERVE_STORE"))
    before = files(tmp_path / "monday")
    assert restore.restore(where, tmp_path / "monday", now=6.0, copy=False, told=tell) == made
    assert dict(told) == {name: rows for name, rows in made.tables.items() if rows}
    assert files(tmp_path / "monday") == before, "the backup stays as it is"
    assert manifest.read(tmp_path / "monday") == made
    jobs = [name for name in files(where.home) if name.startswith("jobs/")]
    assert jobs == [name for name in before if name.startswith("jobs/")]
    assert {name for name in files(where.home) if not name.startswith("jobs/")} <= {
        "conserve.db",
        "stores.json",
    }
    with closing(Store.open(where)) as again:
        assert lineage.ids(where.home, again.place) == [stored.id]
        assert select(again, "select count(*), sum(num_rows) from shard") == [(2, 6)]


@BOTH
def test_the_cause_of_a_failure_is_in_a_backup(
    stored: Store, tmp_path: Path, database: Callable[[], None]
) -> None:
    ((job_id,),) = select(stored, "select id from job")
    with stored.write() as tx:
        catalog.refuse(tx, job_id, "it cannot be read", FailedBy.DAMAGE, now=0.0)
    backed_up(stored, tmp_path / "monday")
    database()
    where = replace(elsewhere(tmp_path), store=os.environ.get("CONSERVE_STORE"))
    brought_back(where, tmp_path / "monday")
    with closing(Store.open(where)) as again:
        assert select(again, "select state, failed_by from job") == [("failed", "damage")]


def test_a_restore_makes_up_for_a_repair_that_was_interrupted(stored: Store, tmp_path: Path) -> None:
    backed_up(stored, tmp_path / "monday")
    where = elsewhere(tmp_path)
    where.home.mkdir()
    (where.home / "conserve.db.damaged-1").write_bytes(b"damaged")
    (where.home / "conserve.db.rebuilding").write_text("conserve.db.damaged-1")
    with pytest.raises(StoreError, match="run: conserve check --repair"):
        Store.open(where)
    brought_back(where, tmp_path / "monday")
    with closing(Store.open(where)) as again:
        assert select(again, "select count(*) from job") == [(1,)]


@pytest.mark.parametrize(("copy", "links"), [(False, 3), (True, 2)])
def test_files_of_a_backup_are_linked_or_copied(
    stored: Store, tmp_path: Path, copy: bool, links: int
) -> None:
    backed_up(stored, tmp_path / "monday")
    brought_back(elsewhere(tmp_path), tmp_path / "monday", copy=copy)
    (name,) = (name for name in files(tmp_path / "again") if name.endswith(layout.REQUESTS))
    assert (tmp_path / "monday" / name).stat().st_nlink == links


def test_files_of_an_archive_are_flushed(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked files are on no disk yet."""
    backed_up(stored, tmp_path / "monday.tar")
    flushed: list[Path] = []
    monkeypatch.setattr(contents, "sync", flushed.append)
    brought_back(elsewhere(tmp_path), tmp_path / "monday.tar")
    again = tmp_path / "again"
    held = {path for path in (again / "jobs").rglob("*") if path.is_file()}
    assert held <= {path.with_name(path.name.removeprefix(".").removesuffix(".partial")) for path in flushed}
    assert {again, again / "jobs"} <= set(flushed)


def test_a_backup_of_an_earlier_version_is_brought_up_to_date(stored: Store, tmp_path: Path) -> None:
    """In a copy: the backup stays as it is, also when a command reads it where it is."""
    backed_up(stored, tmp_path / "monday")
    database = tmp_path / "monday" / manifest.DATABASE
    with closing(sqlite3.connect(database)) as tx:
        for statement in (
            "drop table feeding",
            "drop table server",
            "update meta set value = '9' where key = 'version'",
        ):
            tx.execute(statement)
        tx.commit()
    found = json.loads((tmp_path / "monday" / manifest.MANIFEST).read_text())
    found["database"] = asdict(digests.seal(database))
    (tmp_path / "monday" / manifest.MANIFEST).write_text(json.dumps(found))
    with closing(Store.open_to_read(load({"home": tmp_path / "monday"}, environ={}))) as old:
        assert select(old, "select value from meta where key = 'version'") == [(str(LATEST),)]
        assert select(old, "select count(*) from job") == [(1,)]
    made = brought_back(elsewhere(tmp_path), tmp_path / "monday")
    assert made.database == digests.seal(database)
    with closing(Store.open(elsewhere(tmp_path))) as again:
        assert select(again, "select value from meta where key = 'version'") == [(str(LATEST),)]
        assert select(again, "select * from feeding") == []


def test_a_backup_that_goes_while_it_is_read_is_no_store(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database stays marked, and the same command goes on once the backup is back."""
    backed_up(stored, tmp_path / "monday")
    real = contents.put

    def put(path: Path, to: Path, *, copy: bool) -> None:
        if path.name == layout.REQUESTS:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        real(path, to, copy=copy)

    with monkeypatch.context() as patch:
        patch.setattr(contents, "put", put)
        with pytest.raises(StoreError, match=r"requests\.parquet went while it was read; run this again"):
            brought_back(elsewhere(tmp_path), tmp_path / "monday")
    with pytest.raises(StoreError, match=f"is being filled from {tmp_path / 'monday'}"):
        Store.open(elsewhere(tmp_path))
    brought_back(elsewhere(tmp_path), tmp_path / "monday")
    Store.open(elsewhere(tmp_path)).close()


def test_files_of_a_backup_go_nowhere_but_into_the_home(stored: Store, tmp_path: Path) -> None:
    """A store whose files lie in its home refuses every command with another CONSERVE_DATA."""
    backed_up(stored, tmp_path / "monday")
    for data in (str(tmp_path / "data"), "s3://bucket/prefix"):
        with pytest.raises(SettingsError, match=r"CONSERVE_DATA is .*; leave that out"):
            brought_back(elsewhere(tmp_path, data=data), tmp_path / "monday")
    assert not (tmp_path / "again").exists()
    where = elsewhere(tmp_path, data=str(tmp_path / "again"))
    brought_back(where, tmp_path / "monday")
    with closing(Store.open(where)) as again:
        assert again.data == again.home


def test_a_store_without_rows_is_restored_over(stored: Store, tmp_path: Path) -> None:
    backed_up(stored, tmp_path / "monday")
    Store.open(elsewhere(tmp_path)).close()
    (tmp_path / "again" / restore.SCRATCH / "backup").mkdir(parents=True)  # of a restore that was killed
    brought_back(elsewhere(tmp_path), tmp_path / "monday")
    with closing(Store.open(elsewhere(tmp_path))) as again:
        assert again.id == stored.id


def test_a_database_that_others_use_or_another_restore_fills_is_refused(
    stored: Store, tmp_path: Path
) -> None:
    for name in ("monday", "tuesday"):
        backed_up(stored, tmp_path / name)
    others = elsewhere(tmp_path, store=f"sqlite:///{tmp_path}/others.db")
    with closing(sqlite3.connect(tmp_path / "others.db")) as tx:
        tx.execute("create table message (id integer)")
    with pytest.raises(SettingsError, match=r"others\.db is not empty"):
        brought_back(others, tmp_path / "monday")
    where = elsewhere(tmp_path)
    with closing_engine(engine_of(where.store_url)) as engine:
        restore.claim(engine, where.home, manifest.read(tmp_path / "monday"), tmp_path / "monday")
    with pytest.raises(SettingsError, match="is not empty"):
        brought_back(where, tmp_path / "tuesday")
    (where.home / "jobs" / "of-the-first-try").mkdir(parents=True)
    assert brought_back(where, tmp_path / "monday").store_id == stored.id


def test_a_database_that_is_made_a_store_meanwhile_is_not_restored_over(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backed_up(stored, tmp_path / "monday")
    where, begin = elsewhere(tmp_path), filling.begin

    def late(*given: Any) -> None:
        with closing(Store.open(replace(where, home=tmp_path / "other", store=where.store_url))) as there:
            add_job(there)
        begin(*given)

    monkeypatch.setattr(filling, "begin", late)
    with pytest.raises(SettingsError, match="is not empty"):
        brought_back(where, tmp_path / "monday")


def test_a_home_with_scratch_folders_of_jobs_alone_is_empty(stored: Store, tmp_path: Path) -> None:
    backed_up(stored, tmp_path / "monday")
    (tmp_path / "again" / "jobs" / ".new-1").mkdir(parents=True)
    assert brought_back(elsewhere(tmp_path), tmp_path / "monday").store_id == stored.id


@pytest.mark.parametrize("harm", ["cut short", "another format", "no file", "escapes"])
def test_an_archive_that_is_none_is_refused(stored: Store, tmp_path: Path, harm: str) -> None:
    backup = tmp_path / "monday.tar"
    backed_up(stored, backup)
    if harm == "cut short":
        backup.write_bytes(backup.read_bytes()[:1500])
    elif harm == "another format":
        backup.write_bytes(b"PK" * 1000)
    elif harm == "no file":
        backup.unlink()
    else:
        with tarfile.open(backup, "w") as archive:
            archive.addfile(tarfile.TarInfo("../../../escaped"))
    with pytest.raises(SettingsError if harm == "no file" else StoreDamaged, match=r"monday\.tar"):
        brought_back(elsewhere(tmp_path), backup)
    assert not (tmp_path / "escaped").exists()
    assert files(tmp_path / "again") == []


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ("[]", StoreDamaged, "is damaged"),
        ("{}", StoreDamaged, "is damaged"),
        ('{"format": 1}', StoreDamaged, "is damaged"),
        ('{"format": 2}', StoreError, "of a later version of ConServe"),
        (None, StoreError, "is no finished backup"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_told(
    stored: Store, tmp_path: Path, content: str | None, kind: type[StoreError], said: str
) -> None:
    backed_up(stored, tmp_path / "monday")
    path = tmp_path / "monday" / manifest.MANIFEST
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(StoreError, match=said) as error:
        manifest.read(tmp_path / "monday")
    assert type(error.value) is kind


def test_a_value_that_the_manifest_lacks_or_does_not_know_is_damage(stored: Store, tmp_path: Path) -> None:
    backed_up(stored, tmp_path / "monday")
    path = tmp_path / "monday" / manifest.MANIFEST
    found = json.loads(path.read_text())
    lacking = {name: value for name, value in found.items() if name != "files"}
    for changed in (lacking, {**found, "more": 1}, {**found, "database": 1}):
        path.write_text(json.dumps(changed))
        with pytest.raises(StoreDamaged, match="manifest of the backup"):
            manifest.read(tmp_path / "monday")


KILLED = {
    "backup": (
        Shot(at="conserve.store.copying.backup:whole"),
        Shot(at="conserve.store.copying.contents:put", call=3),
        Shot(at="conserve.store.copying.contents:write_json"),
        Shot(at="conserve.store.copying.contents:sync_all", after=True),
    ),
    "restore": (
        Shot(at="conserve.store.copying.filling:begin", after=True),
        Shot(at="conserve.store.copying.contents:put", call=3),
        Shot(at="conserve.store.copying.filling:add_page", call=3, after=True),
        Shot(at="conserve.store.copying.filling:end", after=True),
        Shot(at="conserve.store.copying.restore:finish"),
        Shot(at="conserve.store.copying.restore:finish", after=True),
    ),
}


@SQLITE_FIRST
@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_a_kill_leaves_nothing_that_holds_the_next_one_up(
    jobs: list[str],
    tmp_path: Path,
    verb: str,
    database: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    forked: StartForked,
) -> None:
    backup, where = tmp_path / "monday", tmp_path / "again"
    expected = {job_id: results(job_id) for job_id in jobs}
    if verb == "restore":
        assert conserve("store", "backup", str(backup)).returncode == 0
        database()
        monkeypatch.setenv("CONSERVE_HOME", str(where))
    for shot in KILLED[verb]:
        done = commands.ended(forked("store", verb, str(backup), shots=[shot]))
        assert done.returncode == -signal.SIGKILL, (shot, done)
        if verb == "backup":
            assert not backup.exists()
        elif not (shot.at.endswith("finish") and shot.after):
            assert "is being filled from" in conserve("jobs").stderr, shot
    if verb == "backup":
        assert conserve("store", "backup", str(backup)).returncode == 0
        restored(backup, where, database, monkeypatch)
    assert {job_id: results(job_id) for job_id in jobs} == expected
    checked()


@SQLITE_FIRST
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_backups_while_harvesters_run_lose_and_double_nothing(
    tmp_path: Path,
    database: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    forked: StartForked,
    seed: int,
) -> None:
    """Two runs finish rows, shard by shard, while backups are made; each of these is a store that goes on."""
    dice = random.Random(seed)
    job_id = submit(tmp_path, "one", rows=300)
    slow = ("run", "--endpoint", "fake:?token_ms=15&capacity=16")
    running = [forked(*slow, shots=[THIRD], constants=SMALL_SHARDS) for _ in range(2)]
    names = backed_up_meanwhile(tmp_path, running)
    dice.choice(running).send_signal(signal.SIGKILL)
    for process in running:
        while process.poll() is None:  # one that is still starting passes a SIGCONT over
            process.send_signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1.0)
    assert run().returncode in (0, 5)
    expected = results(job_id)
    assert len(expected) == 300
    for name in names:
        assert restored(name, tmp_path / f"{name.name}-again", database, monkeypatch).returncode == 0
        checked()
        assert results(job_id).items() <= expected.items()
        assert run().returncode in (0, 5)
        assert results(job_id) == expected
        checked()


def backed_up_meanwhile(folder: Path, running: Sequence[Forked]) -> list[Path]:
    """Make backups from the first result on, while the harvesters run."""
    commands.until(lambda: read_jobs(load(), now=0.0)[0].done > 0, running[0])
    names = [folder / f"backup-{number}" for number in range(BACKUPS)]
    for name in names:
        assert conserve("store", "backup", str(name)).returncode == 0
    assert [process.poll() for process in running] == [None, None]
    return names


BACKUPS = 2
THIRD = Shot(at="conserve.endpoints.fake:FakeEndpoint.complete", call=100, number=0, holds=True)
"""A harvester of 300 rows waits for SIGCONT at a third of them, so that two of them leave a third to be done."""
SMALL_SHARDS = {"conserve__store__books__shards__SHARD_ROWS": 25}
