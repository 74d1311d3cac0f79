"""Calls of the store's database that rows were queued or jobs stopped, heard in the harvester's event loop."""

import asyncio
from collections.abc import Callable

from conserve.store.database.wakeup import Listener


class Calls:
    """Runs `heard` at each call while a listener is there; without one the harvester looks for rows by itself."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._listener: Listener | None = None
        self._fd = -1

    @property
    def listening(self) -> bool:
        """True while calls are heard."""
        return self._listener is not None

    def begin(self, listener: Listener | None) -> None:
        """Listen from now on, in place of an earlier listener."""
        self.end()
        if listener is not None:
            self._listener, self._fd = listener, listener.fileno()
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        if self._listener is not None and not self._listener.heard():
            self.end()  # the connection has ended
        self._heard()

    def end(self) -> None:
        """Listen no longer."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._listener.close()
            self._listener = None
