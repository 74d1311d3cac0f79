"""Owners of leases and locks: processes, named so that others on the same machine can tell if they still live."""

import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SET_S = 2.0  # tolerance for a start time by the wall clock, which may be set
TICK_S = 0.015  # tolerance for a start time since the boot, which is rounded


def this_process() -> str:
    """Name of this process: host:pid:start time:boot.nonce.

    The start time tells a recycled process id from the original. It counts from the named boot, so that it holds
    when the clock is set. Names without a boot have a start time by the wall clock: on other systems than Linux,
    and names that earlier versions gave.
    """
    pid, nonce = os.getpid(), secrets.token_hex(3)
    if boot := this_boot():
        nonce += f"-{this_namespace()}"
        return f"{socket.gethostname()}:{pid}:{since_boot(pid):.2f}:{boot}.{nonce}"
    return f"{socket.gethostname()}:{pid}:{start_time(pid):.0f}:{nonce}"


def this_boot() -> str:
    """Id of this boot of the machine; empty where the system has none."""
    try:
        return BOOT_ID.read_text()[:8]
    except OSError:
        return ""


def this_namespace() -> str:
    """Id of this process's PID namespace: containers may share a host's name, and never its process ids."""
    try:
        return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return ""


def since_boot(pid: int) -> float:
    """Seconds from the boot to the start of a process; 0 if it is gone or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if words[0] in "ZX" else int(words[19]) / os.sysconf("SC_CLK_TCK")


def start_time(pid: int) -> float:
    """Start of a process in seconds since the epoch; 0 if it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0


def dead(owners: Iterable[str]) -> set[str]:
    """Owners among these that ran on this machine and have ended; of other machines nothing is known."""
    return {owner for owner in owners if is_dead(owner)}


def pid_here(owner: str) -> int | None:
    """Number of an owner's process, which can be sent signals from here; None if it is no such process."""
    host, pid, _, nonce = owner.rsplit(":", 3)
    other = host != socket.gethostname() or is_of_other_namespace(nonce)
    return None if other or is_dead(owner) else int(pid)


def is_of_other_namespace(nonce: str) -> bool:
    """True if the last part of a name is of a process in another PID namespace; false where it names none."""
    namespace = nonce.rpartition(".")[2].partition("-")[2]
    return bool(namespace) and namespace != this_namespace()


def is_dead(owner: str) -> bool:
    """True if this owner is a process of this machine that has ended."""
    host, pid, started, nonce = owner.rsplit(":", 3)
    if host != socket.gethostname():
        return False
    boot, dot, _ = nonce.rpartition(".")
    if dot:
        if boot == this_boot() and is_of_other_namespace(nonce):
            return False  # another container's: nothing is known
        return boot != this_boot() or abs(since_boot(int(pid)) - float(started)) > TICK_S
    return abs(start_time(int(pid)) - float(started)) > SET_S
