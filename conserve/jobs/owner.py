"""Who holds a lease: a process, named so that others on its machine can see whether it still lives."""

import os
import secrets
import socket
from collections.abc import Iterable

import psutil


def this_process() -> str:
    """host:pid:start time:nonce; the start time tells a recycled process id from the original."""
    return f"{socket.gethostname()}:{os.getpid()}:{start_time(os.getpid()):.0f}:{secrets.token_hex(3)}"


def start_time(pid: int) -> float:
    """When a process started, in seconds since the epoch; 0 if there is none by now, or only a zombie."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0


def dead(owners: Iterable[str]) -> set[str]:
    """Those of these owners that ran on this machine and run no more; of other machines nothing is known."""
    return {owner for owner in owners if is_dead(owner)}


def is_dead(owner: str) -> bool:
    """Whether this owner is a process of this machine that has ended."""
    host, pid, started, _ = owner.rsplit(":", 3)
    tolerance_s = 2.0  # the kernel's boot time, to which start times are relative, moves with the clock
    return host == socket.gethostname() and abs(start_time(int(pid)) - float(started)) > tolerance_s
