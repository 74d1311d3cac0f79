"""The database and the folder below the store: transactions, and errors in the user's words."""

import errno
import gc
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import inspect, make_url, text
from sqlalchemy import select as sql_select
from sqlalchemy.exc import NoResultFound, OperationalError

from conserve.config import Settings, load
from conserve.errors import (
    ConserveError,
    DatabaseDamaged,
    SettingsError,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooNew,
)
from conserve.store.database import bulk, guard, lineage, migrations, reader, schema
from conserve.store.database import connection as database
from conserve.store.database.moves import MoveMark, MoveState
from conserve.store.database.statements import STATEMENTS
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from conserve.store.files import folder_place, job_folders, layout, os_errors
from conserve.store.files.marks import MARK
from conserve.store.files.place import place_of, scratch_of
from conserve.whole import sync
from tests.store_rows import add_job, select

BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


def test_a_transaction_counts_as_a_whole_or_not_at_all(store: Store) -> None:
    class Mistake(Exception):
        pass

    def write(key: str, error: Exception | None = None) -> None:
        with store.write() as tx:
            tx.execute(text("insert into meta values (:key, '')"), {"key": key})
            if error:
                raise error

    write("kept")
    for error in (Mistake(), ConserveError("ours")):
        with pytest.raises(type(error)):
            write("undone", error)
    assert select(store, "select key from meta order by 1") == [("kept",), ("store_id",), ("version",)]


def test_every_commit_is_flushed_to_disk(store: Store) -> None:
    """Write-ahead log, and an fsync for each commit (2 is FULL)."""
    pragmas = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "cache_size": -65536}
    for read_only in (True, False):
        with store.read() if read_only else store.write() as tx:
            assert {name: tx.exec_driver_sql(f"pragma {name}").scalar() for name in pragmas} == pragmas


def test_who_writes_has_the_lock_from_the_start_and_who_reads_needs_none(
    store: Store, settings: Settings
) -> None:
    impatient = sqlite3.connect(settings.home / "conserve.db", timeout=0, isolation_level=None)
    with store.write():
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            impatient.execute("begin immediate")
        with store.read() as reader:
            assert reader.scalar(text("select count(*) from job")) == 0
    with store.read():
        impatient.execute("begin immediate")
        impatient.execute("rollback")
    impatient.close()


def test_no_piece_of_work_keeps_another_out_on_sqlite(store: Store) -> None:
    """There two processes that do the same are rare, and harmless."""
    with store.alone("sweep") as one, store.alone("sweep", wait=True) as other:
        assert (one, other) == (True, True)


def test_sqlite_gets_many_rows_in_parts_and_none_without_rows(store: Store) -> None:
    """An IN list has a largest length there."""
    with store.read() as tx:
        position = schema.request.c.position
        parts = [
            at.compile().params.values()
            for (at,) in bulk.matching(tx, [position], [(n,) for n in range(1200)])
        ]
        assert [len(number) for values in parts for number in values] == [500, 500, 200]
        assert [*bulk.matching(tx, [position], [])] == []


def test_a_writer_waits_for_a_minute(store: Store) -> None:
    with store.read() as tx:
        assert tx.exec_driver_sql("pragma busy_timeout").scalar() == 60_000


def test_a_reader_sees_one_moment(store: Store) -> None:
    with store.read() as reader:
        before = reader.scalar(text("select count(*) from meta"))
        with store.write() as writer:
            writer.execute(text("insert into meta values ('later', '')"))
        assert reader.scalar(text("select count(*) from meta")) == before
    assert len(select(store, "select * from meta")) == before + 1


@pytest.mark.parametrize("url", ["nothing like a URL", "nodatabase://x/y", "postgresql+nodriver://x/y"])
def test_a_url_that_names_no_database_is_the_users_mistake(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingsError, match="CONSERVE_STORE is not a database URL"):
        Store.open(load({"home": tmp_path, "store": url}, environ={}))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://c:p@ssw0rd@127.0.0.1:1/db", "write %40"),
        ("postgresql://c:p@ssw0rd:x@127.0.0.1:1/db", "write %40"),
        ("postgresql://c:p@a/ssw0rd?@127.0.0.1:1/db", "write %40"),
        ("postgresql://c:seven/db", "port that is no number"),
        ("postgresql+psycopg://127.0.0.1:1/db?password=ssw0rd&connect_timeout=2", "refused"),
    ],
)
def test_no_message_has_a_part_of_a_password(tmp_path: Path, url: str, says: str) -> None:
    settings = load({"home": tmp_path, "store": url}, environ={})
    with pytest.raises((SettingsError, StoreError), match=says) as error:
        Store.open(settings)
    assert "ssw0rd" not in f"{error.value} {settings.place}"


@pytest.mark.parametrize(
    "url", ["postgresql://ann@corp:pw@db/x", "postgresql://ann@db/x?application_name=a@b"]
)
def test_an_at_sign_that_cuts_no_password_is_taken(url: str) -> None:
    assert database.parse(url).host == "db"


def refused_as_newer(settings: Settings, store: Store) -> Settings:
    with store.write() as tx:
        tx.execute(text(f"update meta set value = '{LATEST + 1}' where key = 'version'"))
    return settings


def refused_as_moved(settings: Settings, store: Store) -> Settings:
    mark = MoveMark(id="x", state=MoveState.LEFT, other="sqlite:///there.db", store_id=store.id)
    with store.write() as tx:
        guard.put_mark(tx, mark)
    return settings


def refused_elsewhere(settings: Settings, store: Store) -> Settings:
    add_job(store)
    return replace(settings, data=str(settings.home / "elsewhere"))


@BOTH
@pytest.mark.parametrize("refused", [refused_as_newer, refused_as_moved, refused_elsewhere])
@pytest.mark.parametrize("opening", [Store.open, Store.open_to_read])
def test_a_store_that_is_refused_is_not_left_open(
    settings: Settings,
    store: Store,
    refused: Callable[[Settings, Store], Settings],
    opening: Callable[[Settings], Store],
) -> None:
    """A connection that is left open says so itself on PostgreSQL, where the test fails for its warning."""
    changed = refused(settings, store)
    store.close()
    with pytest.raises(ConserveError):
        opening(changed)
    assert open_databases(settings.home) == []
    gc.collect()


def open_databases(home: Path) -> list[str]:
    """Files of a database that this process has open."""
    names = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for name in names if name.startswith(f"{home}/conserve.db")]


@BOTH
@pytest.mark.parametrize("opening", [Store.open, Store.open_to_read])
def test_a_version_that_is_no_number_is_damage(
    store: Store, settings: Settings, opening: Callable[[Settings], Store]
) -> None:
    with store.write() as tx:
        tx.execute(text("update meta set value = 'ten' where key = 'version'"))
    with pytest.raises(StoreDamaged, match=r"version is damaged \('ten'\); run: conserve check"):
        opening(settings)


def test_a_file_that_is_no_database_is_not_left_open(tmp_path: Path) -> None:
    path = tmp_path / "conserve.db"
    path.write_bytes(b"nothing like a database" * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        reader.reader(path, timeout_s=0.0)
    assert open_databases(tmp_path) == []


@pytest.mark.parametrize("number", [LATEST - 1, LATEST + 1])
def test_a_store_of_another_version_is_neither_written_nor_left_open_by_a_reader(
    store: Store, settings: Settings, number: int
) -> None:
    """A newer one is told also where nothing can be written; an older one is for `connect` to bring up to date."""
    with store.write() as tx:
        tx.execute(text(f"update meta set value = '{number}' where key = 'version'"))
    store.close()
    if number > LATEST:
        with pytest.raises(
            StoreTooNew, match=f"has version {number} .* only up to {LATEST}; upgrade ConServe"
        ):
            database.connect_to_read(settings.store_url)
    else:
        assert database.connect_to_read(settings.store_url) is None
    assert open_databases(settings.home) == []


@pytest.mark.parametrize("missing", ["psycopg", "psycopg_binary", "somewhere.else"])
def test_a_driver_that_is_not_installed_is_named_with_the_line_that_installs_it(
    tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("conserve.store.database.connection.create_engine", no_driver)
    with pytest.raises(SettingsError, match=r"postgres\b|needs a package") as error:
        Store.open(load({"home": tmp_path, "store": "postgresql+psycopg://x/y"}, environ={}))
    assert ("run: " in str(error.value)) is missing.startswith("psycopg")


@pytest.mark.parametrize(
    ("code", "said", "kind", "hint"),
    [
        ("SQLITE_READONLY", "attempt to write", StoreReadOnly, "make it writable or set CONSERVE_HOME"),
        ("SQLITE_READONLY_DIRECTORY", "attempt to write", StoreReadOnly, "is read-only"),
        ("25006", "cannot execute INSERT", StoreReadOnly, "is read-only"),
        ("SQLITE_FULL", "database or disk is full", StoreFull, "nothing that was committed is lost"),
        ("53100", "could not extend file", StoreFull, "no space left for the store"),
        ("SQLITE_IOERR_WRITE", "disk I/O error", StoreFull, "(disk I/O error)"),
        (
            "40P01",
            "deadlock detected",
            StoreError,
            "met those of others (deadlock detected); run the command again",
        ),
        ("SQLITE_CANTOPEN", "unable to open", StoreError, "cannot be opened (unable to open)"),
        (
            "SQLITE_ERROR",
            "no such table: job",
            StoreError,
            "failed: no such table: job; run: conserve doctor",
        ),
        (None, "failed to resolve host 'full.readonly.db'", StoreError, "failed: failed to resolve"),
        ("28P01", 'password authentication failed for user "fuller"', StoreError, "run: conserve doctor"),
        ("3D000", 'database "read-only" does not exist', StoreError, "run: conserve doctor"),
    ],
)
def test_the_code_of_a_database_error_becomes_the_next_step(
    store: Store, code: str | None, said: str, kind: type[StoreError], hint: str
) -> None:
    """The code alone decides: words hold names of hosts, users and databases."""
    cause = Exception(said)
    setattr(cause, "sqlite_errorname" if code and code.startswith("SQLITE") else "sqlstate", code)
    found = database.explain(OperationalError("select", {}, cause), store.engine)
    assert type(found) is kind
    assert hint in str(found)
    assert str(store.home) in str(found)


class FromPostgreSQL(Exception):
    """An error of psycopg with a code."""

    sqlstate = "XX001"


def from_sqlite(said: str, code: int | None) -> sqlite3.OperationalError:
    """An error of SQLite, or without a code of Python's module."""
    error = sqlite3.OperationalError(said)
    if code is not None:
        error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("cause", "is_damage"),
    [
        (from_sqlite("database disk image is malformed", sqlite3.SQLITE_CORRUPT_INDEX), True),
        (from_sqlite("file is not a database", sqlite3.SQLITE_NOTADB), True),
        (from_sqlite("no such table: job", sqlite3.SQLITE_ERROR), True),
        (from_sqlite("Could not decode to UTF-8 column 'id'", None), True),
        (FromPostgreSQL("invalid page in block 7"), True),
        (from_sqlite('near "selec": syntax error', sqlite3.SQLITE_ERROR), False),
        (from_sqlite("database is locked", sqlite3.SQLITE_BUSY), False),
        (from_sqlite("unable to open database file", sqlite3.SQLITE_CANTOPEN), False),
        (ConnectionRefusedError("connection refused"), False),
    ],
)
def test_only_what_proves_damage_is_damage(store: Store, cause: Exception, is_damage: bool) -> None:
    found = database.explain(OperationalError("select", {}, cause), store.engine)
    assert isinstance(found, DatabaseDamaged) is is_damage
    assert str(found).endswith("; run: conserve check") is is_damage


def test_errors_of_the_database_are_explained_and_keep_their_cause(store: Store) -> None:
    with pytest.raises(StoreError, match="no such table: unknown") as error, store.read() as tx:
        tx.execute(text("select * from unknown"))
    assert isinstance(error.value.__cause__, OperationalError)


def test_an_error_without_a_cause_of_the_drivers_is_told_as_it_is(store: Store) -> None:
    assert "No row was found" in str(database.explain(NoResultFound("No row was found"), store.engine))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://me:secret@there/store", "postgresql://me:***@there/store"),
        (
            "postgresql://there/store?user=me&password=secret&sslpassword=secret2&connect_timeout=3",
            "postgresql://there/store?connect_timeout=3&user=me",
        ),
    ],
)
def test_a_password_is_not_told(tmp_path: Path, url: str, told: str) -> None:
    engine = SimpleNamespace(url=make_url(url), dialect=SimpleNamespace(name="postgresql"))
    found = database.explain(OperationalError("", {}, Exception("x")), engine)  # type: ignore[arg-type]
    assert f"the store {told} failed" in str(found)
    place = lineage.place(tmp_path, engine)  # type: ignore[arg-type]
    assert place == told == database.masked(url if "?" in url else told)
    for path in (
        "/backups/password=1",
        "s3://bucket/[a",
        "store://",
    ):  # not addresses, and without a password
        assert database.masked(path) == path
    (tmp_path / lineage.FILE).write_text(json.dumps({url if "?" in url else told: ["a"]}))
    lineage.note(tmp_path, place, "b")
    assert lineage.ids(tmp_path, place) == ["a", "b"]
    assert "secret" not in (tmp_path / lineage.FILE).read_text()


def test_a_store_that_cannot_be_written_is_found_before_any_work(store: Store) -> None:
    with store.write() as tx:
        tx.exec_driver_sql("pragma query_only = on")
        with pytest.raises(OperationalError, match="readonly"):
            database.reserve_space(tx)
        tx.exec_driver_sql("pragma query_only = off")


def test_the_version_of_an_empty_database_is_none(store: Store) -> None:
    with store.write() as tx:
        assert migrations.version(tx) == LATEST
        tx.execute(text("delete from meta"))
        assert migrations.version(tx) == 0
        migrations.migrate(tx)
        assert migrations.version(tx) == LATEST
        tx.execute(text("drop table meta"))
        assert migrations.version(tx) == 0


def test_migrations_that_a_store_has_seen_are_not_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store gets those that it has not seen, in order."""
    seen: list[int] = []
    numbers = range(1, LATEST + 3)
    monkeypatch.setattr(migrations, "LATEST", LATEST + 2)
    monkeypatch.setattr(migrations, "MIGRATIONS", [lambda tx, n=n: seen.append(n) for n in numbers])
    for _ in range(2):
        with store.write() as tx:
            migrations.migrate(tx)
            assert migrations.version(tx) == LATEST + 2
    assert seen == [LATEST + 1, LATEST + 2]


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOSPC, StoreFull, "no space left"),
        (errno.EDQUOT, StoreFull, "no space left"),
        (errno.EFBIG, StoreFull, "no space left"),
        (errno.EACCES, StoreReadOnly, "cannot be written"),
        (errno.EPERM, StoreReadOnly, "cannot be written"),
        (errno.EROFS, StoreReadOnly, "cannot be written"),
        (errno.ENOENT, StoreError, "cannot be used: "),
    ],
)
def test_what_the_operating_system_says_becomes_the_next_step(
    tmp_path: Path, number: int, kind: type[StoreError], hint: str
) -> None:
    with pytest.raises(StoreError, match=hint) as error, os_errors.explained(tmp_path):
        raise OSError(number, "said")
    assert type(error.value) is kind
    assert str(tmp_path) in str(error.value)


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(load({"home": tmp_path / "file" / "home"}, environ={}))


def test_a_home_is_made_with_the_folders_above_it(tmp_path: Path) -> None:
    Store.open(load({"home": tmp_path / "a" / "b"}, environ={})).close()
    assert (tmp_path / "a" / "b" / "conserve.db").is_file()


@pytest.mark.parametrize("data", [None, "files"])
def test_a_new_home_is_for_its_user_alone_and_one_that_is_there_keeps_its_mode(
    tmp_path: Path, data: str | None
) -> None:
    given = {} if data is None else {"data": str(tmp_path / "new" / data)}
    Store.open(load({"home": tmp_path / "new" / "home", **given}, environ={})).close()
    for name in ("home", *filter(None, [data])):
        assert (tmp_path / "new" / name).stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2770)
    Store.open(load({"home": tmp_path / "shared"}, environ={})).close()
    assert (tmp_path / "shared").stat().st_mode & 0o7777 == 0o2770


def test_a_new_jobs_folder_stays_only_if_it_was_adopted(tmp_path: Path) -> None:
    for adopted in (False, True):
        with job_folders.new(tmp_path, "id") as folder:
            (folder / layout.REQUESTS).write_bytes(b"requests")
            assert folder.parent == layout.jobs_folder(tmp_path)
            if adopted:
                job_folders.adopt(folder, tmp_path, "job-1")
        assert not folder.exists()
    assert layout.requests_file(tmp_path, "job-1").read_bytes() == b"requests"
    job_folders.discard(tmp_path, "job-1")
    job_folders.discard(tmp_path, "job-1")
    assert list(layout.jobs_folder(tmp_path).iterdir()) == []


def test_folders_of_new_jobs_that_cannot_be_made_are_explained(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_bytes(b"a file")
    with pytest.raises(StoreError, match="cannot be used"), job_folders.new(tmp_path, "id"):
        pass


def test_folders_are_made_durably_also_where_a_kill_left_one_unflushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(folder_place, "sync", synced.append)
    (tmp_path / "a").mkdir()  # and killed before its flush
    place_of(tmp_path / "a" / "b" / "c").make_with_parents()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    (tmp_path / "a" / "b" / "c" / "conserve.db").write_bytes(b"")
    synced.clear()
    place_of(tmp_path / "a" / "b" / "c").make_with_parents()
    assert synced == []


def test_folders_are_made_in_an_empty_one_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place_of(Path("a/b")).make_with_parents()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_home_in_a_folder_that_may_not_be_read_is_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder_place, "sync", refuse)
    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path) if path == tmp_path else iter(()))
    place_of(tmp_path / "home").make_with_parents()
    assert (tmp_path / "home").is_dir()


def test_a_job_is_flushed_before_it_gets_its_name_and_the_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(folder_place, "sync", lambda path: synced.append(f"{path.name} {path.exists()}"))
    with job_folders.new(tmp_path, "id") as folder:
        assert synced == [f"{tmp_path.parent.name} True", f"{tmp_path.name} True"]
        synced.clear()
        (folder / layout.REQUESTS).write_bytes(b"")
        (folder / layout.PARTS).mkdir()
        (folder / layout.PARTS / "00000.parquet").write_bytes(b"")
        job_folders.adopt(folder, tmp_path, "job-1")
    files = [layout.REQUESTS, MARK, layout.PARTS, "00000.parquet"]
    assert sorted(synced[:4]) == sorted(f"{name} True" for name in files)
    assert synced[4:] == [f"{folder.name} True", "jobs True"]
    synced.clear()
    scratch = tmp_path / "scratch"
    scratch.write_bytes(b"whole")
    place_of(tmp_path / "final").write(scratch)
    assert synced == ["scratch True", f"{tmp_path.name} True"]
    assert (tmp_path / "final").read_bytes() == b"whole"


def test_a_file_is_written_beside_the_one_that_it_will_be(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.parquet"
    path.parent.mkdir()
    with scratch_of(path, tmp_path / "local") as scratch:
        assert scratch == path.parent / "a.tmp"
        scratch.write_bytes(b"whole")
        place_of(path).write(scratch)
    with suppress(ZeroDivisionError), scratch_of(path, tmp_path / "local") as scratch:
        scratch.write_bytes(b"half")
        raise ZeroDivisionError
    assert [each.name for each in path.parent.iterdir()] == ["a.parquet"]
    with place_of(path).fetched(tmp_path / "local") as found:
        assert found == path
    assert path.read_bytes() == b"whole"
    assert not (tmp_path / "local").exists()


def test_what_is_in_a_folder_is_listed_by_name(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        (tmp_path / name).mkdir()
    assert [path.name for path in layout.listed(tmp_path)] == ["a", "b", "c"]
    assert layout.listed(tmp_path / "none") == []


def test_a_tree_goes_with_what_is_in_it_and_one_that_is_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"")
    for _ in range(2):
        place_of(tmp_path / "a").remove_tree()
        assert list(tmp_path.iterdir()) == []


def test_files_and_folders_are_flushed_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("os.fsync", flushed.append)
    sync(tmp_path)
    (descriptor,) = flushed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_files_lie_where_the_design_says(tmp_path: Path) -> None:
    assert layout.requests_file(tmp_path, "j") == tmp_path / "jobs" / "j" / "requests.parquet"
    assert layout.inputs_file(tmp_path, "j") == tmp_path / "jobs" / "j" / "inputs.parquet"


NULLABLE = {
    "job": {
        *(
            "error",
            "started_at",
            "finished_at",
            "files",
            "model",
            "tags",
            "deadline",
            "on_late",
            "bound_by_run",
            "failed_by",
        ),
    },
    "lease": {"lease_s"},
    "journal": {"checksum"},
    "shard": {"digest", "bytes"},
    "request": {"epoch", "started_at", "tokens", "tokens_by", "checksum", "deaths", "losses"},
}
KEYS = {
    "meta": ["key"],
    "job": ["seq"],
    "lease": ["epoch"],
    "request": ["job_id", "position"],
    "journal": ["job_id", "position"],
    "shard": ["id"],
}
INDEXES = {
    "lease": [["job_id"]],
    "request": [
        ["epoch", "job_id", "position"],
        ["job_id", "attempts", "available_at", "position", "epoch"],
    ],
    "shard": [["job_id"]],
}
UNIQUE = {"job": [["id"]], "shard": [["file"]]}


@pytest.mark.parametrize("table", list(KEYS))
def test_the_database_itself_refuses_what_would_break_the_books(store: Store, table: str) -> None:
    """A position twice in one place, rows of a job that is not there, and what is not known."""
    found = inspect(store.engine)
    columns = {column["name"]: column for column in found.get_columns(table)}
    assert {name for name, column in columns.items() if column["nullable"]} == NULLABLE.get(table, set())
    assert found.get_pk_constraint(table)["constrained_columns"] == KEYS[table]
    assert [index["column_names"] for index in found.get_indexes(table)] == INDEXES.get(table, [])
    unique = [constraint["column_names"] for constraint in found.get_unique_constraints(table)]
    assert unique == UNIQUE.get(table, [])
    refers = [(key["constrained_columns"], key["referred_table"]) for key in found.get_foreign_keys(table)]
    assert refers == ([] if table in ("meta", "job") else [(["job_id"], "job")])


def test_epochs_are_never_used_twice_and_live_rows_lie_in_the_order_of_their_key(store: Store) -> None:
    made = dict(select(store, "select name, sql from sqlite_master where type = 'table'"))
    assert "AUTOINCREMENT" in made["lease"]
    assert {name for name, sql in made.items() if sql and "WITHOUT ROWID" in sql} == {"request", "journal"}


def test_only_one_process_migrates_a_postgresql_database_at_a_time() -> None:
    said: list[str] = []
    tx = SimpleNamespace(
        dialect=SimpleNamespace(name="postgresql"), execute=lambda query: said.append(str(query))
    )
    migrations.lock(tx)  # type: ignore[arg-type]
    (query,) = said
    assert "pg_advisory_xact_lock" in query


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_postgresql_url_needs_no_driver(scheme: str) -> None:
    assert database.parse(f"{scheme}://me@there/store").drivername == "postgresql+psycopg"


def test_stores_share_what_they_have_compiled(tmp_path: Path) -> None:
    """The second store compiles nothing."""
    known = []
    for name in ("one", "other"):
        with closing(Store.open(load({"home": tmp_path / name}))) as opened, opened.read() as tx:
            assert tx.scalar(sql_select(schema.job.c.id).where(schema.job.c.priority == 7)) is None
            known.append(len(STATEMENTS))
    assert known[0] == known[1] > 0
