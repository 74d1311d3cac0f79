"""Safepoints: where a worker in the middle of an iteration looks whether somebody is to leave it."""

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
EVERYBODY = (1 << ROWS_BITS) - 1  # the iteration is abandoned, whoever is in it


class PreemptionFlag:
    """One word of shared memory: the iteration to preempt, and how many of its offline rows are to leave it.

    The number of the iteration cannot go stale: a flag meant for one that has ended says nothing to the next.
    One word, so that it is read whole or not at all.
    Source: conserve-2026 section 4.3 (a flag in shared host memory, read at every safepoint).
    """

    def __init__(self, memory: SharedMemory, *, owned: bool) -> None:
        self.name = memory.name
        assert memory.buf is not None  # None only after `close`
        self._word = memory.buf.cast("Q")
        self._let_go = weakref.finalize(self, let_go, self._word, memory, owned=owned)

    @classmethod
    def create(cls) -> Self:
        """A new flag; `close` removes it."""
        flag = cls(SharedMemory(create=True, size=struct.calcsize("Q")), owned=True)
        flag._word[0] = 0
        return flag

    @classmethod
    def attach(cls, name: str) -> Self:
        """The flag that another process has made; raises `OSError`."""
        return cls(untracked(name), owned=False)

    def raise_for(self, iteration: int, rows: int = EVERYBODY) -> None:
        """Ask for the first so many of this iteration's offline rows to leave it. Iterations count from 1."""
        self._word[0] = iteration << ROWS_BITS | min(rows, EVERYBODY)

    def rows_to_leave(self, iteration: int) -> int:
        """How many are to leave this iteration, mostly none: one load from memory."""
        word = self._word[0]
        return word & EVERYBODY if word >> ROWS_BITS == iteration else 0

    def close(self) -> None:
        """Let go of the memory; who made it removes it."""
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def untracked(name: str) -> SharedMemory:
    """Somebody else's memory, which Python's tracker would remove when this process ends."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    register = resource_tracker.register
    resource_tracker.register = lambda name, rtype: None
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register


def let_go(word: memoryview, memory: SharedMemory, *, owned: bool) -> None:
    """Close the memory; in this order, or it cannot be."""
    word.release()
    memory.close()
    if owned:
        with contextlib.suppress(FileNotFoundError):
            memory.unlink()


def check_us(checks: int = 100_000) -> float:
    """How long one look at a flag takes that is not raised, in microseconds."""
    with PreemptionFlag.create() as flag:
        rows_to_leave = flag.rows_to_leave
        begun = time.perf_counter()
        for iteration in range(1, checks + 1):
            rows_to_leave(iteration)
        return (time.perf_counter() - begun) / checks * 1e6
