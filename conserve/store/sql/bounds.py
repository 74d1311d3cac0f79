"""Bounds of a query: memory, temporary disk, threads and time."""

from dataclasses import dataclass
from typing import Any

from conserve.units import KIB

SPILLED_SHARE = 0.6
"""Share of a query's memory that DuckDB fills before it writes to disk. DuckDB does not count strings under
construction and rows on their way out, which need the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one query. Without `memory_bytes` DuckDB's own limit holds: 80 % of the machine's memory."""

    threads: int
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    timeout_s: float | None = None  # of computing; a slow reader of the rows does not count

    def settings(self) -> dict[str, Any]:
        """Bounds as settings of DuckDB."""
        found: dict[str, Any] = {"threads": self.threads}
        if self.memory_bytes is not None:
            found["memory_limit"] = f"{int(self.memory_bytes * SPILLED_SHARE) // KIB}KiB"
        if self.disk_bytes is not None:
            found["max_temp_directory_size"] = f"{self.disk_bytes // KIB}KiB"
        return found
