"""The connection to the store's database: transactions, pragmas, and errors in plain words."""

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from conserve.config import SQLITE, sqlite_file, sqlite_url
from conserve.errors import (
    RUN_DOCTOR,
    ConserveError,
    DatabaseDamaged,
    SettingsError,
    StoreError,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    StoreTooNew,
    one_line,
)
from conserve.store.database import guard, moves
from conserve.store.database.migrations import migrate
from conserve.store.database.reader import copied, reader
from conserve.store.database.statements import STATEMENTS
from conserve.store.database.versions import LATEST, too_new

BUSY_TIMEOUT_S = 60.0
# Parameters of libpq, by which a connection to a host that vanished fails within half a minute. The system's own
# time is a quarter of an hour for a statement that nothing acknowledges, and two hours for an answer.
TIMEOUTS = {
    "connect_timeout": 10,  # seconds, as the next two
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # milliseconds
}
PRIMARY = 0xFF  # bits of SQLite's error codes that say the kind
DAMAGED = ("XX001", "XX002")  # codes of PostgreSQL: data_corrupted, index_corrupted
SHARED = {"compiled_cache": STATEMENTS}  # options of all engines
# Options of a statement on PostgreSQL, which `sent` follows.
ENDS = "conserve_ends"  # the transaction is committed with it
AFRESH = "conserve_afresh"  # it is planned for its own values, and never prepared
# Beginnings of the codes of errors: names of SQLite's, SQLSTATEs of PostgreSQL's.
READ_ONLY = ("SQLITE_READONLY", "25006")
NO_ROOM = ("SQLITE_FULL", "SQLITE_IOERR", "53100")
UNUSABLE = ("SQLITE_CANTOPEN",)
UNDONE = ("40P01", "40001")  # of a deadlock, or a moment that is not to be had: the same may succeed at once
PASSWORDS = ("password", "sslpassword")  # parameters of libpq, which the query part of a URL may hold
LOCK_NOT_AVAILABLE = "55P03"

T = TypeVar("T")


def connect(url: str) -> Engine:
    """Open the database at `url` and bring it up to date; raises `StoreMoved` if the store is elsewhere now."""
    engine = engine_of(url)
    with closed_on_error(engine), transaction(engine) as tx:
        if guard.version_here(tx) != LATEST:
            migrate(tx)
    return engine


@contextmanager
def closed_on_error(engine: Engine) -> Iterator[None]:
    """Close the connections of an engine if that for which it was opened fails."""
    try:
        yield
    except BaseException:
        engine.dispose()
        raise


def engine_of(url: str) -> Engine:
    """Engine for the database at `url`, which is left as it is."""
    with usable_url():
        parsed = parse(url)
        if parsed.get_backend_name() != "sqlite":
            # A dialect that is to read columns of the type hstore asks for that type on its first connection.
            unused = {"use_native_hstore": False} if parsed.drivername == "postgresql+psycopg" else {}
            engine = create_engine(
                parsed,
                connect_args=timeouts(parsed),
                pool_pre_ping=True,
                execution_options=SHARED,
                **unused,
            )
            if parsed.get_backend_name() == "postgresql":
                event.listen(engine, "connect", prepare_postgresql)
                event.listen(engine, "do_execute", sent)
                without_warnings()
            return engine
        engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S}, execution_options=SHARED)
    event.listen(engine, "connect", prepare_sqlite)
    event.listen(engine, "begin", begin_sqlite)
    return engine


def timeouts(parsed: URL) -> dict[str, int]:
    """Time-outs of connections to PostgreSQL, without those that the query part of the URL names."""
    if parsed.get_backend_name() != "postgresql":
        return {}
    return {name: value for name, value in TIMEOUTS.items() if name not in parsed.query}


def parse(url: str) -> URL:
    """Parse a URL; one of PostgreSQL that names no driver is opened with psycopg. No error has a part of it."""
    scheme, _, rest = url.partition("://")
    if not scheme.startswith("sqlite") and rest.partition(":")[2].count("@") > 1:
        raise SettingsError("CONSERVE_STORE has an @ in its password; write %40 instead, and %25 for a %")
    try:
        parsed = make_url(url)
    except ValueError:
        raise SettingsError(
            "CONSERVE_STORE has a port that is no number; correct it, or write : as %3A"
        ) from None
    if parsed.database and (path := sqlite_file(url)) is not None:
        return parsed.set(database=str(path))  # SQLAlchemy 2.0 leaves the percent signs of a path
    bare = parsed.drivername in ("postgresql", "postgres")
    return parsed.set(drivername="postgresql+psycopg") if bare else parsed


@contextmanager
def usable_url() -> Iterator[None]:
    """Turn SQLAlchemy's errors about a URL into `SettingsError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("psycopg", "psycopg_binary"):
            raise SettingsError(f"CONSERVE_STORE needs a package that is not installed: {error}") from error
        from conserve.installation import install_line

        raise SettingsError(f"CONSERVE_STORE needs psycopg; run: {install_line('postgres')}") from error
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise SettingsError(f"CONSERVE_STORE is not a database URL that can be used here: {error}") from error


def connect_to_read(url: str) -> Engine | None:
    """Open the database at `url` without writing to it; None if there is none, or one of an older version.

    `connect` makes the database or brings it up to date.
    """
    with usable_url():
        parsed = parse(url)
    if parsed.get_backend_name() != "sqlite":
        return connect(url)
    path = Path(parsed.database or "")
    if not path.is_file():
        return None
    engine = on_one_connection(parsed, lambda: reader(path, timeout_s=BUSY_TIMEOUT_S))
    with closed_on_error(engine):
        with transaction(engine, read_only=True) as tx:
            current = guard.version_here(tx)
        if current > LATEST:
            raise StoreTooNew(too_new(current))
    if current == LATEST:
        return engine
    engine.dispose()
    return None


def connect_to_copy(url: str) -> Engine:
    """Open a copy of the SQLite database at `url`, brought up to date, which goes with the engine."""
    parsed = parse(url)
    engine = on_one_connection(parsed, lambda: copied(Path(parsed.database or ""), timeout_s=BUSY_TIMEOUT_S))
    with closed_on_error(engine), transaction(engine) as tx:
        migrate(tx)
    return engine


def on_one_connection(parsed: URL, opened: Callable[[], sqlite3.Connection]) -> Engine:
    """Engine for an SQLite database that has one connection."""
    engine = create_engine(parsed, creator=opened, poolclass=StaticPool, execution_options=SHARED)
    event.listen(engine, "begin", begin_sqlite)
    return engine


def prepare_sqlite(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    """Set a write-ahead log, an fsync at every commit, and transactions that only `begin_sqlite` opens."""
    connection.isolation_level = None
    for pragma in ("journal_mode = wal", "synchronous = full", "foreign_keys = on", "cache_size = -65536"):
        connection.execute(f"pragma {pragma}")


def prepare_postgresql(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Have commits wait for the disk, also where the server's or the role's default is not to."""
    cursor = connection.cursor()
    cursor.execute(
        "select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'"
    )
    cursor.close()
    connection.commit()


def sent(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
    """Send a statement together with the commit, or unprepared, if its execution options say so."""
    options = context.execution_options
    if options.get(ENDS):
        with cursor.connection.pipeline():
            cursor.execute(statement, parameters)
            cursor.connection.commit()
    elif options.get(AFRESH):
        cursor.execute(statement, parameters, prepare=False)
    else:
        return False  # SQLAlchemy sends it
    return True


def without_warnings() -> None:
    """Have psycopg not print that a pipeline ended badly: the error itself is raised."""
    logging.getLogger("psycopg").setLevel(logging.ERROR)


def begin_sqlite(connection: Connection) -> None:
    """Take the write lock at the start of a transaction that may write: a lock upgraded later could deadlock."""
    immediate = not connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("begin immediate" if immediate else "begin")


@contextmanager
def transaction(engine: Engine, *, read_only: bool = False) -> Iterator[Connection]:
    """Run one transaction: commits at the end, rolls back on any error, turns database errors into `StoreError`."""
    try:
        with engine.connect() as connection:
            if read_only:
                connection = connection.execution_options(**one_moment(engine.dialect.name))
            with connection.begin():
                yield connection
    except ConserveError:
        raise
    except SQLAlchemyError as error:
        raise explain(error, engine) from error


def one_moment(dialect: str) -> dict[str, Any]:
    """Execution options of a transaction that sees one moment throughout and changes nothing.

    SQLite's transactions need no more. On other databases each statement would see what was committed before it
    began, and rows that a compaction moves between two statements would be in the answer of neither.
    """
    options: dict[str, Any] = {"read_only": True}
    if dialect != "sqlite":
        options["isolation_level"] = "REPEATABLE READ"
    if dialect == "postgresql":
        options["postgresql_readonly"] = True
    return options


def of_one_machine(tx: Connection) -> bool:
    """True if processes of one machine alone can be connected: SQLite's file lies on a local disk."""
    return tx.dialect.name == "sqlite"


def address(engine: Engine) -> str:
    """Address of a database without its passwords, as messages, marks and files have it."""
    return shown(engine.url)


def masked(said: str) -> str:
    """Address that an earlier version wrote, perhaps with a password, as `address` has it."""
    has_one = "://" in said and any(f"{name}=" in said for name in PASSWORDS)
    if said.startswith(SQLITE):
        return shown(parse(said))
    return shown(make_url(said)) if has_one else said


def shown(url: URL) -> str:
    """A URL without its passwords; that of an SQLite file names the file for every version of SQLAlchemy."""
    url = url.difference_update_query(PASSWORDS)
    if url.drivername != "sqlite" or not url.database:
        return url.render_as_string(hide_password=True)
    query = url.set(database="").render_as_string().removeprefix(SQLITE)
    return sqlite_url(Path(url.database)) + query


def explain(error: SQLAlchemyError, engine: Engine) -> StoreError:
    """Store error for a database error."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return explain_driver(cause, address(engine))


def explain_driver(error: BaseException, where: str) -> StoreError:
    """Store error for an error of a driver, by its code alone: its words hold names of hosts, users and files."""
    cause = one_line(error)
    if said := moves.said_by_guard(str(error)):
        return StoreMoved(said)
    found = code(error)
    if found.startswith(READ_ONLY):
        return StoreReadOnly.at(where)
    if found.startswith(NO_ROOM):
        return StoreFull(
            f"no space left for the store {where} ({cause}); free some and run the command again, "
            "nothing that was committed is lost"
        )
    if is_damage(error):
        return DatabaseDamaged(f"the store {where} is damaged ({cause})", step="run: conserve check")
    if found in UNDONE:
        return StoreError(
            f"the store {where} undid a change that met those of others ({cause}); run the command again"
        )
    if found.startswith(UNUSABLE):
        return StoreError(f"the store {where} cannot be opened ({cause}); check CONSERVE_HOME")
    return StoreError(f"the store {where} failed: {cause}", step=RUN_DOCTOR)


def code(error: BaseException | None) -> str:
    """Name of SQLite's error or SQLSTATE of PostgreSQL's, from which this one was raised; empty if it has none."""
    while error is not None:
        if found := getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None):
            return str(found)
        error = error.orig if isinstance(error, DBAPIError) else error.__cause__
    return ""


def is_damage(error: BaseException | None) -> bool:
    """True if an error of a driver proves damage; a lock, a missing right or a lost connection does not."""
    if isinstance(error, sqlite3.Error):
        code, said = getattr(error, "sqlite_errorcode", None), str(error)
        if code is None:  # the driver itself raises it
            return said.startswith("Could not decode to UTF-8")
        lacks = code == sqlite3.SQLITE_ERROR and said.startswith(("no such table", "no such column"))
        return lacks or code & PRIMARY in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return getattr(error, "sqlstate", None) in DAMAGED


def reserve_space(tx: Connection) -> None:
    """Touch the database inside the transaction, so that a read-only store is found before any work."""
    tx.execute(text("update meta set value = value where key = 'version'"))


def by_bytes(tx: Connection, column: ColumnElement[str]) -> ColumnElement[str]:
    """Column to order by as Python sorts texts; a database's own collation may order them otherwise.

    A transaction that locks several rows takes them in this order.
    """
    return column.collate("C") if tx.dialect.name == "postgresql" else column


def chunks(values: Sequence[T], size: int = 500) -> Iterable[Sequence[T]]:
    """Cut values into slices short enough for an IN list in every database."""
    return (values[start : start + size] for start in range(0, len(values), size))
