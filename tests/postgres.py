"""Databases for tests, on a PostgreSQL server of their own.

Tests that need a server are skipped where none is installed. `POSTGRES_URL` names another server instead, by a
database whose user may create others.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sqlalchemy import Connection, create_engine, make_url, text

from conserve.store.database import schema
from conserve.store.database.connection import connect
from conserve.store.database.migrations import STORE_ID
from conserve.store.database.versions import LATEST
from tests.postgres_server import binaries, running

if TYPE_CHECKING:
    from tests.kept_connections import ConnectionKeeper

SETTINGS = {
    "shared_buffers": "32MB",
    "max_connections": "200",
    "track_commit_timestamp": "on",  # histories are checked in the order of commits
    "autovacuum": "off",
}


BY_LANGUAGE = "template template0 encoding 'UTF8' locale_provider icu icu_locale 'en-US' locale 'C'"
"""Texts sort otherwise there than in Python, as in most databases of users; from PostgreSQL 15 on."""


def missing() -> str | None:
    """Sentence on what a test with PostgreSQL lacks here; None if it lacks nothing."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed: pip install '.[postgres]'"
    if "POSTGRES_URL" not in os.environ and binaries() is None:
        return "PostgreSQL is not installed: apt install postgresql"
    return None


class Databases:
    """Databases on one server, with the tables in them, so that no test migrates."""

    def __init__(self, url: str, *, ours: bool) -> None:
        self.url, self._ours = make_url(url), ours
        self._admin = create_engine(self.url, isolation_level="AUTOCOMMIT")
        self._numbers = itertools.count()
        self._prefix = f"conserve_{os.getpid()}"
        self._template = self.new(empty=True)
        connect(self._template).dispose()
        self._used: str | None = None
        self._cleaner: Connection | None = None
        self._emptied = itertools.count(1)
        self._keeper: ConnectionKeeper | None = None

    def new(self, *, empty: bool = False) -> str:
        """URL of a new database, without tables if it is to be `empty`."""
        name = f"{self._prefix}_{next(self._numbers)}"
        first = BY_LANGUAGE if self._version() >= (15,) else "template template0"
        template = first if empty else f"template {make_url(self._template).database}"
        self._do(f"create database {name} {template}")
        return self.url.set(database=name).render_as_string(hide_password=False)

    def _version(self) -> tuple[int, ...]:
        with self._admin.connect():
            return self._admin.dialect.server_version_info or ()

    def emptied(self) -> str:
        """URL of the one database that all callers share, one after the other: its rows are deleted.

        That takes a tenth of the time of a new one. Connections that were left open are ended, and closed ones are
        taken again.
        """
        if self._used is None or self._cleaner is None or self._keeper is None:
            from tests.kept_connections import ConnectionKeeper

            self._used = self.new()
            self._cleaner = create_engine(self._used, isolation_level="AUTOCOMMIT").connect()
            self._keeper = ConnectionKeeper(str(make_url(self._used).database))
            return self._used
        kept = ", ".join(map(str, self._keeper.pids()))
        self._cleaner.exec_driver_sql(EMPTY.replace("KEPT", kept or "0"))
        if next(self._emptied) % VACUUM_EVERY == 0:
            self._cleaner.exec_driver_sql("vacuum")
        return self._used

    def end_kept(self) -> None:
        """End the connections to the shared database that were closed; settings of it hold for new ones alone."""
        if self._keeper is not None:
            self._keeper.end()

    def drop(self, url: str) -> None:
        """Remove a database, whatever is connected to it."""
        self._do(f"drop database if exists {make_url(url).database} with (force)")

    def close(self) -> None:
        """Close the connections to the server; on a server that goes on, remove the databases."""
        if self._keeper is not None:
            self._keeper.close()
        if self._cleaner is not None:
            self._cleaner.close()
            self._cleaner.engine.dispose()
        for url in [] if self._ours else [self._template, self._used]:
            if url is not None:
                self.drop(url)
        self._admin.dispose()

    def _do(self, statement: str) -> None:
        with self._admin.connect() as connection:
            connection.execute(text(statement))


END_OTHERS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and pid not in (pg_backend_pid(), KEPT)
"""
RESTART = "select setval(schemaname || '.' || sequencename, 1, false) from pg_sequences"
ROWS = ";".join(
    f"delete from {table.name}"
    for table in reversed(schema.metadata.sorted_tables)
    if table is not schema.meta
)
FORGET = f"""
    delete from meta where key not in ('version', '{STORE_ID}');
    update meta set value = '{LATEST}' where key = 'version'
"""
EMPTY = ";".join((END_OTHERS, ROWS, FORGET, RESTART))
"""All in one message to the server."""
VACUUM_EVERY = 40
"""Deleted rows are read over again and again until then: after 160 tests emptying takes three times as long."""


@contextlib.contextmanager
def databases(**settings: str) -> Iterator[Databases]:
    """Databases on a server that is started for them, or on that of `POSTGRES_URL`."""
    with contextlib.ExitStack() as stack:
        given = os.environ.get("POSTGRES_URL")
        url = given or stack.enter_context(running({**SETTINGS, **settings})).url()
        found = Databases(url, ours=not given)
        stack.callback(found.close)
        yield found
