"""Sizes in bytes, as `rm`, `prune` and `store size` show them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conserve.cli import output

if TYPE_CHECKING:
    from conserve.store.upkeep.removal import DiskUsage

UNITS = ("B", "kB", "MB", "GB", "TB")


def size(number: float) -> str:
    """Bytes in words: `12 B`, `3.4 kB`, `56.7 MB`; powers of a thousand, as in `df -H`."""
    for unit in UNITS:
        if number < 999.95 or unit == UNITS[-1]:
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"


def table(usages: "Sequence[DiskUsage]") -> list[str]:
    """Table of jobs with the bytes of their files."""
    rows = [
        [
            each.job_id,
            output.state(each.state),
            f"{each.rows:,}",
            size(each.requests_bytes),
            size(each.inputs_bytes),
            size(each.results_bytes),
            size(each.bytes),
            output.moment(each.finished_at),
        ]
        for each in usages
    ]
    header = ("JOB", "STATE", "ROWS", "REQUESTS", "INPUTS", "RESULTS", "TOTAL", "FINISHED")
    return output.columns(header, rows, right=(2, 3, 4, 5, 6))


def document(usage: "DiskUsage") -> dict[str, Any]:
    """Bytes of a job as JSON (docs/reference/json.md)."""
    return {**asdict(usage), "finished_at": output.iso(usage.finished_at)}
