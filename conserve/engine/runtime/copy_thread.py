"""Copies blocks between two memories of the host beside the engine's computing (CPU engines).

All blocks of all layers are copied in one call without the interpreter's lock: with a call for each block the
thread would have to take the lock back from the computing thread as often. If the process has a core that does not
compute, the thread runs there.
"""

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

log = logging.getLogger("vllm.conserve")
Pieces = npt.NDArray[np.uint64]  # (pieces, 2): addresses and sizes in bytes, as C's struct iovec
Move = Callable[[Pieces, Pieces], object]  # copies pieces to the first from the second
MOST_PIECES = 1024  # in one call: Linux's IOV_MAX
_copy_at_once: Any = getattr(ctypes.CDLL(None), "process_vm_readv", None)
if _copy_at_once is not None:
    _many = (ctypes.c_void_p, ctypes.c_ulong)
    _copy_at_once.argtypes = (ctypes.c_int, *_many, *_many, ctypes.c_ulong)
    _copy_at_once.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Region:
    """Blocks of one size, one after another. Regions of the same index hold the same layer in both memories."""

    address: int
    block_bytes: int


class Done:
    """Stands in for a CUDA event recorded after the copy."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.failed = False

    def query(self) -> bool:
        """True once the copy has ended, also if it failed."""
        return self._event.is_set()

    def synchronize(self) -> None:
        """Wait until the copy has ended."""
        self._event.wait()

    def set(self, *, failed: bool) -> None:
        """Mark the copy as ended."""
        self.failed = failed
        self._event.set()


class Copied(NamedTuple):
    """Totals of the copies in one direction; replaced as a whole, since another thread reads them."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0  # of processor time

    def block_ms_since(self, before: "Copied") -> float | None:
        """Time per block since then, in ms; None if none was copied."""
        blocks = self.blocks - before.blocks
        return 1e3 * (self.seconds - before.seconds) / blocks if blocks else None


class CopyThread:
    """Copies blocks in the order of the calls."""

    def __init__(self, device: Sequence[Region], host: Sequence[Region], move: Move | None = None) -> None:
        self._device, self._host, self._move = table(device), table(host), move or move_pieces
        self._queue: queue.SimpleQueue[tuple[list[int], list[int], bool, Done] | None] = queue.SimpleQueue()
        self.stored, self.loaded = Copied(), Copied()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def copy(self, source: list[int], target: list[int], *, is_store: bool) -> Done:
        """Queue a copy of blocks: from the device to the host if `is_store`, else back."""
        done = Done()
        self._queue.put((source, target, is_store, done))
        return done

    def stop(self) -> None:
        """Finish the queued copies and end the thread."""
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
        begun = time.thread_time()  # wall time would include waiting for the interpreter's lock
        first, to, count = np.array(merged(source, target), np.uint64).reshape(-1, 3).T
        here, there = (self._device, self._host) if is_store else (self._host, self._device)
        sources, targets = pieces(here, first, count), pieces(there, to, count)
        self._move(targets, sources)
        before = self.stored if is_store else self.loaded
        copied = Copied(
            before.blocks + len(source),
            before.bytes + int(sources[:, 1].sum()),
            before.seconds + time.thread_time() - begun,
        )
        if is_store:
            self.stored = copied
        else:
            self.loaded = copied


def table(regions: Sequence[Region]) -> Pieces:
    """Array (regions, 2): address of each region and size of its blocks, in bytes."""
    return np.array([(region.address, region.block_bytes) for region in regions], np.uint64).reshape(-1, 2)


def pieces(regions: Pieces, first: npt.NDArray[np.uint64], count: npt.NDArray[np.uint64]) -> Pieces:
    """Addresses and sizes of runs of blocks in every region."""
    address, size = regions[:, :1], regions[:, 1:]
    return np.column_stack([(address + first * size).ravel(), (count * size).ravel()])


def move_pieces(targets: Pieces, sources: Pieces) -> None:
    """Copy pieces of equal size: in one call, or one by one if the kernel refuses it or copies only a part."""
    for start in range(0, len(targets), MOST_PIECES):
        to, source = (np.ascontiguousarray(side[start : start + MOST_PIECES]) for side in (targets, sources))
        vectors = (to.ctypes.data, len(to), source.ctypes.data, len(source))
        if _copy_at_once is None or _copy_at_once(os.getpid(), *vectors, 0) != to[:, 1].sum():
            for (address, size), (begin, _) in zip(to.tolist(), source.tolist(), strict=True):
                ctypes.memmove(address, begin, size)


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
    """Move this thread to cores that its parent may use and its own process, which computes, is not bound to."""
    try:
        free = os.sched_getaffinity(os.getppid()) - os.sched_getaffinity(os.getpid())
        if free:
            os.sched_setaffinity(0, free)  # 0 is the calling thread
    except OSError:  # as in a container that does not allow it: the thread shares the cores that compute
        log.debug("KV copies share the cores that compute")
