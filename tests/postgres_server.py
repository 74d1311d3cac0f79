"""A PostgreSQL server of a test's own, in a folder of its own, reached through a socket."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
USER = "postgres"  # the server refuses to run as root
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}  # no test cuts the power


def is_installed() -> bool:
    """True if there are programs to start a server with, and a driver to reach it."""
    return find_spec("psycopg") is not None and bool(BINARIES) and (os.geteuid() != 0 or bool(account()))


def account() -> pwd.struct_passwd | None:
    """The account under which root runs the server."""
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        return None


@dataclass(slots=True, kw_only=True)
class PostgresServer:
    """A cluster in a folder, which may run or not."""

    folder: Path
    data: str = "data"
    settings: Mapping[str, str] = field(default_factory=dict)
    databases: int = 0

    @property
    def data_folder(self) -> Path:
        """Folder of the cluster."""
        return self.folder / self.data

    def make(self) -> None:
        """Make the cluster."""
        self.run("initdb", "-D", str(self.data_folder), "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        """Start the server, and wait until it takes connections."""
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            **FAST,
            **self.settings,
        }
        words = " ".join(f"-c {name}='{value}'" for name, value in options.items())
        log = str(self.folder / "log")
        self.run("pg_ctl", "-D", str(self.data_folder), "-w", "-t", "120", "-l", log, "-o", words, "start")

    def stop(self, how: str = "fast") -> None:
        """Stop the server, if it runs."""
        self.run("pg_ctl", "-D", str(self.data_folder), "-w", "-m", how, "stop", check=False)

    def url(self, database: str) -> str:
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

    def run(self, program: str, *words: str, check: bool = True) -> None:
        """Run one of PostgreSQL's programs as the server's user."""
        done = self.process([str(BINARIES[-1] / program), *words])
        assert done.returncode == 0 or not check, (program, words, done.stdout, self.logged())

    def process(self, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a program as the server's user."""
        options = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            check=False,
            **options,  # type: ignore[arg-type]
        )

    def logged(self) -> str:
        """Last lines of the server's log."""
        log = self.folder / "log"
        return log.read_text()[-2000:] if log.exists() else ""


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """Run a server until the context ends."""
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # short, for the path of the socket
    folder.chmod(0o755)
    if (found := account()) is not None and os.geteuid() == 0:
        os.chown(folder, found.pw_uid, found.pw_gid)
    server = PostgresServer(folder=folder, settings=settings or {})
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)
