"""Connections to an SQLite store that only read, even on a full disk.

A reader of a write-ahead log needs its index in a file beside it, and makes that file unless another process has.
On a full disk it cannot: then it locks the whole database and keeps the index in memory.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

NO_ROOM = ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN")
PROBE = "select count(*) from sqlite_master"


def reader(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """Open a database to read it; transactions are begun by `begin` alone."""
    try:
        return probed(opened(path, "ro", timeout_s))
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith(NO_ROOM):
            raise
        try:
            return alone(path, timeout_s)
        except sqlite3.Error:
            raise error from None


def copied(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """Open a copy of a database, which may be changed and goes with the connection."""
    # An empty name makes a temporary file.
    copy = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    with closing(reader(path, timeout_s=timeout_s)) as read:
        read.backup(copy)
    return copy


def alone(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Open a database that no other process has open, without any file beside it."""
    connection = opened(path, "rw", timeout_s)
    connection.execute("pragma locking_mode = exclusive")
    connection.execute("pragma query_only = on")
    return probed(connection)


def opened(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    """Open a database that exists."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)


def probed(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, if it can read; closed otherwise."""
    try:
        connection.execute(PROBE).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection
