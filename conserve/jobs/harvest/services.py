"""The servers that run over a store, registered so that `conserve status` can ask them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conserve.config import Settings

FOLDER = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A running `conserve serve`."""

    url: str
    owner: str  # its process, named as the owners of leases are


@contextmanager
def announce(settings: Settings, url: str) -> Iterator[None]:
    """Register this process's server for `running` until the context ends."""
    import msgspec

    from conserve.owners import this_process
    from conserve.whole import write_whole

    path = settings.home / FOLDER / f"{os.getpid()}.json"
    write_whole(path, msgspec.json.encode(RunningServer(url=url, owner=this_process())))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running(settings: Settings) -> list[RunningServer]:
    """Servers whose processes live; records of dead ones are deleted."""
    paths = sorted((settings.home / FOLDER).glob("[0-9]*.json"))
    if not paths:  # the usual case: status imports nothing for it
        return []
    from conserve.owners import is_dead

    found = []
    for path in paths:
        record = read(path)
        if record is not None and not is_dead(record.owner):
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return found


def read(path: Path) -> RunningServer | None:
    """Record in a file; None if it holds none."""
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningServer)
    except (OSError, msgspec.DecodeError):
        return None
