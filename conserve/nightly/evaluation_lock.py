"""One process at a time works on an evaluation; its lock ends with it, however it ends."""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from conserve import owners
from conserve.errors import JobRefused
from conserve.evals.plan import Overlap
from conserve.store.files import nights, os_errors

Say = Callable[[str], None]
Hold = Literal["ours", "ended the other", "theirs"]

SIGNATURE = 256  # bytes, always as many, so that one write replaces another and no reader sees half of it
LOOKS, LOOK_S = 100, 0.05  # number of looks at a lock that is held and not signed yet; seconds between two


@contextmanager
def held(home: Path, evaluation: str, overlap: Overlap, say: Say) -> Iterator[Hold]:
    """Hold an evaluation; yields "theirs" if another process does and the plan says to skip.

    With "queue" this process waits for the other, unless one waits already. With "replace" it ends the other first,
    and raises `JobRefused` if it cannot.
    """
    hold: Hold = "ours"
    with locking(home, nights.lock_file(home, evaluation)) as file:
        if not take(file) and (holder := holder_of(file, home, evaluation)) is not None:
            still = f"a run of {evaluation} is still going ({owner_in_words(holder)})"
            if overlap == "skip":
                say(f"{still}; this one is skipped, as the file says")
                yield "theirs"
                return
            if overlap == "replace":
                end(holder, evaluation)
                hold = "ended the other"
                say(f"the run of {evaluation} that was still going is ended, as the file says")
                fcntl.flock(file, fcntl.LOCK_EX)
            else:
                with locking(home, nights.waiting_file(home, evaluation)) as waiting:
                    if not take(waiting):
                        say(f"{still}, and another one waits for it; this one is skipped")
                        yield "theirs"
                        return
                    say(f"{still}; this one waits for it, as the file says")
                    fcntl.flock(file, fcntl.LOCK_EX)
        sign(file, owners.this_process())
        try:
            yield hold
        finally:
            sign(file, "")


@contextmanager
def locking(home: Path, path: Path) -> Iterator[int]:
    """Yield the descriptor of a file to lock; the lock ends with it."""
    with os_errors.explained(home):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def take(file: int) -> bool:
    """Take the lock; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign(file: int, owner: str) -> None:
    """Write which process holds the lock, or that none does before it is given away."""
    os.pwrite(file, owner.encode().ljust(SIGNATURE), 0)


def holder_of(file: int, home: Path, evaluation: str) -> str | None:
    """The owner that holds the lock; None if the lock has been given away, and is this process's now.

    A lock is signed just after it is taken. Empty for one that stays unsigned.
    """
    for _ in range(LOOKS):
        if (owner := nights.signed_by(home, evaluation)) and not nights.is_ended(owner):
            return owner
        if take(file):
            return None
        time.sleep(LOOK_S)
    return ""


def owner_in_words(owner: str) -> str:
    """An owner in words."""
    if not owner:
        return "another process"
    host, _, rest = owner.partition(":")
    return f"process {rest.partition(':')[0]} on {host}"


def end(owner: str, evaluation: str) -> None:
    """Ask the holder to save its rows and to end; raises `JobRefused` if it is another machine's or user's."""
    pid = None
    with contextlib.suppress(ValueError):  # no signature
        pid = owners.pid_here(owner)
    if pid is None:
        raise JobRefused(f"a run of {evaluation} is going in {owner_in_words(owner)}; end it there first")
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    except PermissionError as error:
        raise JobRefused(
            f"a run of {evaluation} is going in process {pid} of another user; let them end it first"
        ) from error
