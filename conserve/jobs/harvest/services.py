"""The servers that run over a store, registered so that `conserve status` can ask them."""

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from conserve.config import Settings

FOLDER = "serving"
TOUCH_S = 60.0  # between two touches of a record by its server
STALE_S = 5 * TOUCH_S
"""Time after which a silent server of another machine counts as gone: the clocks may differ by minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A running `conserve serve`. Its record is touched every `TOUCH_S`."""

    url: str  # at which its own machine reaches it
    owner: str  # its process, named as the owners of leases are
    network: str  # where that address holds, which other containers do not share; empty if it has no name
    elsewhere: str  # address for other machines; empty if it listens for its own alone

    def from_here(self) -> "RunningServer":
        """The server by the address at which this machine may reach it."""
        from socket import gethostname

        from conserve.hosts import this_network, with_host

        owners_host = self.owner.rsplit(":", 3)[0]
        here = self.network == this_network() if self.network else owners_host == gethostname()
        return self if here else replace(self, url=self.elsewhere or with_host(self.url, owners_host))


@dataclass(frozen=True, slots=True)
class Announcement:
    """A server's own record."""

    path: Path
    record: RunningServer

    @asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """Touch the record again and again during the block."""
        import asyncio

        async def touch() -> None:
            while True:
                await asyncio.sleep(TOUCH_S)
                with suppress(OSError):  # the volume may be away
                    self.touch()

        touching = asyncio.create_task(touch())
        try:
            yield
        finally:
            touching.cancel()

    def touch(self) -> None:
        """Touch the record; one that was deleted meanwhile, by a machine with another time, is written anew."""
        try:
            os.utime(self.path)
        except FileNotFoundError:
            self.write()

    def write(self) -> None:
        """Write the record."""
        import msgspec

        from conserve.whole import write_whole

        write_whole(self.path, msgspec.json.encode(self.record))


@contextmanager
def announce(settings: Settings, url: str, *, elsewhere: str | None = None) -> Iterator[Announcement]:
    """Register this process's server for `running` until the context ends.

    `elsewhere` is its address for other machines, if it has one. Process ids are no names for records: each server
    is process 1 of its container.
    """
    import secrets

    from conserve.hosts import this_network
    from conserve.owners import this_process

    record = RunningServer(url=url, owner=this_process(), network=this_network(), elsewhere=elsewhere or "")
    path = settings.home / FOLDER / f"{os.getpid()}-{secrets.token_hex(8)}.json"
    announced = Announcement(path, record)
    announced.write()
    try:
        yield announced
    finally:
        path.unlink(missing_ok=True)


def running(settings: Settings) -> list[RunningServer]:
    """Servers that live, as they are reached from here; records of dead ones are deleted."""
    paths = sorted((settings.home / FOLDER).glob("[0-9]*.json"))
    if not paths:  # the usual case: status imports nothing for it
        return []
    found = []
    for path in paths:
        record = read(path)
        if record is not None and lives(record, path):
            found.append(record.from_here())
        else:
            path.unlink(missing_ok=True)
    return found


def lives(record: RunningServer, path: Path) -> bool:
    """False if the server has ended, or is of another machine or container and was silent for `STALE_S`."""
    from conserve.owners import is_dead, pid_here

    if is_dead(record.owner):
        return False
    if pid_here(record.owner) is not None:
        return True
    try:
        return time.time() - path.stat().st_mtime < STALE_S
    except OSError:
        return False


def read(path: Path) -> RunningServer | None:
    """Record in a file; None if it holds none."""
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningServer)
    except (OSError, msgspec.DecodeError):
        return None
