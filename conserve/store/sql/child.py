"""Work in a child process that sends its results through a pipe as they are made.

A child can be killed at any instant, whatever library it is in, and the kernel bounds its memory. It is a fork, so
that the work may be any function and no interpreter has to start. The parent's only threads at that time belong to
allocators and BLAS, which tolerate a fork. The pipe carries frames: kind, length, payload.
"""

import ctypes
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

HEADER = struct.Struct("<cQ")
TICK_S = 0.1  # between two calls of `on_wait`
SLACK_BYTES = 128 << 20  # for stacks of threads and the allocator itself
PR_SET_PDEATHSIG = 1

Send = Callable[[bytes, bytes], None]


class Frame(NamedTuple):
    """One message of a child process."""

    kind: bytes  # one byte
    payload: bytes | bytearray


class TookTooLong(Exception):
    """The child computed for longer than its `timeout_s`."""


class Died(Exception):
    """The child ended before its work was done; the message says by which signal or exit code."""


@contextmanager
def working(
    work: Callable[[Send], None],
    *,
    memory_bytes: int | None = None,
    timeout_s: float | None = None,
    on_wait: Callable[[float | None], None] = lambda waited_s: None,
) -> Iterator[Iterator[Frame]]:
    """Run `work` in a child and yield the frames it sends. The child ends with the context, done or not.

    `on_wait` is called every 0.1 s of a wait for the child, with the seconds waited so far, and with None
    at its end. Only such waits count against `timeout_s`: a slow reader of the frames costs the child no time.
    Reading the frames raises `TookTooLong` or `Died`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        become_worker(work, writer, memory_bytes)
    os.close(writer)
    child = ChildProcess(pid)
    try:
        yield frames(WaitingReader(reader, timeout_s, on_wait), child)
    finally:
        os.close(reader)
        child.end()


class ChildProcess:
    """A forked process, which is waited for exactly once."""

    def __init__(self, pid: int) -> None:
        self._pid: int | None = pid

    def wait(self) -> int:
        """Wait for the process to end; returns its exit code, negative for the signal that ended it."""
        assert self._pid is not None
        pid, self._pid = self._pid, None
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """Kill the process, unless it was waited for."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()


def become_worker(work: Callable[[Send], None], writer: int, memory_bytes: int | None) -> None:
    """Do the work and end this process, without the exit handlers that it has from the parent."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.umask(0o077)  # spilled files are readable for their user alone
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        if memory_bytes is not None:
            bound_memory(memory_bytes)
        work(lambda kind, payload: send(writer, kind, payload))
        code = 0
    finally:
        os._exit(code)


def bound_memory(memory_bytes: int) -> None:
    """Bound the memory that this process takes from now on, in bytes (Linux; elsewhere nothing happens)."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = taken_bytes() + memory_bytes + SLACK_BYTES
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def unbound_memory() -> None:
    """Lift the bound on memory, so that there is enough to report the failure."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def taken_bytes() -> int:
    """Bytes of writable memory that are this process's own."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")


def send(writer: int, kind: bytes, payload: bytes) -> None:
    """Write one frame."""
    for data in (HEADER.pack(kind, len(payload)), payload):
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(writer, rest) :]


def frames(waiting: "WaitingReader", child: ChildProcess) -> Iterator[Frame]:
    """Yield frames until the child closes its end of the pipe."""
    while head := waiting.read(HEADER.size):
        kind, length = HEADER.unpack(head)
        payload = waiting.read(length)
        if len(payload) < length:
            break
        yield Frame(kind, payload)
    if code := child.wait():
        raise Died(f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")


class WaitingReader:
    """Reads a pipe and counts the time spent waiting for it."""

    def __init__(self, reader: int, timeout_s: float | None, on_wait: Callable[[float | None], None]) -> None:
        self._reader, self._timeout_s, self._on_wait = reader, timeout_s, on_wait
        self._waited_s = 0.0
        self._poll = select.poll()
        self._poll.register(reader, select.POLLIN)

    def read(self, length: int) -> bytearray:
        """Read `length` bytes; fewer only at the end of the pipe."""
        data = bytearray(length)
        filled = 0
        with memoryview(data) as view:
            while filled < length:
                self._until_readable()
                count = os.readv(self._reader, [view[filled:]])
                if not count:
                    break
                filled += count
        del data[filled:]
        return data

    def _until_readable(self) -> None:
        begun, ticks = time.monotonic(), 0
        while not self._poll.poll(TICK_S * 1000):
            ticks += 1
            waited_s = self._waited_s + time.monotonic() - begun
            if self._timeout_s is not None and waited_s > self._timeout_s:
                raise TookTooLong
            self._on_wait(waited_s)
        if ticks:
            self._on_wait(None)
        self._waited_s += time.monotonic() - begun
