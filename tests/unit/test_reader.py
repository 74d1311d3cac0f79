"""Readers change nothing: they work where nothing can be written, and see one moment."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from conserve.config import Settings, load
from conserve.errors import SettingsError, StoreError, StoreReadOnly, StoreTooNew
from conserve.store.books import queue
from conserve.store.database import connection as database
from conserve.store.database import reader
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from tests.store_rows import add_job, select


def no_index(monkeypatch: pytest.MonkeyPatch, name: str = "SQLITE_IOERR_SHMSIZE") -> None:
    """Let readers that share a database fail, as they do where the index of its log cannot be made."""
    opened = reader.opened

    def refuse(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
        if mode != "ro":
            return opened(path, mode, timeout_s)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = name  # type: ignore[misc]
        raise error

    monkeypatch.setattr(reader, "opened", refuse)


def test_what_is_opened_to_read_cannot_be_written(store: Store, settings: Settings) -> None:
    add_job(store)
    opened = Store.open_to_read(settings)
    assert opened.id == store.id
    assert select(opened, "select id from job") == [("job-1",)]
    with pytest.raises(StoreReadOnly), opened.write() as tx:
        tx.execute(text("delete from job"))
    opened.close()


def test_where_no_index_can_be_made_the_database_is_taken_alone(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store)
    store.close()
    no_index(monkeypatch)
    opened = Store.open_to_read(settings)
    for _ in range(2):
        assert select(opened, "select id from job") == [("job-1",)]
    assert not list(settings.home.glob("*-shm"))
    with pytest.raises(StoreError), opened.write() as tx:
        tx.execute(text("delete from job"))
    opened.close()
    files = sorted(path.name for path in settings.home.iterdir() if path.is_file())
    assert files == ["conserve.db", "stores.json"]


@pytest.mark.parametrize("name", ["SQLITE_BUSY", "SQLITE_NOTADB", "SQLITE_READONLY"])
def test_another_reason_is_told_as_it_is(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    no_index(monkeypatch, name)
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        reader.reader(settings.home / "conserve.db", timeout_s=0)


def test_a_database_that_others_have_open_says_what_the_first_reason_was(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_index(monkeypatch)
    with store.write() as tx:
        tx.execute(text("delete from job"))
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
            reader.reader(settings.home / "conserve.db", timeout_s=0)


def test_a_store_that_is_not_there_or_of_an_earlier_version_is_made_or_brought_up_to_date(
    settings: Settings, store: Store
) -> None:
    with store.write() as tx:
        tx.execute(text("update meta set value = '1' where key = 'version'"))
        tx.execute(text("delete from meta where key = 'store_id'"))
    store.close()
    for _ in range(2):
        opened = Store.open_to_read(settings)
        assert select(opened, "select value from meta where key = 'version'") == [(str(LATEST),)]
        opened.close()
    fresh = Store.open_to_read(load({"home": settings.home / "fresh"}, environ={}))
    assert select(fresh, "select * from job") == []
    fresh.close()


def test_a_store_of_the_future_or_no_store_at_all_is_named(settings: Settings, store: Store) -> None:
    with store.write() as tx:
        tx.execute(text(f"update meta set value = '{LATEST + 1}' where key = 'version'"))
    with pytest.raises(StoreTooNew):
        Store.open_to_read(settings)
    store.close()
    (settings.home / "conserve.db").write_bytes(b"nothing like a database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store.open_to_read(settings)
    with pytest.raises(SettingsError):
        Store.open_to_read(load({"home": settings.home, "store": "nothing like a URL"}, environ={}))


def test_another_database_is_opened_as_for_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(database, "connect", opened.append)
    database.connect_to_read("postgresql+psycopg://x/y")
    assert opened == ["postgresql+psycopg://x/y"]


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        ("sqlite", {"read_only": True}),
        ("mysql", {"read_only": True, "isolation_level": "REPEATABLE READ"}),
        (
            "postgresql",
            {"read_only": True, "isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
        ),
    ],
)
def test_a_read_sees_one_moment_on_every_database(dialect: str, options: dict[str, Any]) -> None:
    """On PostgreSQL each statement of an ordinary transaction would see one of its own."""
    asked: list[dict[str, Any]] = []

    class Connection:
        def __enter__(self) -> "Connection":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def execution_options(self, **named: Any) -> "Connection":
            asked.append(named)
            return self

        def begin(self) -> "Connection":
            return self

    engine: Any = SimpleNamespace(dialect=SimpleNamespace(name=dialect), connect=Connection)
    with database.transaction(engine, read_only=True):
        pass
    with database.transaction(engine):
        pass
    assert asked == [options]


def test_looking_for_rows_to_claim_locks_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read transaction may not lock rows on PostgreSQL."""
    from sqlalchemy.dialects import postgresql

    said: list[str] = []

    class NoRows(list[Any]):
        def all(self) -> list[Any]:
            return self

    def execute(query: Any, parameters: Any) -> Any:
        assert parameters == {}
        said.append(str(query.compile(dialect=postgresql.dialect())))
        return NoRows()

    tx: Any = SimpleNamespace(execute=execute, dialect=postgresql.dialect())
    for locked in (True, False):
        queue.runnable_jobs(tx, None, locked=locked)
    assert ["FOR NO KEY UPDATE" in query for query in said] == [True, False]
