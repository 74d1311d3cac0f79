"""Who holds a lease: a process, named so that others on its machine can see whether it still lives."""

import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SET_S = 2.0  # that a start time by the clock may be off: it moves with the clock
TICK_S = 0.015  # that one since the boot may be off: it is rounded


def this_process() -> str:
    """host:pid:start time:boot.nonce; the start time tells a recycled process id from the original.

    It counts from the boot that is named, so that a clock which is set takes no process for another one. Without
    a boot it is by the clock: on other systems than Linux, and in the names that earlier versions gave.
    """
    pid, nonce = os.getpid(), secrets.token_hex(3)
    if boot := this_boot():
        return f"{socket.gethostname()}:{pid}:{since_boot(pid):.2f}:{boot}.{nonce}"
    return f"{socket.gethostname()}:{pid}:{start_time(pid):.0f}:{nonce}"


def this_boot() -> str:
    """What this boot of the machine is called; empty where the system does not say."""
    try:
        return BOOT_ID.read_text()[:8]
    except OSError:
        return ""


def since_boot(pid: int) -> float:
    """Seconds from the boot to the start of a process; 0 if there is none by now, or only a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if words[0] in "ZX" else int(words[19]) / os.sysconf("SC_CLK_TCK")


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
    host, pid, started, nonce = owner.rsplit(":", 3)
    if host != socket.gethostname():
        return False
    boot, dot, _ = nonce.rpartition(".")
    if dot:
        return boot != this_boot() or abs(since_boot(int(pid)) - float(started)) > TICK_S
    return abs(start_time(int(pid)) - float(started)) > SET_S
