"""`conserve store backup` and `restore`: whole, at one moment, while the store is in use, and after kills."""

import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conserve.config import Settings, load
from conserve.errors import SettingsError, StoreError, StoreInUse
from conserve.store.copying import backup as backups
from conserve.store.copying import contents, manifest, restore
from conserve.store.database.store import Store
from conserve.store.files import home, marks
from tests import commands
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot
from tests.commands import Done, conserve
from tests.postgres import Databases
from tests.store_rows import LEASE_S, claim, select

ROWS = 40
BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
SQLITE_FIRST = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Points CONSERVE_STORE at a new, empty database each time; for SQLite the home decides."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return lambda: None
    databases: Databases = request.getfixturevalue("databases")

    def another() -> None:
        monkeypatch.setenv("CONSERVE_STORE", databases.new(empty=True))

    another()
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


@BOTH
@pytest.mark.parametrize("form", ["folder", "archive", "copies"])
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
    assert (folder / home.REQUESTS).stat().st_nlink == 2
    assert (folder / marks.MARK).stat().st_nlink == 1
    conserve("store", "backup", str(tmp_path / "two"), "--copy")
    assert (tmp_path / "two" / "jobs" / jobs[0] / home.REQUESTS).stat().st_nlink == 1


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
    (settings_home(tmp_path) / "jobs" / jobs[2] / home.REQUESTS).unlink()
    done = conserve("store", "backup", str(tmp_path / "monday"))
    assert done.returncode == 1
    assert "1 file of the store are missing; run: conserve check" in done.stderr
    assert manifest.read(tmp_path / "monday").missing == (f"jobs/{jobs[2]}/{home.REQUESTS}",)


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
    assert (done.returncode, "is not empty" in done.stderr) == (2, True), done.stderr
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
    jobs: list[str], tmp_path: Path, verb: str, database: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, where = tmp_path / "monday", tmp_path / "again"
    expected = {job_id: results(job_id) for job_id in jobs}
    if verb == "restore":
        assert conserve("store", "backup", str(backup)).returncode == 0
        database()
        monkeypatch.setenv("CONSERVE_HOME", str(where))
    for shot in KILLED[verb]:
        done = killed(shot, "store", verb, str(backup))
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


def killed(shot: Shot, *words: str) -> Done:
    """Run a command that kills itself."""
    running = commands.start(["-m", "tests.acceptance.aimed", *aimed.command([shot], *words)])
    return commands.ended(running)


@SQLITE_FIRST
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_backups_while_harvesters_run_lose_and_double_nothing(
    tmp_path: Path, database: Callable[[], None], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two runs finish rows, shard by shard, while backups are made; each of these is a store that goes on."""
    dice = random.Random(seed)
    job_id = submit(tmp_path, "one", rows=600)
    shot = aimed.command([], "run", "--endpoint", "fake:?token_ms=15&capacity=16", **SMALL_SHARDS)
    running = [commands.start(["-m", "tests.acceptance.aimed", *shot]) for _ in range(2)]
    commands.until(lambda: bool(results(job_id)), running[0])
    names = []
    while len(names) < 3 and any(process.poll() is None for process in running):
        names.append(tmp_path / f"backup-{len(names)}")
        assert conserve("store", "backup", str(names[-1])).returncode == 0
    os.killpg(dice.choice(running).pid, signal.SIGKILL)
    for process in running:
        commands.ended(process)
    assert run().returncode in (0, 5)
    expected = results(job_id)
    assert len(expected) == 600
    for name in names:
        assert restored(name, tmp_path / f"{name.name}-again", database, monkeypatch).returncode == 0
        checked()
        assert results(job_id).items() <= expected.items()
        assert run().returncode in (0, 5)
        assert results(job_id) == expected
        checked()


SMALL_SHARDS = {"conserve__store__books__shards__SHARD_ROWS": 50}
