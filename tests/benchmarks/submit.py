"""Submitting a million rows, and asking for the status of the store that holds them."""

import statistics
import tempfile
import time
from pathlib import Path

from conserve.config import load
from conserve.store.books.readings import read_jobs
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure, Finished, conserve

ROWS = 1_000_000
RUNS = 3
ORDERS = ("input", "prefix")
COMMAND = "python -m tests.benchmarks submit"


def measure() -> list[Figure]:
    """Wall time and peak memory of `conserve submit` in both orders, and `read_jobs` inside the process."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        data = short_rows(Path(folder), ROWS, shuffled=True)
        runs: dict[str, list[Finished]] = {order: [] for order in ORDERS}
        for _ in range(RUNS):
            for order in ORDERS:
                command = ("submit", str(data), "--prompt", "{{ q }}", "--order", order)
                runs[order].append(conserve(*command, home=home))
        status_ms = [timed_status(home) for _ in range(21)]
    figures = []
    for order in ORDERS:
        wall_s, peak_mb = [run.wall_s for run in runs[order]], [run.peak_mb for run in runs[order]]
        figures += [
            Figure(
                name=f"submit 1,000,000 short rows, {order} order: time",
                unit="s",
                samples=wall_s,
                target="<= 15" if order == "input" else "",
                reached=order != "input" or statistics.median(wall_s) <= 15,
                command=COMMAND,
            ),
            Figure(
                name=f"submit 1,000,000 short rows, {order} order: peak memory",
                unit="MB",
                samples=peak_mb,
                target="<= 500",
                reached=max(peak_mb) <= 500,
                command=COMMAND,
            ),
        ]
    ratios = [ours.wall_s / plain.wall_s for plain, ours in zip(*runs.values(), strict=True)]
    return [
        *figures,
        Figure(
            name="submit in prefix order / in input order",
            unit="times",
            samples=ratios,
            target="<= 2",
            reached=statistics.median(ratios) <= 2,
            command=COMMAND,
        ),
        Figure(
            name="status of that store, inside the process",
            unit="ms",
            samples=status_ms,
            target="<= 100",
            reached=statistics.median(status_ms) <= 100,
            command=COMMAND,
        ),
    ]


def timed_status(home: Path) -> float:
    """One reading, in milliseconds."""
    started = time.perf_counter()
    assert len(read_jobs(load({"home": home}), now=time.time())) == RUNS * len(ORDERS)
    return (time.perf_counter() - started) * 1e3
