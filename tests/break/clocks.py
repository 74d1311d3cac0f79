"""Wall clocks that a test sets while the process that reads them works.

`install` comes before anything of the program is imported, which may keep `time.time` under another name. A process
that `follow` was called in then reads its clock's offset from a mapped file. The time since boot stays as it is, so
the time of the boot is set with the clock, as the kernel does.
"""

import mmap
import time
from collections.abc import Callable
from pathlib import Path

HOUR_S = 3_600.0

_offset_s = memoryview(bytearray(8)).cast("d")  # in a process whose clock is not set


class Clock:
    """The clock of one process, for the test that sets it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(8))
        self._offset_s = mapped(path)
        self.settings = 0

    def set(self, by_s: float) -> None:
        """Have the clock go ahead of the true time by so much; behind it if negative."""
        if self._offset_s[0] != by_s:
            self._offset_s[0] = by_s
            self.settings += 1


def mapped(path: Path) -> memoryview:
    """The number in a file, shared with the processes that map it too."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("d")


def install() -> None:
    """Have this process, and those forked off it, read a clock that can be set."""
    import psutil._pslinux as linux

    time.time = shifted(time.time)
    linux.boot_time = shifted(linux.boot_time)


def shifted(clock: Callable[[], float]) -> Callable[[], float]:
    """A clock, set by the offset."""

    def now() -> float:
        return clock() + _offset_s[0]

    return now


def follow(path: str) -> None:
    """Have this process go by the clock of this file."""
    global _offset_s
    _offset_s = mapped(Path(path))


def note_late(path: str) -> None:
    """Have this process add a byte to a file for each result that was refused since its lease had gone."""
    from tests.acceptance.rewiring import rewire

    file = Path(path).open("ab", buffering=0)  # noqa: SIM115  open as long as the process

    def noting(count: Callable[..., None]) -> Callable[..., None]:
        def calling(tally: object, committed: object) -> None:
            file.write(b"." * len(committed.late))  # type: ignore[attr-defined]
            count(tally, committed)

        return calling

    rewire("conserve.jobs.harvest.tally:Tally.count", noting)
