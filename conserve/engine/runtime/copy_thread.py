"""Copies blocks between two memories of the host, beside whatever computes (CPU engines).

`memmove` runs outside the interpreter's lock, a run of neighbouring blocks at a time, and on a core that does
not compute where the process has one.
"""

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger("vllm.conserve")
Move = Callable[[int, int, int], object]


@dataclass(frozen=True, slots=True)
class Region:
    """Equally large blocks in a row: the same one of each memory's regions holds the same layer."""

    address: int
    block_bytes: int


class Done:
    """Behaves as a CUDA event that was recorded after the copy."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.failed = False

    def query(self) -> bool:
        """Whether it is over, one way or the other."""
        return self._event.is_set()

    def synchronize(self) -> None:
        """Wait until it is."""
        self._event.wait()

    def set(self, *, failed: bool) -> None:
        """It is over."""
        self.failed = failed
        self._event.set()


@dataclass(slots=True)
class Copied:
    """What was copied so far, one way."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CopyThread:
    """Copies in the order in which it is asked to."""

    def __init__(self, device: Sequence[Region], host: Sequence[Region], move: Move = ctypes.memmove) -> None:
        self._device, self._host, self._move = device, host, move
        self._queue: queue.SimpleQueue[tuple[list[int], list[int], bool, Done] | None] = queue.SimpleQueue()
        self.stored, self.loaded = Copied(), Copied()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def copy(self, source: list[int], target: list[int], *, is_store: bool) -> Done:
        """Have blocks copied: from the device to the host if it is a store."""
        done = Done()
        self._queue.put((source, target, is_store, done))
        return done

    def stop(self) -> None:
        """Finish what was asked for, and end."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        leave_computing_cores()
        while (job := self._queue.get()) is not None:
            source, target, is_store, done = job
            failed = True
            try:
                self._copy(source, target, is_store)
                failed = False
            except Exception:  # the rows are computed again, and the next copy may succeed
                log.exception("%d KV blocks could not be copied", len(source))
            finally:
                done.set(failed=failed)

    def _copy(self, source: list[int], target: list[int], is_store: bool) -> None:
        begun = time.perf_counter()
        runs = merged(source, target)
        moved = 0
        for device, host in zip(self._device, self._host, strict=True):
            here, there = (device, host) if is_store else (host, device)
            size = here.block_bytes
            for first, to, count in runs:
                self._move(there.address + to * size, here.address + first * size, count * size)
                moved += count * size
        counts = self.stored if is_store else self.loaded
        counts.blocks += len(source)
        counts.bytes += moved
        counts.seconds += time.perf_counter() - begun


def merged(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of blocks that are neighbours on both sides: (first source, first target, count)."""
    runs: list[tuple[int, int, int]] = []
    for here, there in zip(source, target, strict=True):
        if runs:
            first, to, count = runs[-1]
            if (first + count, to + count) == (here, there):
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((here, there, 1))
    return runs


def leave_computing_cores() -> None:
    """Move this thread to cores that its process, which computes, is not bound to, but whose parent may use."""
    try:
        free = os.sched_getaffinity(os.getppid()) - os.sched_getaffinity(os.getpid())
        if free:
            os.sched_setaffinity(0, free)  # 0 is the calling thread
    except OSError:  # a container that does not allow it: then it shares the cores
        log.debug("KV copies share the cores that compute")
