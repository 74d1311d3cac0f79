"""Safepoints: where a worker in the middle of an iteration looks whether it is to be preempted."""

import struct
import time
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import Self

NEVER = 0  # iterations are counted from one


class PreemptionFlag:
    """One word of shared memory that holds the number of the iteration to preempt.

    A number cannot go stale: a flag meant for an iteration that has ended says nothing to the next one.
    Source: conserve-2026 section 4.3 (a flag in shared host memory, read at every safepoint).
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.name = memory.name
        self._memory = memory
        assert memory.buf is not None  # None only after `close`
        self._word = memory.buf.cast("Q")

    @classmethod
    def create(cls) -> Self:
        """A new flag; `close` removes it."""
        flag = cls(SharedMemory(create=True, size=struct.calcsize("Q")))
        flag.raise_for(NEVER)
        return flag

    def raise_for(self, iteration: int) -> None:
        """Ask for this iteration to be preempted."""
        self._word[0] = iteration

    def is_raised(self, iteration: int) -> bool:
        """Whether this iteration is to be preempted: one load from memory."""
        return self._word[0] == iteration

    def close(self) -> None:
        """Let go of the memory and remove it."""
        self._word.release()
        self._memory.close()
        self._memory.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_us(checks: int = 100_000) -> float:
    """How long one safepoint takes that is not raised, in microseconds."""
    with PreemptionFlag.create() as flag:
        is_raised = flag.is_raised
        begun = time.perf_counter()
        for iteration in range(1, checks + 1):
            is_raised(iteration)
        return (time.perf_counter() - begun) / checks * 1e6
