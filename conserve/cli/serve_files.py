"""Files of servers in the home: one a machine and port, since replicas on several machines may share a home."""

import socket
from contextlib import suppress
from pathlib import Path

from conserve.jobs.harvest.services import FOLDER

PATTERNS = ("*.log", "arrivals/*/*.csv*")
KEPT_S = 30 * 86_400.0  # since a file's last line: a replica of Kubernetes has a new name at each start


def make_home(home: Path) -> None:
    """Make the home, before a file of a server is the first in it."""
    from conserve.store.files.os_errors import explained
    from conserve.store.files.place import place_of

    with explained(home):
        place_of(home).make_private()


def log_file(home: Path, port: int) -> Path:
    """Log of the server of this machine at a port."""
    return home / FOLDER / f"{own_name(port)}.log"


def own_name(port: int) -> str:
    """Name of the server of this machine at a port."""
    return f"{socket.gethostname()}-{port}"


def drop_old(home: Path, *, now: float) -> None:
    """Remove files of servers that have gone long ago."""
    for pattern in PATTERNS:
        for path in (home / FOLDER).glob(pattern):
            with suppress(OSError):
                if path.stat().st_mtime < now - KEPT_S:
                    path.unlink()
