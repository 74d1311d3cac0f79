"""Faults of everything at once: harvesters, PostgreSQL, a bucket and servers, while jobs come and go.

One queue on PostgreSQL with its files in a bucket, three harvesters and three servers. Faults come one after the
other, drawn from a seed; what is down comes back after a while, and others strike meanwhile. At the end each row of
each job must have one result, and the right one.
"""

import heapq
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.cli import exits
from conserve.config import Settings, load
from conserve.errors import ConserveError
from conserve.jobs.task import Kind, Task
from conserve.store.books.readings import JobReading, read_jobs
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests.acceptance import aimed
from tests.acceptance.forks import Forked, Forks
from tests.acceptance.kill_harness import answer
from tests.acceptance.scripted_server import Script, ScriptedServer
from tests.postgres_server import PostgresServer
from tests.postgres_server import running as running_postgres
from tests.s3 import KEYS, Fault, Proxy, Request, make_bucket, proxied, s3_server

SAFE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "max_connections": "60"}
TOKENS, TOKEN_S, SEQUENCES = 12, 0.02, 16  # of an answer; between two; of a server at a time
ROWS, OPEN_JOBS = 1_500, 3
LEASE_S = 4.0
OFTEN = {
    "conserve__jobs__harvest__flights__SAVE_EVERY_TOKENS": 4,
    "conserve__jobs__harvest__write_behind__FLUSH_S": 0.05,
    "conserve__jobs__harvest__ledger__RECOVER_S": 0.5,
    "conserve__store__books__shards__SHARD_ROWS": 250,
}
"""Harvesters save, recover and write shards so often that faults meet all of it."""
LOST = (  # words of the driver on a connection, or of the server on its end
    *("connection is bad", "connection failed", "closed the connection", "terminating connection"),
    *("shutting down", "starting up", "the connection is lost", "consuming input failed"),
    *("connection is closed", "not yet accepting connections"),
)
ODD = ("BUSY", "FAULT", "BREAK", "ABORT", "GARBAGE")  # words at which a server misbehaves, once a request


@dataclass(slots=True, eq=False)
class Job:
    """A job whose answers are known."""

    name: str
    prompts: list[str]
    path: Path


@dataclass(slots=True, eq=False)
class Storm:
    """All that runs, and the faults so far."""

    folder: Path
    forks: Forks
    dice: random.Random
    postgres: PostgresServer
    proxy: Proxy
    data: str
    store_url: str
    servers: list[ScriptedServer] = field(default_factory=list)
    harvesters: list[Forked | None] = field(default_factory=lambda: [None] * 3)
    frozen: set[int] = field(default_factory=set)  # harvesters
    jobs: list[Job] = field(default_factory=list)
    submitting: Forked | None = None
    faults: Counter[str] = field(default_factory=Counter)
    s3_faults: list[Fault] = field(default_factory=list)  # of the next requests
    judging: threading.Lock = field(default_factory=threading.Lock)
    continued: int = 0  # answers that servers went on with, those of replaced servers
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    database_down: bool = False
    started_anew: int = 0  # harvesters that found no database at their start

    # What runs.

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that lead commands to the queue."""
        return {
            **KEYS,
            "CONSERVE_HOME": str(self.folder / "home"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "CONSERVE_STORE": self.store_url,
            "CONSERVE_DATA": self.data,
        }

    @property
    def settings(self) -> Settings:
        """Settings by which this process finds the queue."""
        return load(environ=dict(self.env))

    def command(self, *words: str) -> Forked:
        """Start a command."""
        number = next(self._numbers)
        output, errors = (self.folder / f"{number}-{words[0]}.{kind}" for kind in ("said", "errors"))
        aim = aimed.command([], *words, **OFTEN)
        return self.forks.start(aim, env=self.env, errors=errors, output=output)

    def harvest(self, number: int) -> None:
        """Start a harvester in the place of one that ended."""
        listed = f"file://{self.folder / 'servers'}"
        words = ("harvest", "--endpoints", listed, "--lease-s", str(LEASE_S), "--max-attempts", "50")
        self.harvesters[number] = self.command(*words)

    def list_servers(self) -> None:
        """Write the list that harvesters read while they run."""
        whole = self.folder / "servers.new"
        whole.write_text("".join(f"{server.url}\n" for server in self.servers))
        whole.rename(self.folder / "servers")

    def add_server(self) -> ScriptedServer:
        """Start a server."""
        number = next(self._numbers)
        server = ScriptedServer(
            Script(tokens=TOKENS, token_s=TOKEN_S, max_num_seqs=SEQUENCES, identity=f"server-{number}")
        )
        server.__enter__()
        self.servers.append(server)
        return server

    # Jobs come and go.

    def keep_busy(self, *, jobs: int = OPEN_JOBS) -> None:
        """See to it that harvesters run and some jobs are open; jobs are queued one after the other."""
        for place, harvester in enumerate(self.harvesters):
            assert harvester is not None
            if place not in self.frozen and harvester.poll() is not None:
                code, _, errors = self.ended(harvester)
                assert gave_up(code, errors), (code, errors)
                self.harvest(place)
                self.started_anew += 1
        for server in self.servers:  # an hour's requests are much memory
            server.requests.clear()
            server.gets.clear()
        self.proxy.seen.clear()
        if not self.is_submitting() and len(self.open_jobs()) < jobs:
            self.submit(self.new_job())

    def is_submitting(self) -> bool:
        """True until the last job is queued; a submit that failed is made again, unless the job is there."""
        if self.submitting is None or self.submitting.poll() is None:
            return self.submitting is not None
        code, _, errors = self.ended(self.submitting)
        assert code in (0, -signal.SIGKILL) or gave_up(code, errors), (code, errors)
        self.submitting = None
        if code and not self.is_there(self.jobs[-1].name):
            self.submit(self.jobs[-1])
        return self.submitting is not None

    def new_job(self) -> Job:
        """A job with some rows that servers answer oddly at first."""
        name = f"storm-{len(self.jobs)}"
        prompts = [
            f"{name} row {n}" + (f" {self.dice.choice(ODD)}" if self.dice.random() < 0.01 else "")
            for n in range(ROWS)
        ]
        job = Job(name, prompts, self.folder / f"{name}.parquet")
        pq.write_table(pa.table({"q": prompts}), job.path)
        self.jobs.append(job)
        return job

    def submit(self, job: Job) -> None:
        """Start to queue a job."""
        self.submitting = self.command("submit", str(job.path), "--prompt", "{{ q }}", "--name", job.name)

    def open_jobs(self) -> list[str]:
        """Names of the jobs that have rows left; all while the database is away."""
        try:
            readings = read_jobs(self.settings, now=time.time())
        except ConserveError:
            return [job.name for job in self.jobs]
        return [name_of(one) for one in readings if not one.state.final]

    def is_there(self, name: str) -> bool:
        """True if a job of this name is queued; waits for the database."""
        while True:
            try:
                return any(name_of(one) == name for one in read_jobs(self.settings, now=time.time()))
            except ConserveError:
                self.rest(0.2)

    # Time passes.

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), do))

    def rest(self, seconds: float) -> None:
        """Let time pass, and do what is due."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until or (self._later and self._later[0][0] <= now):
            if self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
                continue
            time.sleep(min(0.02, max(0.0, until - now)))

    def settle(self) -> None:
        """Let all that is down come back."""
        while self._later:
            self.rest(0.1)

    # Faults.

    def strike(self) -> None:
        """Do the next fault."""
        kinds: dict[Callable[[], str | None], int] = {
            self.kill_harvester: 4,
            self.stop_harvester: 2,
            self.freeze_harvester: 2,
            self.kill_submit: 2,
            self.restart_database: 1,
            self.cut_connection: 4,
            self.cut_commit: 3,
            self.fail_bucket: 5,
            self.lose_server: 3,
            self.freeze_server: 2,
            self.replace_server: 1,
        }
        kind: str | None = None
        while kind is None:
            (fault,) = self.dice.choices(list(kinds), list(kinds.values()))
            kind = fault()
        self.faults[kind] += 1

    def kill_harvester(self) -> str | None:
        return self._end_harvester(signal.SIGKILL, "a harvester is killed")

    def stop_harvester(self) -> str | None:
        return self._end_harvester(signal.SIGTERM, "a harvester is stopped, and started again")

    def _end_harvester(self, number: int, kind: str) -> str | None:
        running = [place for place in range(len(self.harvesters)) if place not in self.frozen]
        place = self.dice.choice(running)
        harvester = self.harvesters[place]
        assert harvester is not None
        harvester.send_signal(number)
        code, _, errors = self.ended(harvester)
        assert code in (0, -number) or gave_up(code, errors), (kind, code, errors)
        self.harvest(place)
        return kind

    def ended(self, process: Forked) -> tuple[int | None, str, str]:
        """Wait for a process, while time passes for all else."""
        while process.poll() is None:
            self.rest(0.05)
        said, errors = process.communicate()
        assert "Traceback" not in errors, errors
        return process.returncode, said, errors

    def freeze_harvester(self) -> str | None:
        if self.frozen:
            return None
        place = self.dice.randrange(len(self.harvesters))
        harvester = self.harvesters[place]
        assert harvester is not None
        self.frozen.add(place)
        harvester.send_signal(signal.SIGSTOP)

        def thaw() -> None:
            harvester.send_signal(signal.SIGCONT)
            self.frozen.discard(place)

        self.after(self.dice.uniform(0.5, 2.5) * LEASE_S, thaw)
        return "a harvester is frozen, most past its lease"

    def kill_submit(self) -> str | None:
        if not self.is_submitting():
            self.submit(self.new_job())
        submitting = self.submitting
        assert submitting is not None
        self.rest(self.dice.uniform(0.0, 0.6))
        if submitting.poll() is not None:
            return None
        submitting.send_signal(signal.SIGKILL)
        return "a submit is killed"

    def restart_database(self) -> str | None:
        if self.database_down:
            return None
        how = self.dice.choice([signal.SIGINT, signal.SIGQUIT])
        self.postgres.stop(how)
        self.database_down = True

        def start() -> None:
            self.postgres.start()
            self.database_down = False

        self.after(self.dice.uniform(0.0, 2.0), start)
        kind = "ends its sessions" if how == signal.SIGINT else "ends at once, and recovers"
        return f"the database {kind}"

    def cut_connection(self) -> str | None:
        """End a connection that is in a transaction."""
        return self._cut("xact_start is not null", "a connection is cut in a transaction")

    def cut_commit(self) -> str | None:
        """End a connection that waits for its commit, which holds: the client cannot know."""
        if self.database_down:
            return None
        self._set_standby("to 'absent'")  # each commit waits for this standby, which never comes
        try:
            return self._cut("wait_event = 'SyncRep'", "a connection is cut in its commit, which holds")
        finally:
            self._set_standby("to default")

    def _cut(self, which: str, kind: str) -> str | None:
        if self.database_down:
            return None
        cut = "select pg_terminate_backend(pid) from pg_stat_activity"
        others = "pid <> pg_backend_pid() and datname <> 'postgres' and backend_type = 'client backend'"
        for _ in range(100):
            if self.postgres.sql(f"{cut} where {others} and {which} limit 1"):
                return kind
            time.sleep(0.01)
        return None

    def _set_standby(self, value: str) -> None:
        self.postgres.sql(f"alter system set synchronous_standby_names {value}")
        self.postgres.sql("select pg_reload_conf()")

    def fail_bucket(self) -> str | None:
        faults = {
            "the bucket answers 503": Fault(status=503),
            "the bucket cuts a connection": Fault(),
            "the bucket's answer is lost": Fault(passed_on=True),
            "the bucket cuts an answer": Fault(cut_after=self.dice.randrange(1, 200)),
        }
        kind = self.dice.choice(list(faults))
        met = self.proxy.faults
        self.s3_faults += [faults[kind]] * self.dice.choice([1, 1, 2, 4, 12])
        for _ in range(200):
            if self.proxy.faults > met:
                return kind
            self.rest(0.05)
        self.s3_faults.clear()
        return None

    def lose_server(self) -> str | None:
        up = [server for server in self.servers if server.script.healthy and server.is_up]
        if len(up) < 2:
            return None
        server = self.dice.choice(up)
        server.down()
        self.after(self.dice.uniform(0.1, 3.0), server.up)
        return "a server is killed, and comes back"

    def freeze_server(self) -> str | None:
        server = self.dice.choice(self.servers)
        if server.script.pause_at is not None:
            return None
        server.script.pause_at = self.dice.randrange(TOKENS)

        def go_on() -> None:
            server.script.pause_at = None

        self.after(self.dice.uniform(0.5, 4.0), go_on)
        return "a server is frozen"

    def replace_server(self) -> str | None:
        up = [server for server in self.servers if server.is_up]
        if len(up) < 2:
            return None
        gone = self.dice.choice(up)
        self.servers.remove(gone)
        self.continued += len(gone.continued)
        self.add_server()
        self.list_servers()
        gone.__exit__()
        return "a server is replaced by another"

    def judge(self, request: Request) -> Fault | None:
        """The fault of a request to the bucket; an answer without a body cannot be cut."""
        with self.judging:
            if not self.s3_faults or (self.s3_faults[-1].cut_after and request.method != "GET"):
                return None
            return self.s3_faults.pop()

    # The end.

    def finish(self) -> None:
        """End the faults, and let the harvesters finish all jobs."""
        self.settle()
        self.s3_faults.clear()
        while self.is_submitting() or self.open_jobs():
            self.keep_busy(jobs=0)
            self.rest(0.2)
        for place, harvester in enumerate(self.harvesters):
            assert harvester is not None
            harvester.send_signal(signal.SIGTERM)
            code, _, errors = self.ended(harvester)
            assert code == 0, (place, errors)

    def check(self) -> int:
        """Each row of each job has one result, the right one; returns the rows."""
        task = Task(kind=Kind.PROMPT, template="{{ q }}")
        by_name: dict[str, list[str]] = {}
        for one in read_jobs(self.settings, now=time.time()):
            by_name.setdefault(name_of(one), []).append(one.id)
            assert (one.state, one.waiting, one.running) == (JobState.COMPLETED, 0, 0), one
        assert by_name.keys() == {job.name for job in self.jobs}
        assert all(len(ids) == 1 for ids in by_name.values()), "a job was queued twice"
        store = Store.open(self.settings)
        for job in self.jobs:
            with views(store, now=time.time(), only=by_name[job.name]) as opened:
                query = "select row_index, text, error_type from results order by row_index"
                found = opened.duck.execute(query).fetchall()
            wanted = [(n, answer(task, prompt, TOKENS), None) for n, prompt in enumerate(job.prompts)]
            assert found == wanted, next(
                pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]
            )
        store.close()
        code, said, errors = self.ended(self.command("check"))
        assert code == 0, (said, errors)
        return sum(len(job.prompts) for job in self.jobs)


def gave_up(code: int | None, errors: str) -> bool:
    """True if a command ended since it lost the database or the bucket, or did not reach it."""
    told = next((line for line in reversed(errors.splitlines()) if line.startswith("conserve: ")), "")
    lost = "the store postgresql" in told and any(words in told for words in LOST)
    return code == exits.FAILED and (lost or ("s3://" in told and "cannot be reached" in told))


def name_of(reading: JobReading) -> str:
    """The name that a job was queued with."""
    return reading.id.rpartition("-")[0]


@contextmanager
def storm(folder: Path, forks: Forks, *, seed: int) -> Iterator[Storm]:
    """Start all that a storm strikes."""
    with ExitStack() as stack:
        postgres = stack.enter_context(running_postgres(SAFE))
        bucket_server = stack.enter_context(s3_server())
        proxy = stack.enter_context(proxied(bucket_server))
        made = Storm(
            folder=folder,
            forks=forks,
            dice=random.Random(seed),
            postgres=postgres,
            proxy=proxy,
            data=f"s3://{make_bucket(bucket_server)}/team?endpoint={proxy.address}",
            store_url=postgres.new_database(),
        )
        os.environ.update(KEYS)
        Store.open(made.settings).close()
        proxy.judge = made.judge
        for _ in range(3):
            made.add_server()
        made.list_servers()
        try:
            for place in range(len(made.harvesters)):
                made.harvest(place)
            yield made
        finally:
            for harvester in made.harvesters:
                if harvester is not None and harvester.poll() is None:
                    os.killpg(harvester.pid, signal.SIGKILL)
            for server in made.servers:
                server.__exit__()
