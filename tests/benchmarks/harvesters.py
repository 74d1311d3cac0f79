"""Harvesters in processes of their own on one PostgreSQL, with endpoints that take no time.

The server is started for the benchmark, with the flushes of its default settings. HARVESTERS="1 20" and ROWS=100000
choose other runs.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from sqlalchemy import create_engine, text

from conserve.config import Settings, load
from conserve.endpoints.fake import FakeEndpoint
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from tests import postgres
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure
from tests.submitting import submit

ROWS = int(os.environ.get("ROWS", 200_000))
HARVESTERS = [int(number) for number in os.environ.get("HARVESTERS", "1 5 20").split()]
RUNS = int(os.environ.get("RUNS", 3))
COMMAND = "python -m tests.benchmarks harvesters"
AS_INSTALLED = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "128MB",
    "autovacuum": "on",
    "track_commit_timestamp": "off",
    "shared_preload_libraries": "pg_stat_statements",
}
START = multiprocessing.get_context("fork")


class Drained(NamedTuple):
    """One drain of the queue by several harvesters."""

    rows_per_s: float
    harvester_us: float  # processor time of a row, in the harvesters
    server_us: float  # the same, in PostgreSQL
    batches: int  # claims and commits
    statements: float  # a batch


def measure() -> list[Figure]:
    """Rows a second of one and of many harvesters, processor time and statements."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, postgres.databases(**AS_INSTALLED) as databases:
        data = short_rows(Path(folder), ROWS)
        for harvesters in HARVESTERS:
            runs = [drain(Path(folder), data, databases, harvesters) for _ in range(RUNS)]
            figures += figures_of(harvesters, runs)
    return figures


def figures_of(harvesters: int, runs: Sequence[Drained]) -> list[Figure]:
    """Figures of some runs with as many harvesters."""
    name = f"{harvesters} harvester{'s' * (harvesters > 1)} on PostgreSQL"
    rates = [run.rows_per_s for run in runs]
    wanted = 20_000 if harvesters == 20 else None
    reached = wanted is None or sorted(rates)[len(rates) // 2] >= wanted
    others = [
        ("processor time a row, harvesters", "us", [run.harvester_us for run in runs]),
        ("processor time a row, server", "us", [run.server_us for run in runs]),
        ("rows a batch", "rows", [ROWS / run.batches for run in runs]),
        ("statements a batch, claim and commit together", "", [run.statements for run in runs]),
    ]
    return [
        Figure(
            name=f"{name}: claimed and committed",
            unit="rows/s",
            samples=rates,
            target=f">= {wanted:,}" if wanted else "",
            reached=reached,
            command=COMMAND,
        ),
        *(
            Figure(name=f"{name}: {what}", unit=unit, samples=found, target="", reached=True, command=COMMAND)
            for what, unit, found in others
        ),
    ]


def drain(folder: Path, data: Path, databases: postgres.Databases, harvesters: int) -> Drained:
    """Submit the rows and harvest them all."""
    url = databases.new()
    with tempfile.TemporaryDirectory(dir=folder) as home:
        settings = load({"home": home, "store": url})
        store = Store.open(settings)
        submit(store, str(data), Task(kind=Kind.PROMPT, template="{{ q }}"))
        store.close()
        with counted(url) as server:
            wall_s, used_s, server_us = at_once(settings, harvesters, server)
            batches, statements = told(server)
    databases.drop(url)
    return Drained(ROWS / wall_s, used_s / ROWS * 1e6, server_us, batches, statements / batches)


def at_once(settings: Settings, harvesters: int, server: Any) -> tuple[float, float, float]:
    """Wall time of as many harvesters that begin together, their processor time, and the server's."""
    ready, go, used = START.Barrier(harvesters + 1), START.Event(), START.Queue()
    processes = [START.Process(target=harvest, args=(settings, ready, go, used)) for _ in range(harvesters)]
    for process in processes:
        process.start()
    ready.wait()
    server.execute(text("select pg_stat_statements_reset()"))
    before, started = server_s(), time.perf_counter()
    go.set()
    found = [used.get() for _ in processes]
    wall_s, server_us = time.perf_counter() - started, (server_s() - before) / ROWS * 1e6
    for process in processes:
        process.join()
    print(f"  {harvesters} harvesters: rows each {sorted(rows for rows, _ in found)}")
    assert sum(rows for rows, _ in found) == ROWS
    return wall_s, sum(used_s for _, used_s in found), server_us


def harvest(settings: Settings, ready: Any, go: Any, used: Any) -> None:
    """Run one harvester until the queue is empty; puts its rows and its processor time."""
    store = Store.open(settings)
    ready.wait()
    go.wait()
    before = time.process_time()
    tally = asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    used.put((tally.succeeded, time.process_time() - before))
    store.close()


def server_s() -> float:
    """Processor time of the server's processes, those included that have ended."""
    total = 0.0
    for process in psutil.process_iter(["name", "username", "cpu_times"]):
        if process.info["name"] == "postgres" and process.info["cpu_times"]:
            used = process.info["cpu_times"]
            total += used.user + used.system
            total += used.children_user + used.children_system
    return total


@contextmanager
def counted(url: str) -> Iterator[Any]:
    """Count the statements of this database from now on."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("create extension if not exists pg_stat_statements"))
        yield connection
    engine.dispose()


FOUND = """
    select calls, total_exec_time, rows, regexp_replace(query, '\\s+', ' ', 'g') as query
    from pg_stat_statements join pg_database on pg_database.oid = dbid
    where datname = current_database() and query not like '%pg_stat_statements%'
    order by total_exec_time desc
"""


def told(connection: Any) -> tuple[int, int]:
    """Batches and statements, those that begin and end transactions left out; prints where the time went."""
    rows = connection.execute(text(FOUND)).all()
    batches = sum(row.calls for row in rows if row.query.lower().startswith("copy journal"))
    ours = [row for row in rows if row.query.lower() not in ("begin", "commit", "rollback", "")]
    for row in rows[:16]:
        print(
            f"  {row.total_exec_time:>9,.0f} ms {row.calls:>7,} calls {row.rows:>8,} rows  {row.query[:150]}"
        )
    return batches, sum(row.calls for row in ours)
