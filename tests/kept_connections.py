"""Connections to the database that tests share: closed ones go on to the next test, with the server's process.

A server forks a process for each new connection, and that process reads the catalog again: both together were more
than half of what a small test cost the server.
"""

import os
import select
from collections.abc import Collection
from typing import Any, ClassVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGenConn
from psycopg.pq.abc import PGconn
from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.pool import ConnectionPoolEntry

MOST = 8  # connections that wait; each is a process
FORGET = b"discard all"  # also what is listened to, locks of the session, and settings


def closed_one() -> PGconn:
    """A connection of libpq's that has ended."""
    made = pq.PGconn.connect_start(b"")
    made.finish()
    return made


class KeptConnection(psycopg.Connection[Any]):
    """A connection that does not end when it is closed, but forgets all that it knew and waits for an owner."""

    waiting: ClassVar[list[tuple[int, str, PGconn]]] = []
    """Those that wait, each with the process that opened it and its parameters."""
    opened_by: tuple[int, str]

    @classmethod
    def _connect_gen(cls, conninfo: str = "") -> PQGenConn["KeptConnection"]:
        key = (os.getpid(), conninfo)
        for entry in cls.waiting:
            if entry[:2] == key:
                cls.waiting.remove(entry)
                if is_silent(entry[2]):
                    found = cls(entry[2])
                    break
                entry[2].finish()
                return (yield from cls._connect_gen(conninfo))
        else:
            found = yield from super()._connect_gen(conninfo)
        found.opened_by = key
        return found

    def close(self) -> None:
        """End the connection, unless it may be kept."""
        if self.closed:
            return
        if not self.is_fit():
            super().close()
            return
        self.waiting.append((*self.opened_by, self.pgconn))
        self.pgconn = closed_one()
        self._closed = True

    def is_fit(self) -> bool:
        """Let the server's process forget; False if it cannot, or if it belongs to a parent of this process."""
        if self.opened_by[0] != os.getpid() or len(self.waiting) >= MOST:
            return False
        free = (pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)
        if self.pgconn.transaction_status not in free or self.pgconn.pipeline_status:
            return False
        begun = self.pgconn.transaction_status != pq.TransactionStatus.IDLE
        statements = (b"rollback", FORGET) if begun else (FORGET,)
        done = (self.pgconn.exec_(statement).status for statement in statements)
        forgot = all(status == pq.ExecStatus.COMMAND_OK for status in done)
        while self.pgconn.notifies() is not None:
            pass  # calls that the owner did not take
        return forgot


def is_silent(pgconn: PGconn) -> bool:
    """True unless the server has said something since, as it does when it ends a connection."""
    return not select.select([pgconn.socket], [], [], 0)[0]


class ConnectionKeeper:
    """Keeps the closed connections to one database."""

    def __init__(self, database: str) -> None:
        self._database = database
        event.listen(Engine, "do_connect", self._connect)

    def _connect(
        self, _: Dialect, __: ConnectionPoolEntry, arguments: list[Any], named: dict[str, Any]
    ) -> KeptConnection | None:
        kept = named.get("dbname") == self._database
        return KeptConnection.connect(*arguments, **named) if kept else None

    def pids(self) -> Collection[int]:
        """Processes of the server that wait for an owner."""
        return [pgconn.backend_pid for pid, _, pgconn in KeptConnection.waiting if pid == os.getpid()]

    def end(self) -> None:
        """End the connections that wait; those that follow are new ones."""
        for entry in [entry for entry in KeptConnection.waiting if entry[0] == os.getpid()]:
            KeptConnection.waiting.remove(entry)
            entry[2].finish()

    def close(self) -> None:
        """End the connections, and keep no others."""
        event.remove(Engine, "do_connect", self._connect)
        self.end()
