"""Starts a command that sends itself a signal at one exact point of its work.

    python -m tests.acceptance.aimed '[{"at": "conserve.store.books.journal:commit", ...}]' run --endpoint fake:

The process, its files and its signals are real; only when the signal comes is chosen: a kill between two
statements of a transaction, which random ones find by luck, happens every time.
"""

import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.acceptance.rewiring import named, wrap

LOOK_S = 0.05
continued: list[int] = []  # each SIGCONT that has come


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A signal to the process itself, before or after the `call`-th call of a function.

    Calls count from the first call of `since` on, if it is given. `holds` leaves the calling thread hanging
    afterwards until a SIGCONT comes; a SIGSTOP needs it, since other threads may run on for a moment.
    """

    at: str  # "module:function" or "module:Class.method"
    call: int = 1
    since: str | None = None
    after: bool = False
    number: int = signal.SIGKILL
    holds: bool = False


def command(
    shots: Sequence[Shot],
    *arguments: str,
    trace: Path | None = None,
    also: Mapping[str, str] | None = None,
    **constants: float,
) -> list[str]:
    """Arguments for `main`: `conserve` with these shots, which writes where it is into the `trace`.

    Constants are named as `module__NAME=1`. The functions that `also` names, as "module:function", are called
    with these strings beforehand.
    """
    aim = {
        "shots": [asdict(shot) for shot in shots],
        "constants": constants,
        "trace": trace and str(trace),
        "also": also or {},
    }
    return [json.dumps(aim), *arguments]


def take_aim(shot: Shot) -> None:
    """Have the signal sent at its call."""
    calls = itertools.count(1)
    due = threading.Event()
    if shot.since is None:
        due.set()
    else:
        wrap(shot.since, before=due.set)

    def strike() -> None:
        if due.is_set() and next(calls) == shot.call:
            fire(shot)

    wrap(shot.at, **{"after" if shot.after else "before": strike})


def fire(shot: Shot) -> None:
    """Send the signal; with `holds`, return once a SIGCONT has come."""
    os.kill(os.getpid(), shot.number)
    while shot.holds and not continued:
        time.sleep(LOOK_S)  # a lock would be that of the signal's handler, too


def main() -> None:
    """Take aim and run the command."""
    from conserve.__main__ import main as run

    aim = json.loads(sys.argv[1])
    sys.argv[:] = ["conserve", *sys.argv[2:]]
    for name, value in aim["constants"].items():
        module_name, _, constant = name.rpartition("__")
        setattr(importlib.import_module(module_name.replace("__", ".")), constant, value)
    signal.signal(signal.SIGCONT, lambda number, _: continued.append(number))
    for at, argument in aim["also"].items():
        named(at)(argument)
    for shot in aim["shots"]:
        take_aim(Shot(**shot))
    if aim["trace"] is not None:
        from tests.acceptance.phases import Trace, follow

        follow(Trace(Path(aim["trace"])))
    run()


if __name__ == "__main__":
    main()
