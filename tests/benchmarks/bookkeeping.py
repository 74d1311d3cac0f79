"""Cost of a row beside the engine: claim, commit, compact, with an endpoint that takes no time."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure
from tests.submitting import submit

ROWS = 100_000
RUNS = 5


class Drained(NamedTuple):
    """One drain of the queue."""

    rows_per_s: float
    cpu_us_per_row: float


def measure() -> list[Figure]:
    """Rows a second through the whole harvester, and CPU time a row."""
    with tempfile.TemporaryDirectory() as folder:
        data = short_rows(Path(folder), ROWS)
        runs = [drain(Path(folder) / f"home-{run}", data) for run in range(RUNS)]
    rate, cpu = [run.rows_per_s for run in runs], [run.cpu_us_per_row for run in runs]
    command = "python -m tests.benchmarks bookkeeping"
    return [
        Figure(
            name="claim and commit, fake endpoint",
            unit="rows/s",
            samples=rate,
            target=">= 20,000",
            reached=sorted(rate)[RUNS // 2] >= 20_000,
            command=command,
        ),
        Figure(
            name="CPU time a row, fake endpoint included",
            unit="us",
            samples=cpu,
            target="-",
            reached=True,
            command=command,
        ),
    ]


def drain(home: Path, data: Path) -> Drained:
    """Submit the rows and harvest them all."""
    store = Store.open(load({"home": home}))
    submit(store, str(data), Task(kind=Kind.PROMPT, template="{{ q }}"))
    cpu, started = time.process_time(), time.perf_counter()
    tally = asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    assert tally.succeeded == ROWS
    store.close()
    return Drained(ROWS / wall_s, cpu_s / ROWS * 1e6)
