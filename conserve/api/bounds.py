"""Bounds of a query's memory, disk, time and threads, from flags, settings or the machine."""

import os
import shutil
from typing import TYPE_CHECKING

from conserve.config import Settings, size_bytes
from conserve.errors import SettingsError
from conserve.store.sql.scratch import system_folder
from conserve.units import GIB

if TYPE_CHECKING:
    from conserve.store.sql.bounds import Bounds

LEAST_MEMORY_BYTES = 128 << 20
MOST_MEMORY_BYTES = 4 * GIB
MOST_DISK_BYTES = 20 * GIB
MOST_THREADS = 8


def query_bounds(settings: Settings) -> "Bounds":
    """Bounds of `conserve sql`."""
    from conserve.store.sql.bounds import Bounds

    memory, disk = settings.sql_memory, settings.sql_disk
    memory_bytes = default_memory() if memory is None else size_bytes("sql_memory", memory)
    if memory_bytes < LEAST_MEMORY_BYTES:
        raise SettingsError(f"{memory} is too little memory for a query; give at least 128MiB with --memory")
    return Bounds(
        threads=threads(settings.sql_threads),
        memory_bytes=memory_bytes,
        disk_bytes=default_disk() if disk is None else size_bytes("sql_disk", disk),
        timeout_s=settings.sql_timeout_s or None,
    )


def export_bounds(settings: Settings) -> "Bounds":
    """Bounds of `conserve results`: threads alone, since its query is ConServe's own."""
    from conserve.store.sql.bounds import Bounds

    return Bounds(threads=threads(settings.sql_threads))


def default_memory() -> int:
    """Bytes: a quarter of the machine's or the control group's memory, at most 4 GiB."""
    from conserve.engine.runtime.machine import memory_limit

    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quarter = min(whole, memory_limit() or whole) // 4
    return max(LEAST_MEMORY_BYTES, min(MOST_MEMORY_BYTES, quarter))


def default_disk() -> int:
    """Bytes: half of the free space for temporary files, at most 20 GiB."""
    return min(MOST_DISK_BYTES, shutil.disk_usage(system_folder()).free // 2)


def threads(wanted: int | None) -> int:
    """Number of threads: as set, else one for each core of this process, at most 8."""
    from conserve.engine.runtime.machine import compute_threads

    return wanted or min(MOST_THREADS, compute_threads())
