"""A PostgreSQL server of the tests' own, of the binaries that are installed: `apt install postgresql` is enough.

It lies in a folder of its own, listens on a socket there alone, and ends with the process that started it.
"""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

INSTALLED = "/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/local/pgsql/bin"
USER = "conserve"
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}  # no test cuts the power
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


@dataclass(slots=True, kw_only=True)
class PostgresServer:
    """A cluster in a folder, which may run or not."""

    folder: Path
    binaries: Path
    account: str | None
    """User that runs the server; None for the tests' own, which is not root."""
    data: str = "data"
    settings: Mapping[str, str] = field(default_factory=dict)
    databases: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def data_folder(self) -> Path:
        """Folder of the cluster."""
        return self.folder / self.data

    def make(self) -> None:
        """Make the cluster."""
        rights = ("-U", USER, "-A", "trust", "-E", "UTF8", "--locale", "C")
        self.run("initdb", "-D", str(self.data_folder), *rights, "--no-sync")

    def start(self) -> None:
        """Start the server, and wait until it takes connections."""
        settings = {"listen_addresses": "", **FAST, **self.settings}
        options = [word for item in settings.items() for word in ("-c", "=".join(item))]
        words = ("-D", str(self.data_folder), "-k", str(self.folder), *options)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.binaries / "postgres"), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=end_with_parent,
                **self.as_account,
            )
        while self.done("pg_isready", "-h", str(self.folder), "-q").returncode:
            if self.process.poll() is not None:
                pytest.fail(f"the PostgreSQL server ended with {self.process.returncode}: {self.logged()}")
            time.sleep(0.05)

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop the server, if it runs; SIGQUIT ends it at once."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None

    def url(self, database: str = "postgres") -> str:
        """Address of a database, as CONSERVE_STORE has it."""
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """Address of a new, empty database."""
        self.databases += 1
        name = f"store{self.databases}"
        self.sql(f"create database {name}")
        return self.url(name)

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement outside a transaction; returns its rows."""
        import psycopg

        where = f"host={self.folder} user={USER} dbname={database}"
        with psycopg.connect(where, autocommit=True) as connection:
            done = connection.execute(statement)  # type: ignore[call-overload]
            return list(done.fetchall()) if done.description else []

    def run(self, program: str, *words: str) -> None:
        """Run one of PostgreSQL's programs, or another one, as the server's user."""
        done = self.done(program, *words)
        assert done.returncode == 0, (program, words, done.stdout, self.logged())

    def done(self, program: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a program as the server's user, whatever comes of it."""
        ours = self.binaries / program
        return subprocess.run(
            [str(ours) if ours.exists() else program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            check=False,
            **self.as_account,
        )

    def logged(self) -> str:
        """Last lines of the server's log."""
        log = self.folder / "log"
        return log.read_text()[-2000:] if log.exists() else ""

    @property
    def as_account(self) -> dict[str, Any]:
        """Arguments of `subprocess` that start a program as the server's user."""
        if self.account is None:
            return {}
        return {"user": self.account, "group": pwd.getpwnam(self.account).pw_gid, "extra_groups": []}


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """Run a server until the context ends."""
    found = binaries()
    assert found is not None, "PostgreSQL is not installed"
    with tempfile.TemporaryDirectory(
        prefix="pg", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp"), ignore_cleanup_errors=True
    ) as folder:
        where = Path(folder)  # short, for the path of the socket
        server = PostgresServer(
            folder=where, binaries=found, account=given_to(where), settings=settings or {}
        )
        try:
            server.make()
            server.start()
            yield server
        finally:
            server.stop(signal.SIGQUIT)


def given_to(folder: Path) -> str | None:
    """Give the folder to a user that may run a server; None if the tests' own user may."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in names else "nobody"
    shutil.chown(folder, user, pwd.getpwnam(user).pw_gid)
    return user


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone, however that came about."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
