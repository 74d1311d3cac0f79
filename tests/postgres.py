"""A PostgreSQL server of the tests' own, of the binaries that are installed, and databases on it.

`apt install postgresql` is enough; tests that need a server are skipped where there is none. It listens on a socket
in a temporary folder alone and never flushes to the disk. `POSTGRES_URL` names another server instead, by the URL
of a database whose user may create others.
"""

import contextlib
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, delete, make_url, text

from conserve.store.database import schema
from conserve.store.database.connection import connect
from conserve.store.database.migrations import STORE_ID
from conserve.store.database.versions import LATEST

INSTALLED = "/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/local/pgsql/bin"
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "200",
    "track_commit_timestamp": "on",  # histories are checked in the order of commits
    "autovacuum": "off",
}
PR_SET_PDEATHSIG = 1


def binaries() -> Path | None:
    """Folder of the newest server that is installed."""
    found = [
        path for pattern in INSTALLED for path in Path("/").glob(pattern[1:]) if (path / "initdb").exists()
    ]
    if found:
        return max(
            found, key=lambda path: [int(part) for part in path.parts[-2].split(".") if part.isdigit()]
        )
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


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

    def new(self, *, empty: bool = False) -> str:
        """URL of a new database, without tables if it is to be `empty`."""
        name = f"{self._prefix}_{next(self._numbers)}"
        template = "template0" if empty else make_url(self._template).database
        self._do(f"create database {name} template {template}")
        return self.url.set(database=name).render_as_string(hide_password=False)

    def emptied(self) -> str:
        """URL of the one database that all who call this share, one after the other: its rows are deleted.

        That takes a tenth of the time of a new one. Connections that were left open are ended.
        """
        if self._used is None or self._cleaner is None:
            self._used = self.new()
            self._cleaner = create_engine(self._used, isolation_level="AUTOCOMMIT").connect()
            return self._used
        self._cleaner.execute(text(END_OTHERS))
        for table in reversed(schema.metadata.sorted_tables):
            if table is not schema.meta:
                self._cleaner.execute(delete(table))
        self._cleaner.execute(text(FORGET))
        self._cleaner.execute(text(RESTART))
        return self._used

    def drop(self, url: str) -> None:
        """Remove a database, whatever is connected to it."""
        self._do(f"drop database if exists {make_url(url).database} with (force)")

    def close(self) -> None:
        """Close the connections to the server; on a server that goes on, remove the databases."""
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
    where datname = current_database() and pid <> pg_backend_pid()
"""
RESTART = "select setval(schemaname || '.' || sequencename, 1, false) from pg_sequences"
FORGET = f"""
    delete from meta where key not in ('version', '{STORE_ID}');
    update meta set value = '{LATEST}' where key = 'version'
"""


@contextlib.contextmanager
def databases(**settings: str) -> Iterator[Databases]:
    """Databases on a server that is started for them, or on that of `POSTGRES_URL`."""
    with contextlib.ExitStack() as stack:
        given = os.environ.get("POSTGRES_URL")
        found = Databases(given or stack.enter_context(server(**settings)), ours=not given)
        stack.callback(found.close)
        yield found


@contextlib.contextmanager
def server(**settings: str) -> Iterator[str]:
    """Run a server; yields the URL of its first database."""
    where = binaries()
    assert where is not None
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        user, data = own(Path(folder)), f"{folder}/data"
        configured = [f"-c {name}={value!s}" for name, value in {**SETTINGS, **settings}.items()]
        options = " ".join([f"-k {folder}", *configured]).replace("listen_addresses=", "listen_addresses=''")
        initdb = (*("-D", data, "-U", "conserve", "-A", "trust", "-E", "UTF8", "--locale", "C"), "--no-sync")
        initdb = (*("-D", data, "-U", "conserve", "-A", "trust", "-E", "UTF8", "--locale", "C"), "--no-sync")
        run(where / "initdb", *initdb, user=user).wait()
        options = [word for item in {**SETTINGS, **settings}.items() for word in ("-c", "=".join(item))]
        process = run(where / "postgres", "-D", data, "-k", folder, *options, user=user)
        try:
            until_ready(process, where / "pg_isready", folder, user)
            yield f"postgresql+psycopg://conserve@/postgres?host={folder}"
        finally:
            process.send_signal(signal.SIGQUIT)  # at once; the folder goes anyway
            process.wait()


def until_ready(process: "subprocess.Popen[bytes]", asked: Path, folder: str, user: str | None) -> None:
    """Wait until the server answers; fails if it has ended."""
    while run(asked, "-h", folder, "-q", user=user).wait():
        if process.poll() is not None:
            pytest.fail(f"the PostgreSQL server ended with {process.returncode}")
        time.sleep(0.05)


def own(folder: Path) -> str | None:
    """Give the folder to a user that may run a server; None if the tests' own user may."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in names else "nobody"
    shutil.chown(folder, user)
    return user


def run(*command: object, user: str | None) -> "subprocess.Popen[bytes]":
    """Start one of the server's programs, as this user if one is given; it ends with the tests' process."""
    words = [str(word) for word in command]
    as_user: dict[str, Any] = {}
    if user is not None:
        as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, cwd="/", preexec_fn=end_with_parent, **quiet, **as_user)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone, however that came about."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
