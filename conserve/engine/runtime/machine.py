"""Cores and memory that this process may use, by its affinity, its control group and the machine; device names."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BINDING = "VLLM_CPU_OMP_THREADS_BIND"  # cores that the engine computes on
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # cores that it leaves free
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
GPUS = Path("/proc/driver/nvidia/gpus")
UNLIMITED = 1 << 60  # bytes; for no limit, version 1 of control groups writes a huge number


class Cores(NamedTuple):
    """Number of cores to compute on, by each of the limits."""

    online: int  # cores of the machine
    allowed: int  # by this process's affinity
    quota: float | None  # by its control group, in cores' worth of time; None without a limit

    @property
    def usable(self) -> int:
        """Threads that can compute at once."""
        return max(
            1, self.allowed if self.quota is None else min(self.allowed, math.floor(self.quota + 0.01))
        )

    @property
    def bounded_by_quota(self) -> bool:
        """True if the control group gives less time than the cores have: a thread per core would be throttled."""
        return self.usable < self.allowed


def cores() -> Cores:
    """Read the core limits of this process."""
    online = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    return Cores(online=online, allowed=allowed, quota=cpu_quota())


def compute_threads() -> int:
    """Threads that can compute at once."""
    return cores().usable


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_GROUP) -> float | None:
    """Cores' worth of time that the control groups of this process allow; None without a limit."""
    found = []
    for folder in group_folders(root, own, "cpu"):
        words = _read(folder / "cpu.max").split()  # version 2: "200000 100000" or "max 100000"
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def memory_limit(root: Path = CGROUPS, own: Path = OWN_GROUP) -> int | None:
    """Bytes of memory that the control groups of this process allow; None without a limit."""
    return min((limit for _, limit in _memory_limits(root, own)), default=None)


def memory_bytes() -> tuple[int, int]:
    """Bytes of memory, in total and free, of this machine or of its tightest control group."""
    import psutil

    memory, limit, headroom = psutil.virtual_memory(), memory_limit(), memory_headroom()
    whole, free = int(memory.total), int(memory.available)
    return (
        whole if limit is None else min(whole, limit),
        free if headroom is None else min(free, headroom),
    )


def memory_headroom(root: Path = CGROUPS, own: Path = OWN_GROUP) -> int | None:
    """Bytes that the control groups still allow, reclaimable file cache included; None without a limit."""
    found = []
    for folder, limit in _memory_limits(root, own):
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if used.isdigit():
            cache = _read(folder / "memory.stat").splitlines()
            inactive = next((line.split()[1] for line in cache if line.startswith("inactive_file ")), "0")
            found.append(max(0, limit - int(used) + int(inactive)))
    return min(found, default=None)


def _memory_limits(root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """Yield the groups around this process that limit memory, each with its limit in bytes."""
    for folder in group_folders(root, own, "memory"):
        text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if text.isdigit() and int(text) < UNLIMITED:
            yield folder, int(text)


def group_folders(root: Path, own: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and of all groups around it, for versions 2 and 1 of control groups.

    A container often mounts its group as the root, and the group's own path does not exist below it. So the root is
    always included.
    """
    folders = {root, root / controller}
    for line in _read(own).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            base = root if number == "0" else root / controllers
            group = base / path.lstrip("/")
            folders |= {folder for folder in (group, *group.parents) if folder.is_relative_to(root)}
    return sorted(folders)


def cpu_model(info: Path = CPU_INFO) -> str:
    """The processor's name; on ARM, whose kernels give none, the numbers of maker and part."""
    fields: dict[str, str] = {}
    for line in _read(info).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    if "CPU part" in fields:
        return f"ARM {fields.get('CPU implementer', '?')}/{fields['CPU part']}"
    return "CPU"


def gpu_models(folder: Path = GPUS) -> str:
    """Names of the machine's NVIDIA GPUs, each with its number; empty without any."""
    lines = (line for file in sorted(folder.glob("*/information")) for line in _read(file).splitlines())
    fields = (line.partition(":") for line in lines)
    models = Counter(value.strip() for name, _, value in fields if name.strip() == "Model")
    return ", ".join(f"{number} x {model}" for model, number in models.items())


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
