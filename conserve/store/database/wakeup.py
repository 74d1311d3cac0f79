"""Wake-up calls to harvesters, that rows wait or that a job has stopped: PostgreSQL's NOTIFY and LISTEN.

A call reaches the listeners when its transaction commits. Claims send none, and of commits only the last of a job,
since PostgreSQL commits transactions that notify one after the other. SQLite has no such calls: its harvesters look
for rows by themselves.
"""

from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

CHANNEL = "conserve_rows"


def wake(tx: Connection) -> None:
    """Have the harvesters of this database look at the jobs once the transaction has committed."""
    if tx.dialect.name == "postgresql":
        tx.execute(text(f"notify {CHANNEL}"))


class Listener:
    """A connection that listens for calls."""

    def __init__(self, connection: Connection, driver: Any) -> None:
        self._connection, self._driver = connection, driver
        self._failure: type[Exception] = connection.dialect.loaded_dbapi.Error

    @classmethod
    def of(cls, engine: Engine) -> "Listener | None":
        """Listener on a connection of its own; None where the database has no calls or is out of reach."""
        if engine.dialect.name != "postgresql":
            return None
        with suppress(SQLAlchemyError):
            connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text(f"listen {CHANNEL}"))
            driver = connection.connection.driver_connection
            connection.detach()  # it never goes back to the pool
            return cls(connection, driver)
        return None

    def fileno(self) -> int:
        """File descriptor that becomes readable when a call has come or the connection has ended."""
        return int(self._driver.fileno())

    def heard(self) -> bool:
        """Take all calls that have come; returns False once the connection has ended."""
        try:
            self._driver.pgconn.consume_input()
            while self._driver.pgconn.notifies() is not None:
                pass
        except self._failure:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        with suppress(SQLAlchemyError):
            self._connection.close()
