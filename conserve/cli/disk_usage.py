"""Disk usage of jobs, as `rm`, `prune` and `store size` show it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conserve.cli import output
from conserve.units import decimal_size

if TYPE_CHECKING:
    from conserve.store.upkeep.removal import DiskUsage


def table(usages: "Sequence[DiskUsage]") -> list[str]:
    """Table of jobs with the bytes of their files."""
    rows = [
        [
            each.job_id,
            output.state(each.state),
            f"{each.rows:,}",
            decimal_size(each.requests_bytes),
            decimal_size(each.inputs_bytes),
            decimal_size(each.results_bytes),
            decimal_size(each.bytes),
            output.moment(each.finished_at),
        ]
        for each in usages
    ]
    header = ("JOB", "STATE", "ROWS", "REQUESTS", "INPUTS", "RESULTS", "TOTAL", "FINISHED")
    return output.columns(header, rows, right=(2, 3, 4, 5, 6))


def document(usage: "DiskUsage") -> dict[str, Any]:
    """Bytes of a job as JSON (docs/reference/json.md)."""
    return {**asdict(usage), "finished_at": output.iso(usage.finished_at)}
