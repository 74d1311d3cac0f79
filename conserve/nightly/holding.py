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
            holder = holder_of(home, evaluation)
            if overlap == "skip":
                say(f"a run of {evaluation} is still going ({holder}); this one is skipped, as the file says")
                yield "theirs"
                return
            if overlap == "replace":
                end(home, evaluation)
                hold = "ended the other"
                say(f"the run of {evaluation} that was still going is ended, as the file says")
            else:
                say(
                    f"a run of {evaluation} is still going ({holder}); this one waits for it, as the file says"
                )
            fcntl.flock(file, fcntl.LOCK_EX)
        sign(file, f"{socket.gethostname()} {os.getpid()}")
        try:
            yield hold
        finally:
            sign(file, "")


def taken(file: IO[str]) -> bool:
    """Take the lock; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign(file: IO[str], holder: str) -> None:
    """Write which process holds the lock; nothing before the lock is given away."""
    file.seek(0)
    file.truncate()
    file.write(holder)
    file.flush()


def holder_of(home: Path, evaluation: str) -> str:
    """The process that holds the lock, in words."""
    machine, pid = nights.signed_by(home, evaluation)
    return f"process {pid} on {machine}" if pid else "another process"


def end(home: Path, evaluation: str) -> None:
    """Ask the holder to save its rows and to end; raises `JobRefused` if it is another machine's or user's."""
    machine, pid = nights.signed_by(home, evaluation)
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
