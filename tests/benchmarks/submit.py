"""Submitting a million rows, and asking for the status of the store that holds them."""

import tempfile
import time
from pathlib import Path

from conserve.config import load
from conserve.store.readings import read_jobs
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure, conserve

ROWS = 1_000_000
RUNS = 3


def measure() -> list[Figure]:
    """Wall time and peak memory of `conserve submit`, and `read_jobs` inside the process."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        data = short_rows(Path(folder), ROWS)
        runs = [conserve("submit", str(data), "--prompt", "{{ q }}", home=home) for _ in range(RUNS)]
        status_ms = [timed_status(home) for _ in range(21)]
    command = "python -m tests.benchmarks submit"
    wall_s, peak_mb = [run.wall_s for run in runs], [run.peak_mb for run in runs]
    return [
        Figure(
            name="submit 1,000,000 short rows: time",
            unit="s",
            samples=wall_s,
            target="<= 15",
            reached=sorted(wall_s)[RUNS // 2] <= 15,
            command=command,
        ),
        Figure(
            name="submit 1,000,000 short rows: peak memory",
            unit="MB",
            samples=peak_mb,
            target="<= 500",
            reached=max(peak_mb) <= 500,
            command=command,
        ),
        Figure(
            name="status of that store, inside the process",
            unit="ms",
            samples=status_ms,
            target="<= 100",
            reached=sorted(status_ms)[10] <= 100,
            command=command,
        ),
    ]


def timed_status(home: Path) -> float:
    """One reading, in milliseconds."""
    started = time.perf_counter()
    assert len(read_jobs(load({"home": home}), now=time.time())) == RUNS
    return (time.perf_counter() - started) * 1e3
