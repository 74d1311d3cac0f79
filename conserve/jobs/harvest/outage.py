"""Outages: what a harvester that follows the queue does while the store or the endpoint is out of reach."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from conserve.errors import EndpointUnusable, StoreError
from conserve.jobs.harvest.retry import backoff_s
from conserve.store.database.store import Store


class Outage:
    """Says once that something is out of reach, how long to wait each time, and once that it is back."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._what: str | None = None
        self._until_answer = False
        self._failures = 0

    def begin(self, error: StoreError | EndpointUnusable, *, until_answer: bool = False) -> float:
        """Note one more failure; returns the seconds to wait, which double up to a minute.

        With `until_answer` an endpoint is back once it has answered a row: it starts, and refuses rows.
        """
        what = "store" if isinstance(error, StoreError) else "endpoint"
        if what != self._what:
            self._say(f"the {what} cannot be reached ({error}); harvesting waits")
        self._what, self._until_answer = what, until_answer
        self._failures += 1
        return backoff_s(self._failures - 1)

    def end(self) -> None:
        """It is back, so far; the next failure still waits longer than the last."""
        if self._until_answer:
            return
        if self._what is not None:
            self._say(f"the {self._what} is back; harvesting goes on")
        self._what = None

    def answered(self) -> None:
        """The endpoint has answered a row."""
        if self._until_answer:
            self._until_answer = False
            self.end()
            self.forget()

    def forget(self) -> None:
        """It has proved that it works: the next failure is a first one."""
        if not self._until_answer:
            self._failures = 0


async def elapsed_or_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait for so long, or less if the event is set; returns whether it is."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFile:
    """The SQLite file behind the store's connections; other databases tell when they are gone.

    A connection to a file that was deleted or replaced goes on working, and nobody would ever see what it
    writes.
    """

    path: Path
    inode: int

    @classmethod
    def of(cls, store: Store) -> Self | None:
        """The file as it is now; raises `StoreError` if it is gone, lest SQLite make an empty one."""
        url = store.engine.url
        if url.get_backend_name() != "sqlite" or not url.database:
            return None
        path = Path(url.database)
        return cls(path=path, inode=inode(path))

    def check(self) -> None:
        """Raise `StoreError` if the file is not there any more, or is another one."""
        if inode(self.path) != self.inode:
            raise StoreError(f"{self.path} was replaced by another file")


def inode(path: Path) -> int:
    """What tells a file from another one of its name."""
    try:
        return path.stat().st_ino
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}; check CONSERVE_HOME") from error
