"""How much a query may take: memory, temporary disk, threads and time."""

from dataclasses import dataclass
from typing import Any

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SPILLED_SHARE = 0.6
"""Share of a query's memory that DuckDB counts itself, and keeps to by writing to disk. Strings under
construction and rows on their way out are not in its count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one query; without `memory_bytes` its memory is DuckDB's own affair (80 % of the machine's)."""

    threads: int
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    timeout_s: float | None = None  # seconds in which it computes; the reader of its rows may take longer

    def settings(self) -> dict[str, Any]:
        """The same as settings of DuckDB."""
        found: dict[str, Any] = {"threads": self.threads}
        if self.memory_bytes is not None:
            found["memory_limit"] = f"{int(self.memory_bytes * SPILLED_SHARE) // KIB}KiB"
        if self.disk_bytes is not None:
            found["max_temp_directory_size"] = f"{self.disk_bytes // KIB}KiB"
        return found


def size_text(number: int) -> str:
    """`512 MiB`, `1.5 GiB`."""
    return f"{number / GIB:.3g} GiB" if number >= GIB else f"{number / MIB:.3g} MiB"
