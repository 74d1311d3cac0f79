"""Pinning of a deployment's processes to separate cores."""

import contextlib
import os
from collections.abc import Iterable, Sequence

import psutil

WORKER = "Worker"  # in the name that vLLM gives the processes that compute
AT_START = len(os.sched_getaffinity(0))  # cores of this process, before it is pinned


def pin_processes(roots: Iterable[int], engine_cores: Sequence[int], other_cores: Sequence[int]) -> None:
    """Pin the workers below these processes to the engine's cores, the others and this process to the rest."""
    for root in roots:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root)
            for member in (process, *process.children(recursive=True)):
                pin(member, engine_cores if computes(member) else other_cores)
    os.sched_setaffinity(0, other_cores)


def computes(process: psutil.Process) -> bool:
    """True for one of vLLM's workers."""
    return any(WORKER in word for word in process.cmdline())


def pin(process: psutil.Process, cores: Sequence[int]) -> None:
    """Pin each thread of the process, since affinity belongs to threads."""
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)
