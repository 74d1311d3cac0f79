"""Cost of an evaluation beside the engine: its bookkeeping by item, and its memory as items grow."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure

FEW, MANY = 10_000, 100_000
FILE = """
name = "many"
[suites.many]
kind = "sql"
data = "{data}"
prompt = "{{{{ q }}}}"
score = "select avg(contains(r.text, 'amber')) from results r join inputs i using (job_id, row_index)"
"""


class Cost(NamedTuple):
    """Cost of one run."""

    cpu_us_per_item: float
    most_mib: float  # of its process, children apart


def measure() -> list[Figure]:
    """Processor time an item of a whole run less that of the queue alone, and memory beside few and many items."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (night(Path(folder) / str(rows), rows) for rows in (FEW, MANY))
        bare = queue(Path(folder) / "bare", MANY)
    own = many.cpu_us_per_item - bare.cpu_us_per_item
    command = "python -m tests.benchmarks nightly"
    return [
        Figure(
            name="CPU time an item, whole night with a fake endpoint",
            unit="us",
            samples=[many.cpu_us_per_item],
            target="-",
            reached=True,
            command=command,
        ),
        Figure(
            name="CPU time an item, beyond conserve submit and run",
            unit="us",
            samples=[own],
            target="< 100",
            reached=own < 100,
            command=command,
        ),
        Figure(
            name=f"memory with {MANY:,} items, over that with {FEW:,}",
            unit="times",
            samples=[many.most_mib / few.most_mib],
            target="<= 1.5",
            reached=many.most_mib / few.most_mib <= 1.5,
            command=command,
        ),
    ]


def night(folder: Path, rows: int) -> Cost:
    """Run an evaluation of so many items."""
    folder.mkdir(parents=True)
    file = folder / "nightly.toml"
    file.write_text(FILE.format(data=short_rows(folder, rows)))
    return cost([["eval", "run", str(file)]], folder, rows)


def queue(folder: Path, rows: int) -> Cost:
    """Queue and answer the same rows without an evaluation."""
    folder.mkdir(parents=True)
    data = str(short_rows(folder, rows))
    return cost([["submit", data, "--prompt", "{{ q }}", "--temperature", "0"], ["run"]], folder, rows)


def cost(commands: list[list[str]], folder: Path, rows: int) -> Cost:
    """Run commands; returns their processor time by row, and the memory of the largest."""
    env = {
        **os.environ,
        "CONSERVE_FAKE": "1",
        "CONSERVE_ENDPOINT": "fake:",
        "CONSERVE_HOME": str(folder / "home"),
    }
    cpu_s, most_kib = 0.0, 0
    for words in commands:
        running = subprocess.Popen(
            [sys.executable, "-m", "conserve", *words],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        assert running.returncode == 0, words
        cpu_s += usage.ru_utime + usage.ru_stime
        most_kib = max(most_kib, usage.ru_maxrss)
    return Cost(cpu_s / rows * 1e6, most_kib / 1024)
