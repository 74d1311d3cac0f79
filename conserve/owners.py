"""Owners of leases and locks: processes, named so that others on the same machine can tell if they still live."""

import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from conserve.hosts import this_boot

PROC = Path("/proc")
SET_S = 2.0  # tolerance for a start time by the wall clock, which may be set
TICK_S = 0.015  # tolerance for a start time since the boot, which is rounded


def this_process() -> str:
    """Name of this process: host:pid:start time:boot.nonce.

    The start time tells a recycled process id from the original. It counts from the named boot, so that it holds
    when the clock is set. On other systems than Linux names have no boot, and a start time by the wall clock.
    """
    pid, nonce = os.getpid(), secrets.token_hex(3)
    if boot := this_boot():
        nonce += f"-{this_namespace()}"
        return f"{socket.gethostname()}:{pid}:{since_boot(pid) or 0:.2f}:{boot}.{nonce}"
    return f"{socket.gethostname()}:{pid}:{start_time(pid) or 0:.0f}:{nonce}"


def this_namespace() -> str:
    """Id of this process's PID namespace: containers may share a host's name, and never its process ids."""
    try:
        return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return ""


def since_boot(pid: int) -> float | None:
    """Seconds from the boot to the start of a process; 0 if it is gone or a zombie, None if it is hidden."""
    try:
        words = (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0 if is_gone(pid) else None
    return 0.0 if words[0] in "ZX" else int(words[19]) / os.sysconf("SC_CLK_TCK")


def start_time(pid: int) -> float | None:
    """Start of a process in seconds since the epoch; 0 if it is gone or a zombie, None if it is hidden."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0 if is_gone(pid) else None


def is_gone(pid: int) -> bool:
    """True if no process has this number, by the kernel: /proc may hide those of other users (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is another user's
        return False
    return False


def dead(owners: Iterable[str], *, one_machine: bool) -> set[str]:
    """Owners among these that ran on this machine and have ended; of other machines nothing is known."""
    return {owner for owner in owners if is_dead(owner, one_machine=one_machine)}


def pid_here(owner: str) -> int | None:
    """Number of an owner's process, which can be sent signals from here; None if it is no such process."""
    host, pid, _, nonce = owner.rsplit(":", 3)
    other = host != socket.gethostname() or is_of_other_boot(nonce) or is_of_other_namespace(nonce)
    return None if other or is_dead(owner) else int(pid)


def is_of_other_boot(nonce: str) -> bool:
    """True if the last part of a name is of a process of another boot; false where it names none."""
    boot, dot, _ = nonce.rpartition(".")
    return bool(dot) and boot != this_boot()


def is_of_other_namespace(nonce: str) -> bool:
    """True if the last part of a name is of a process in another PID namespace; false where it names none."""
    namespace = nonce.rpartition(".")[2].partition("-")[2]
    return bool(namespace) and namespace != this_namespace()


def is_dead(owner: str, *, one_machine: bool = True) -> bool:
    """True if this owner is a process of this machine that has ended.

    Names that only `one_machine` writes, as into SQLite's file or the home, are of boots one after the other. In a
    database that other machines reach, a name may be of one that has this machine's host name, as clones do. There
    another boot tells nothing, and silence ends what the owner holds.
    """
    host, pid, started, nonce = owner.rsplit(":", 3)
    if host != socket.gethostname():
        return False
    if "." not in nonce:
        return one_machine and has_ended(start_time(int(pid)), float(started), SET_S)
    if is_of_other_boot(nonce):
        return one_machine and bool(this_boot())
    return not is_of_other_namespace(nonce) and has_ended(since_boot(int(pid)), float(started), TICK_S)


def has_ended(found: float | None, started: float, tolerance: float) -> bool:
    """True if the process that has this number now did not start then; a process that is hidden may live."""
    return found is not None and abs(found - started) > tolerance
