"""Ten million rows through one PostgreSQL: submit, harvesters, export and an aggregate, each a process of its own.

    python -m tests.benchmarks many_rows

The endpoint takes no time. A tenth of the rows goes the same way before, so that memory beside both says whether it
grows. Takes 10 GB of disk and a quarter of an hour. ROWS=2000000 chooses another size, HARVESTERS=5 another number.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow.parquet as pq

from tests import postgres
from tests.benchmarks.harvesters import AS_INSTALLED
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure

ROWS = int(os.environ.get("ROWS", 10_000_000))
HARVESTERS = int(os.environ.get("HARVESTERS", 5))
MOST_GROWTH = 1.25  # of memory with ten times the rows
EXPORT, QUERY = "export", "one aggregate over all results"
MOST_MIB = 4096  # of these two: `sql_memory`, beyond which DuckDB writes to disk
COMMAND = "python -m tests.benchmarks many_rows"
AGGREGATE = "select count(*), count(distinct row_index), sum(length(text)) from results where error is null"


class Cost(NamedTuple):
    """A step's wall time and the memory of its largest process."""

    seconds: float
    most_mib: float


def measure() -> list[Figure]:
    """Time and memory of each step with all rows, and memory over that with a tenth of them."""
    with postgres.databases(**AS_INSTALLED) as databases, tempfile.TemporaryDirectory() as folder:
        few, many = (steps(Path(folder), databases, rows) for rows in (ROWS // 10, ROWS))
    figures = []
    for name, cost in many.items():
        of = f"{ROWS:,} rows on PostgreSQL, {name}"
        growth = f"{cost.most_mib / few[name].most_mib:.2f} times that with a tenth of the rows"
        most = MOST_MIB if name in (EXPORT, QUERY) else MOST_GROWTH * few[name].most_mib
        figures += [
            figure(f"{of}: time", "s", cost.seconds, f"{ROWS / cost.seconds:,.0f} rows/s"),
            figure(f"{of}: memory", "MiB", cost.most_mib, growth, most),
        ]
    return figures


def figure(name: str, unit: str, value: float, note: str, most: float | None = None) -> Figure:
    """Figure of one run."""
    return Figure(
        name=name,
        unit=unit,
        samples=[value],
        target="-" if most is None else f"<= {most:,.0f}",
        reached=most is None or value <= most,
        command=COMMAND,
        note=note,
    )


def steps(folder: Path, databases: postgres.Databases, rows: int) -> Mapping[str, Cost]:
    """Take so many rows through every step, and check that each has one answer."""
    data, url = short_rows(folder, rows), databases.new()
    exported = folder / "answers.parquet"
    with tempfile.TemporaryDirectory(dir=folder) as home:
        env = {
            **os.environ,
            "CONSERVE_FAKE": "1",
            "CONSERVE_HOME": home,
            "CONSERVE_STORE": url,
            "CONSERVE_ENDPOINT": "fake:",
        }
        found = {
            "submit": cost(env, ["submit", str(data), "--prompt", "{{ q }}"]),
            f"{HARVESTERS} harvesters": cost(env, *[["run"]] * HARVESTERS),
            EXPORT: cost(env, ["results", "last", "-o", str(exported)]),
            QUERY: cost(env, ["sql", "--csv", AGGREGATE], said=folder / "said"),
        }
    counted = (folder / "said").read_text().splitlines()[-1]
    assert counted.startswith(f"{rows},{rows},"), counted
    assert pq.ParquetFile(exported).metadata.num_rows == rows
    exported.unlink()
    data.unlink()
    databases.drop(url)
    return found


def cost(env: Mapping[str, str], *commands: Sequence[str], said: Path = Path(os.devnull)) -> Cost:
    """Run commands at once; returns their time and the memory of the largest.

    Memory is looked at ten times a second. What the kernel tells of a process that has ended counts the process too
    that it was forked off.
    """
    begun, most_kib = time.perf_counter(), 0
    with said.open("w") as output, tempfile.TemporaryFile("w+") as errors:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "conserve", *words], env=dict(env), stdout=output, stderr=errors
            )
            for words in commands
        ]
        while any(process.poll() is None for process in running):
            most_kib = max(most_kib, *(peak_kib(process.pid) for process in running))
            time.sleep(0.1)
        if any(process.returncode for process in running):
            errors.seek(0)
            raise AssertionError(errors.read()[-2000:])
    return Cost(time.perf_counter() - begun, most_kib / 1024)


def peak_kib(pid: int) -> int:
    """Largest memory so far of a process or of one that it started; 0 once it has ended."""
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        told = "".join(Path(f"/proc/{each}/status").read_text() for each in pids)
    except (OSError, psutil.NoSuchProcess):
        return 0
    return max((int(line.split()[1]) for line in told.splitlines() if line.startswith("VmHWM:")), default=0)
