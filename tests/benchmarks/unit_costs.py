"""Unit costs of the store on PostgreSQL: statements, transactions, log and processor time, by row and by second.

    python -m tests.benchmarks unit_costs

A server of its own is started, so PostgreSQL must be installed. A harvester first drains a queue as fast as it can,
then works at the pace of one of a thousand servers that answer a billion rows a day, then idles.
"""

import asyncio
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import event

from conserve.config import Settings, load
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import Call, Completion, OnTokens
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import Figure
from tests.postgres_server import PostgresServer, running
from tests.submitting import submit

ROWS = 20_000
PACE_ROWS_S = 1e9 / 86_400 / 1_000  # of one server of a thousand, at a billion rows a day
TOKENS_S = 1.0  # between two reports of a row's tokens
CAPACITY = 256  # rows that its engine holds at a time
PACED_S = float(os.environ.get("UNIT_COSTS_S", "20"))
COMMAND = "python -m tests.benchmarks unit_costs"
LOCKING, LOCKED = "update job set", "job_locked_at"
SAFE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass(slots=True, kw_only=True)
class Spent:
    """Costs of a stretch of work."""

    seconds: float
    statements: float
    transactions: float
    log_bytes: float
    server_cpu_s: float
    held_s: list[float] = field(default_factory=list)  # times for which a job's row was locked by an update

    def by(self, number: float) -> "Spent":
        """The same for each of so many rows or seconds."""
        return Spent(
            seconds=self.seconds / number,
            statements=self.statements / number,
            transactions=self.transactions / number,
            log_bytes=self.log_bytes / number,
            server_cpu_s=self.server_cpu_s / number,
            held_s=self.held_s,
        )


def measure() -> list[Figure]:
    """Costs of a drain by row, of a paced harvester and an idle one by second, and of a job's files."""
    with running(SAFE) as server, tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        store = load({"home": where / "home", "store": server.new_database()}, environ={})
        submitted = submitted_rows(server, store, where)
        drained = drain(server, store)
        shards = [path.stat().st_size for path in (where / "home" / "jobs").rglob("results/*.parquet")]
        paced = paced_harvester(server, store, where)
        idle = idle_harvester(server, store)
    return [
        *figures("submit, by row", submitted.by(ROWS)),
        *figures("as fast as it can, by row", drained.by(ROWS)),
        *figures(f"at {PACE_ROWS_S:.1f} rows/s, by second", paced.by(paced.seconds)),
        *figures("idle, by second", idle.by(idle.seconds)),
        figure("a shard, by row", "bytes", sum(shards) / ROWS),
    ]


def figures(of: str, spent: Spent) -> list[Figure]:
    """Figures of a stretch of work."""
    return [
        figure(f"{of}: statements", "", spent.statements),
        figure(f"{of}: transactions", "", spent.transactions),
        figure(f"{of}: log", "bytes", spent.log_bytes),
        figure(f"{of}: the server's processor time", "us", spent.server_cpu_s * 1e6),
        figure(f"{of}: a job's row is locked for", "ms", statistics.median(spent.held_s or [0.0]) * 1e3),
    ]


def figure(name: str, unit: str, value: float) -> Figure:
    """A figure without a target."""
    return Figure(name=name, unit=unit, samples=[value], target="-", reached=True, command=COMMAND)


def submitted_rows(server: PostgresServer, settings: Settings, folder: Path) -> Spent:
    """Submit rows."""
    data = short_rows(folder, ROWS)
    with closing(Store.open(settings)) as store, spending(server, store) as spent:
        submit(store, str(data), Task(kind=Kind.PROMPT, template="{{ q }}"))
    return spent


def drain(server: PostgresServer, settings: Settings) -> Spent:
    """Drain the queue into an endpoint that takes no time."""
    with closing(Store.open(settings)) as store, spending(server, store) as spent:
        tally = asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    assert tally.succeeded == ROWS
    return spent


def paced_harvester(server: PostgresServer, settings: Settings, folder: Path) -> Spent:
    """Harvest for a while at the pace of one server of many."""
    data = short_rows(folder, int(PACE_ROWS_S * PACED_S * 3) + CAPACITY)
    with closing(Store.open(settings)) as store:
        submit(store, str(data), Task(kind=Kind.PROMPT, template="{{ q }}"))
        return worked(server, store, Harvester(store, PacedEndpoint()), warm_s=CAPACITY / PACE_ROWS_S / 2)


class PacedEndpoint(FakeEndpoint):
    """Answers each row after an exponential time, token by token, as many rows a second as a server would."""

    def __init__(self) -> None:
        super().__init__(Script(capacity=CAPACITY))
        self._dice = random.Random(1)

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        answer = await super().complete(call)
        left_s, tokens = self._dice.expovariate(PACE_ROWS_S / CAPACITY), 0
        while left_s > 0:
            await asyncio.sleep(min(left_s, TOKENS_S))
            left_s, tokens = left_s - TOKENS_S, tokens + 10
            if on_tokens is not None:
                on_tokens(range(tokens))
        return answer


def idle_harvester(server: PostgresServer, settings: Settings) -> Spent:
    """Follow an empty queue."""
    with closing(Store.open(settings)) as store:
        with store.write() as tx:
            tx.exec_driver_sql("update job set state = 'cancelled'")
        return worked(server, store, Harvester(store, FakeEndpoint(), follow=True), warm_s=1.0)


def worked(server: PostgresServer, store: Store, harvester: Harvester, *, warm_s: float) -> Spent:
    """Let a harvester work, and account for the time after a start."""

    async def work() -> Spent:
        stop = asyncio.Event()
        running = asyncio.create_task(harvester.run(stop))
        await asyncio.sleep(warm_s)
        with spending(server, store) as spent:
            await asyncio.sleep(PACED_S)
        stop.set()
        await running
        return spent

    return asyncio.run(work())


@contextmanager
def spending(server: PostgresServer, store: Store) -> Iterator[Spent]:
    """Account for what is done within the context."""
    spent = Spent(seconds=0.0, statements=0, transactions=0, log_bytes=0, server_cpu_s=0.0)
    lock = threading.Lock()

    def statement(connection: Any, cursor: Any, sql: str, *_: Any) -> None:
        with lock:
            spent.statements += 1
            if sql.lower().startswith(LOCKING):
                connection.connection.info.setdefault(LOCKED, time.monotonic())

    def ended(*_: Any) -> None:
        with lock:
            spent.transactions += 1

    def checked_in(_: Any, record: Any) -> None:
        with lock:
            if LOCKED in record.info:
                spent.held_s.append(time.monotonic() - record.info.pop(LOCKED))

    listened = (("before_cursor_execute", statement), ("commit", ended), ("checkin", checked_in))
    for name, listener in listened:
        event.listen(store.engine, name, listener)
    log, cpu, begun = log_position(server), cpu_s(server), time.monotonic()
    try:
        yield spent
    finally:
        spent.seconds = time.monotonic() - begun
        spent.log_bytes = log_position(server) - log
        spent.server_cpu_s = cpu_s(server) - cpu
        for name, listener in listened:
            event.remove(store.engine, name, listener)


def log_position(server: PostgresServer) -> int:
    """Bytes of the log since the cluster was made."""
    ((position,),) = server.sql("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
    assert isinstance(position, int)
    return position


def cpu_s(server: PostgresServer) -> float:
    """Processor time of the server, of connections that have ended too."""
    pid = int((server.data_folder / "postmaster.pid").read_text().split()[0])
    children = psutil.Process(pid).children()
    times = []
    for process in children:
        with suppress(psutil.NoSuchProcess):  # its time is the mother's now
            times.append(process.cpu_times())
    mother = psutil.Process(pid).cpu_times()
    times.append(mother)
    return sum(each.user + each.system for each in times) + mother.children_user + mother.children_system
