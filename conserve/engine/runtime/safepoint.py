"""The flag that a worker reads at its safepoints: the rows that are to leave an iteration."""

import contextlib
import struct
import sys
import time
import weakref
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import NamedTuple, Self

ROWS_BITS = 20
ALL_ROWS = (1 << ROWS_BITS) - 1  # every row leaves, also online ones: the iteration is abandoned


REFUSED = ALL_ROWS - 1  # the iteration was scheduled ahead: it is refused if it has not started
IN_FLIGHT = 2  # most iterations at a time: one that runs, and one that waits


class Word(NamedTuple):
    """A word of shared memory, which is greater than `known` once its iteration has an order."""

    words: memoryview
    slot: int
    known: int


class LeaveFlag:
    """Shared memory: an iteration and how many of its offline rows are to leave it, and when it started.

    Each of the iterations in flight has a word of either kind. An order names its iteration, so one for an
    iteration that has ended means nothing to the next one. It is one word, so that it is read whole or not at all.
    Source: conserve-2026 section 4.3 (a flag in shared host memory, read at every safepoint).
    """

    def __init__(self, memory: SharedMemory, *, owned: bool) -> None:
        self.name = memory.name
        assert memory.buf is not None  # None only after `close`
        self._words = memory.buf.cast("Q")  # IN_FLIGHT orders, then IN_FLIGHT starts
        self._let_go = weakref.finalize(self, let_go, self._words, memory, owned=owned)

    @classmethod
    def create(cls) -> Self:
        """Create a flag; `close` removes it."""
        size = 2 * IN_FLIGHT * struct.calcsize("Q")
        memory = SharedMemory(create=True, size=size)
        assert memory.buf is not None
        memory.buf[:] = bytes(memory.size)
        return cls(memory, owned=True)

    @classmethod
    def attach(cls, name: str) -> Self:
        """Open the flag that another process created; raises `OSError`."""
        return cls(untracked(name), owned=False)

    def raise_for(self, iteration: int, rows: int = ALL_ROWS) -> None:
        """Ask the first `rows` offline rows of this iteration to leave it. Iterations count from 1."""
        self._words[iteration % IN_FLIGHT] = iteration << ROWS_BITS | min(rows, ALL_ROWS)

    def refuse(self, iteration: int) -> None:
        """Ask to refuse this iteration as a whole; without effect once it has started."""
        self.raise_for(iteration, REFUSED)

    def rows_asked(self, iteration: int) -> int:
        """Number of rows that the flag asks to leave this iteration, mostly 0: one load from memory."""
        rows = self._order(iteration)
        return rows if rows != REFUSED else 0

    def word(self, iteration: int) -> Word:
        """The word that this iteration's orders come in."""
        return Word(self._words, iteration % IN_FLIGHT, iteration << ROWS_BITS)

    def is_refused(self, iteration: int) -> bool:
        """True if this iteration is to be refused."""
        return self._order(iteration) == REFUSED

    def _order(self, iteration: int) -> int:
        word = self._words[iteration % IN_FLIGHT]
        return word & ALL_ROWS if word >> ROWS_BITS == iteration else 0

    def expect(self, iteration: int) -> None:
        """Forget the start of the iteration before the last, whose word this iteration gets."""
        self._words[IN_FLIGHT + iteration % IN_FLIGHT] = 0

    def note_start(self, iteration: int, now: float) -> None:
        """Note in a worker that this iteration starts; `now` in monotonic seconds, above 0."""
        self._words[IN_FLIGHT + iteration % IN_FLIGHT] = int(now * 1e9)

    def started(self, iteration: int) -> float | None:
        """Start of an expected iteration in monotonic seconds; None before it."""
        start = self._words[IN_FLIGHT + iteration % IN_FLIGHT]
        return start / 1e9 if start else None

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


def let_go(words: memoryview, memory: SharedMemory, *, owned: bool) -> None:
    """Close the memory, its view first: memory with an open view cannot be closed."""
    words.release()
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
