"""One process at a time works on an evaluation; its lock ends with it, however it ends."""

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from conserve.errors import JobRefused
from conserve.evals.plan import Overlap
from conserve.store.files import home as store_home
from conserve.store.files import nights

Say = Callable[[str], None]
Hold = Literal["ours", "ended the other", "theirs"]


@contextmanager
def held(home: Path, evaluation: str, overlap: Overlap, say: Say) -> Iterator[Hold]:
    """Hold an evaluation; yields "theirs" if another process does and the plan says to skip.

    With "queue" this process waits for the other, with "replace" it ends the other first.
    """
    hold: Hold = "ours"
    path = nights.lock_file(home, evaluation)
    with store_home.explained(home):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        if not taken(file):
            holder = holder_of(file)
            if overlap == "skip":
                say(f"a run of {evaluation} is still going ({holder}); this one is skipped, as the file says")
                yield "theirs"
                return
            if overlap == "replace":
                end(file, evaluation)
                hold = "ended the other"
                say(f"the run of {evaluation} that was still going is ended, as the file says")
            else:
                say(
                    f"a run of {evaluation} is still going ({holder}); this one waits for it, as the file says"
                )
            fcntl.flock(file, fcntl.LOCK_EX)
        sign(file)
        yield hold


def taken(file: IO[str]) -> bool:
    """Take the lock; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign(file: IO[str]) -> None:
    """Write which process holds the lock."""
    file.seek(0)
    file.truncate()
    file.write(f"{socket.gethostname()} {os.getpid()}")
    file.flush()


def holder_of(file: IO[str]) -> str:
    """The process that holds the lock, in words."""
    machine, pid = signed(file)
    return f"process {pid} on {machine}" if pid else "another process"


def signed(file: IO[str]) -> tuple[str, int]:
    """Machine and number of the process that signed last; 0 if none has."""
    file.seek(0)
    machine, _, pid = file.read().partition(" ")
    return machine, int(pid) if pid.isdigit() else 0


def end(file: IO[str], evaluation: str) -> None:
    """Ask the holder to save its rows and to end; raises `JobRefused` if it is another machine's or user's."""
    machine, pid = signed(file)
    if not pid or machine != socket.gethostname():
        raise JobRefused(
            f"a run of {evaluation} is going on {machine or 'another machine'}; end it there first"
        )
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    except PermissionError as error:
        raise JobRefused(
            f"a run of {evaluation} is going in process {pid} of another user; let them end it first"
        ) from error
