"""Processes that live requests of a server on the same machine do not wait for."""

import os
from contextlib import suppress
from pathlib import Path

BESIDE_NICE = 5  # of a process that answers small questions beside a server
AUTOGROUP = Path("/proc/self/autogroup")


def wake_quietly() -> None:
    """Take the processor from no other process for being woken; wait for a turn instead.

    Answers of rows wake a harvester many times a second. On a machine with few cores it would else run at once, in
    place of the engine core or the API server. Its share of the processor stays the same. Threads that are started
    later inherit this. Does nothing where the system has no such policy (Linux: `SCHED_BATCH`).
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def give_way() -> None:
    """Let the processes of the server beside go first where all want the same processor.

    Linux weighs sessions against each other (`sched_autogroup_enabled`), and niceness counts within a session only.
    So the leader of a session, as `conserve serve` starts this process, makes its whole session nicer.
    """
    wake_quietly()
    os.nice(BESIDE_NICE)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # another system, or a kernel without such groups
            AUTOGROUP.write_text(str(BESIDE_NICE))
