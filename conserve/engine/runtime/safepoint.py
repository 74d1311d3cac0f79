"""Safepoints: places in an iteration where a worker checks whether rows are to leave it."""

import contextlib
import struct
import sys
import time
import weakref
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import Self

ROWS_BITS = 20
ALL_ROWS = (1 << ROWS_BITS) - 1  # every row leaves, also online ones: the iteration is abandoned


class LeaveFlag:
    """One word of shared memory: an iteration, and how many of its offline rows are to leave it.

    The word names its iteration, so a flag raised for an iteration that has ended means nothing to the next one.
    It is one word, so that it is read whole or not at all. Source: conserve-2026 section 4.3 (a flag in shared host
    memory, read at every safepoint).
    """

    def __init__(self, memory: SharedMemory, *, owned: bool) -> None:
        self.name = memory.name
        assert memory.buf is not None  # None only after `close`
        self._word = memory.buf.cast("Q")
        self._let_go = weakref.finalize(self, let_go, self._word, memory, owned=owned)

    @classmethod
    def create(cls) -> Self:
        """Create a flag; `close` removes it."""
        flag = cls(SharedMemory(create=True, size=struct.calcsize("Q")), owned=True)
        flag._word[0] = 0
        return flag

    @classmethod
    def attach(cls, name: str) -> Self:
        """Open the flag that another process created; raises `OSError`."""
        return cls(untracked(name), owned=False)

    def raise_for(self, iteration: int, rows: int = ALL_ROWS) -> None:
        """Ask the first `rows` offline rows of this iteration to leave it. Iterations count from 1."""
        self._word[0] = iteration << ROWS_BITS | min(rows, ALL_ROWS)

    def rows_asked(self, iteration: int) -> int:
        """Number of rows that the flag asks to leave this iteration, mostly 0: one load from memory."""
        word = self._word[0]
        return word & ALL_ROWS if word >> ROWS_BITS == iteration else 0

    def close(self) -> None:
        """Close the memory; the flag that created it also removes it."""
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def untracked(name: str) -> SharedMemory:
    """Open memory of another process without Python's tracker, which would remove it when this process ends."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    register = resource_tracker.register
    resource_tracker.register = lambda name, rtype: None
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register


def let_go(word: memoryview, memory: SharedMemory, *, owned: bool) -> None:
    """Close the memory, its view first: memory with an open view cannot be closed."""
    word.release()
    memory.close()
    if owned:
        with contextlib.suppress(FileNotFoundError):
            memory.unlink()


def check_us(checks: int = 100_000) -> float:
    """Time of one check of a flag that is not raised, in microseconds."""
    with LeaveFlag.create() as flag:
        rows_asked = flag.rows_asked
        begun = time.perf_counter()
        for iteration in range(1, checks + 1):
            rows_asked(iteration)
        return (time.perf_counter() - begun) / checks * 1e6
