"""Findings on the machine: disk, clock, open files, shared memory."""

import errno
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Self

from conserve.cli import output
from conserve.cli.doctor_finding import Finding
from conserve.units import GIB

LITTLE_DISK_BYTES = GIB
MORE_ROOM = "free some space, or set CONSERVE_HOME to another disk"
FULL = (errno.ENOSPC, errno.EDQUOT)
SLOW_FSYNC_MS = 100.0  # a save waits for two or three of them
FSYNCS = 5
FSYNC_BYTES = 4096
FEW_FILES = 1024  # a connection for each row in flight and each live request, beside shards and libraries
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_BYTES = 256 << 20  # vLLM's queue between its processes takes 160 MiB
JUMP_S = 0.5  # more than a clock is slewed while the doctor looks
FUTURE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Readings of the system's clock, which can be set, and the monotonic one, which cannot, at one moment."""

    wall_s: float
    monotonic_s: float

    @classmethod
    def now(cls) -> Self:
        """Read both clocks."""
        return cls(wall_s=time.time(), monotonic_s=time.monotonic())

    def jumped_s(self, later: Self) -> float:
        """Seconds by which the system's clock was set between the two moments."""
        return (later.wall_s - self.wall_s) - (later.monotonic_s - self.monotonic_s)


def clock(first: Clocks, last: Clocks, newest_s: float | None) -> Finding:
    """Compare the system's clock with the monotonic one, and with the newest time in the store."""
    fix = "let NTP keep this machine's clock (timedatectl set-ntp true): deadlines and forecasts go by it"
    jumped_s = first.jumped_s(last)
    if abs(jumped_s) > JUMP_S:
        return Finding(
            "clock", f"was set by {jumped_s:+.1f} s within {time_compared(first, last)}", ok=False, fix=fix
        )
    ahead_s = newest_s - last.wall_s if newest_s is not None else 0.0
    if ahead_s > FUTURE_S:
        value = f"{output.duration(ahead_s)} behind the newest time in the store"
        return Finding("clock", value, ok=False, fix=fix)
    return Finding("clock", f"{output.moment(last.wall_s)}, steady for {time_compared(first, last)}")


def time_compared(first: Clocks, last: Clocks) -> str:
    """Words for the time over which the clocks were compared."""
    return output.duration(last.monotonic_s - first.monotonic_s)


def database_clock(ahead_s: float, lease_s: float) -> Finding:
    """Judge the database server's clock, which is so many seconds ahead of this machine's."""
    fix = "let NTP keep both clocks (timedatectl set-ntp true): rows of a run change hands by them"
    near = "the same as here" if abs(ahead_s) < 1 else f"{ahead_s:+.1f} s from here"
    return Finding.judged("db clock", near, fix, ok=abs(ahead_s) <= lease_s / 10)


def disk(home: Path) -> Finding:
    """Free space for request files and results."""
    free = shutil.disk_usage(home).free
    return Finding.judged("disk", f"{free / GIB:.1f} GiB free", MORE_ROOM, ok=free >= LITTLE_DISK_BYTES)


def fsync(home: Path, timer: Callable[[], float] = time.perf_counter) -> Finding:
    """Time that the disk takes to make a page durable, in ms; raises OSError unless the disk is full."""
    taken_s = []
    try:
        with NamedTemporaryFile(dir=home, prefix=".doctor-", buffering=0) as file:
            for _ in range(FSYNCS):
                began = timer()
                file.write(b"\0" * FSYNC_BYTES)
                os.fsync(file.fileno())
                taken_s.append(timer() - began)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return Finding("fsync", "not measured: no space left", ok=False, fix=MORE_ROOM)
    ms = 1e3 * statistics.median(taken_s)
    fix = "every save waits for it: set CONSERVE_HOME to a folder on a local SSD"
    return Finding.judged("fsync", f"{ms:.3g} ms", fix, ok=ms <= SLOW_FSYNC_MS)


def open_files() -> Finding:
    """Number of files and connections that a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = "without limit" if hard == unlimited else f"at most {hard:,}"
    if soft == unlimited:
        return Finding("files", "without limit")
    return Finding.judged(
        "files", f"{soft:,} open at once, {most}", f"run: ulimit -n {4 * FEW_FILES}", ok=soft >= FEW_FILES
    )


def shared_memory(folder: Path = SHARED_MEMORY) -> Finding | None:
    """Shared memory between vLLM's processes; None on systems that keep it elsewhere."""
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    fix = f"start the container with --shm-size=2g or --ipc=host, or run: mount -o remount,size=2G {folder}"
    value = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    return Finding.judged("shared", value, fix, ok=usage.free >= LITTLE_SHARED_BYTES)
