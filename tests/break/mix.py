"""A seeded mix of commands on one store: after each kill the store is audited, and what was printed must hold."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.jobs.task import Kind, Task
from conserve.store.database.versions import LATEST
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forks
from tests.acceptance.kill_harness import answer
from tests.acceptance.scripted_server import Script, ScriptedServer, reply

from . import old_store
from .audit import Audited, audit, left_behind
from .killing import DONE, Killer, Running, Way, feed
from .table import report

TASK = Task(kind=Kind.PROMPT, template="{{ q }}")
REJECTED = "invalid_request"
FAKE = "fake:?token_ms=1&capacity=32"
SHORT, LONG = (160, 4), (6, 400)  # rows of a job, and tokens of each
ENOUGH = {SHORT: 60, LONG: 2}  # rows left, so that a run is worth a kill
CONSTANTS = {"conserve__store__books__shards__SHARD_ROWS": 50}
ENDINGS = ("jsonl", "parquet")

FOLDERS, FOLDER_PLACE, SHARDS, CATALOG = (
    "conserve.store.files.job_folders",
    "conserve.store.files.folder_place",
    "conserve.store.books.shards",
    "conserve.store.books.catalog",
)
LEASES, QUEUE, JOURNAL, MIGRATIONS = (
    "conserve.store.books.leases",
    "conserve.store.books.queue",
    "conserve.store.books.journal",
    "conserve.store.database.migrations",
)
WRITE = "conserve.jobs.harvest.recorder:Recorder.write"
SUBMITTED = (
    Shot(at=f"{FOLDERS}:new", after=True),
    Shot(at=f"{FOLDERS}:adopt"),
    Shot(at=f"{FOLDERS}:adopt", after=True),  # the folder has its name, and no record names it
    Shot(at=f"{CATALOG}:add", after=True),  # not committed
    Shot(at="conserve.jobs.requests.submit:enqueue", after=True),  # durable, and the id is not printed
)
SAVED = Shot(at="conserve.store.books.saved_tokens:save_tokens", after=True)
HARVESTED = (
    Shot(at="conserve.jobs.harvest.workload:Workload.load"),
    Shot(at=WRITE),
    SAVED,
    Shot(at="conserve.store.books.spans:write", after=True),
    Shot(at=WRITE, since=f"{JOURNAL}:count", after=True),
)
MIGRATED = Shot(at=f"{MIGRATIONS}:remember")
AIMS = {
    "submit FILE": (
        *SUBMITTED,
        Shot(at=f"{FOLDER_PLACE}:sync"),
        Shot(at=f"{FOLDER_PLACE}:sync", call=2, after=True),
    ),
    "submit -": SUBMITTED,
    "run": (
        *HARVESTED,
        Shot(at=f"{LEASES}:abandon", after=True),
        Shot(at=f"{JOURNAL}:count", after=True),
        Shot(at=f"{SHARDS}:to_arrow"),
        Shot(at=f"{FOLDER_PLACE}:FolderPlace.write"),
        Shot(at=f"{FOLDER_PLACE}:FolderPlace.write", after=True),
        Shot(at=f"{SHARDS}:register", after=True),
        Shot(at="conserve.jobs.harvest.ledger:Ledger.close"),
    ),
    "harvest": HARVESTED,
    "retry": (
        Shot(at=f"{SHARDS}:waiting_row", after=True),
        Shot(
            at="pathlib:Path.unlink", since=f"{SHARDS}:waiting_row"
        ),  # committed, and the shards are still there
        Shot(at=f"{SHARDS}:retry_failed", after=True),
    ),
    "cancel": (Shot(at=f"{CATALOG}:move"), Shot(at=f"{CATALOG}:move", after=True)),
    "results -o": (
        Shot(at=f"{FOLDER_PLACE}:FolderPlace.write"),
        Shot(at=f"{FOLDER_PLACE}:sync", after=True),
        Shot(at=f"{FOLDER_PLACE}:FolderPlace.write", after=True),
    ),
    "a migration": (
        Shot(at="conserve.store.database.connection:migrate"),
        Shot(at=f"{MIGRATIONS}:lock", after=True),
        *((MIGRATED, replace(MIGRATED, after=True)) if LATEST > 1 else ()),
        Shot(at="conserve.store.database.connection:migrate", after=True),
    ),
}
"""Functions at which each command is killed in every round; random instants come on top."""


class Server(ScriptedServer):
    """Refuses the same rows as the fake endpoint does."""

    async def _complete(self, writer: Any, path: str, body: dict[str, Any], traceparent: str | None) -> bool:
        if "REJECT" in str(body.get("messages")):
            return await reply(writer, 400, {"error": {"message": "scripted rejection"}})
        return await super()._complete(writer, path, body, traceparent)


def server() -> Server:
    """A server that harvests may use."""
    return Server(Script(token_s=0.0005, max_num_seqs=32))


@dataclass(slots=True, kw_only=True)
class Job:
    """A submitted job, and the part of it that was seen to be done."""

    prompts: Sequence[str]
    tokens: int
    served: bool  # by the server, not by the fake
    succeeded: frozenset[int] = frozenset()  # row indexes, when last looked at
    cancelled: bool = False

    def expected(self, row: int) -> tuple[str | None, str | None]:
        """Text and type of error of a row that nothing ever interrupts."""
        if "REJECT" in self.prompts[row]:
            return None, REJECTED
        return answer(TASK, self.prompts[row], self.tokens), None


@dataclass(slots=True)
class Mix:
    """One store, the jobs on it, and what has been killed."""

    folder: Path
    forks: Forks
    server: Server
    dice: random.Random
    jobs: dict[str, Job] = field(default_factory=dict)
    now: dict[str, Audited] = field(default_factory=dict)  # the store at the last audit
    kills: Counter[str] = field(default_factory=Counter)
    missed: list[tuple[str, Shot]] = field(default_factory=list)  # aims that nothing came to
    submitted: dict[str, Job] = field(default_factory=dict)  # by the name that their ids begin with
    said: list[str] = field(default_factory=list)  # ids that were printed
    open_pipes: list[int] = field(default_factory=list)  # that a submit waits for more from
    killer: Killer = field(init=False)

    def __post_init__(self) -> None:
        self.killer = self.killer_of(self.home)

    @property
    def home(self) -> Path:
        """The folder of the store."""
        return self.folder / "home"

    @property
    def answers(self) -> Path:
        """A folder of the user's, for exports."""
        path = self.folder / "answers"
        path.mkdir(exist_ok=True)
        return path

    def killer_of(self, home: Path) -> Killer:
        """Kills commands on this store."""
        return Killer(home, self.folder, self.forks, self.dice, CONSTANTS)

    # What is killed.

    def play(self, commands: Collection[str], kills: int) -> None:
        """Kill these commands at each of their functions, then all at random instants: so many kills altogether."""
        aims = [(name, shot) for name in commands for shot in AIMS[name]]
        self.dice.shuffle(aims)
        for name, shot in aims:
            if shot.at == SAVED.at:
                self.submit(*LONG, served=name == "harvest")  # none of whose tokens are saved yet
            if not self.turn(name, shot):
                self.missed.append((name, shot))
        names = tuple(AIMS)
        while self.kills.total() < kills:
            self.turn(self.dice.choice(names))

    def turn(self, name: str, shot: Shot | None = None) -> bool:
        """Start a command, at random instants now and then another beside it; kill, and look at what is left."""
        way = self.dice.choice(tuple(Way))
        if name == "a migration":
            return self.migrated(way, shot)
        start = self.prepared(name)
        beside = self.companion(name) if shot is None and self.dice.random() < 0.3 else None
        running = start(*([self.killer.aim(shot, way)] if shot else []))
        killed = self.killer.kill(running, way, aimed_at=shot is not None)
        kills = [(way, name, killed)]
        if beside is not None:
            kills.append((Way.KILL, beside.name, self.ended(beside)))
        self.now = audit(self.home)
        self.count(kills, self.now.values())
        for one in (running, beside) if beside else (running,):
            self.check(one)
        return killed

    def companion(self, name: str) -> Running | None:
        """Another command that works on the store meanwhile. A job that it ended could not be cancelled."""
        if name == "cancel":
            return None
        return self.prepared(self.dice.choice(("run", "run", "submit FILE", "results -o")))()

    def ended(self, running: Running) -> bool:
        """Let a companion come to its end, or kill it too; True if it was killed."""
        if self.dice.random() < 0.5:
            return self.killer.kill(running, Way.KILL)
        assert running.ended().returncode in DONE
        return False

    def count(self, kills: Sequence[tuple[Way, str, bool]], jobs: Iterable[Audited]) -> None:
        """Count these kills, if they were some, and the rows that these jobs have lost by them."""
        found = list(jobs)
        lost, doubled = sum(job.lost for job in found), sum(job.doubled for job in found)
        for way, name, killed in kills:
            self.kills[name] += killed
            report(f"kill {way}: {name}", tried=int(killed), lost=lost, doubled=doubled)

    # The commands.

    def prepared(self, name: str) -> Callable[..., Running]:
        """A function that starts the command, with shots, once there is something for it to do."""
        return PREPARE[name](self)

    def submit_file(self) -> Callable[..., Running]:
        name, job = self.new_job(*self.dice.choice((SHORT, LONG)), served=self.dice.random() < 0.3)
        return partial(self.killer.start, "submit FILE", self.submission(name, job))

    def submission(self, name: str, job: Job, path: Path | None = None) -> list[str]:
        """The words that submit a job, from a file that is written here unless it is the standard input."""
        if path is None:
            path = self.folder / f"{name}.parquet"
            pq.write_table(pa.table({"q": list(job.prompts)}), path)
        task = ["--prompt", "{{ q }}", "--max-tokens", str(job.tokens), "--name", name]
        return ["submit", str(path), *task]

    def new_job(self, rows: int, tokens: int, *, served: bool) -> tuple[str, Job]:
        """A job to be submitted, a few of whose rows fail, and the name that its id will begin with."""
        name = f"s{len(self.submitted)}"
        prompts = [f"{name} {n}" + (" REJECT" if n % 40 == 7 else "") for n in range(rows)]
        job = Job(prompts=prompts, tokens=tokens, served=served)
        self.submitted[name] = job
        return name, job

    def submit_stream(self) -> Callable[..., Running]:
        name, job = self.new_job(*SHORT, served=False)
        pipe = self.folder / f"{name}.pipe"
        os.mkfifo(pipe)
        lines = [msgspec.json.encode({"q": prompt}).decode() + "\n" for prompt in job.prompts]
        whole = self.dice.random() < 0.7
        fed = lines if whole else lines[: self.dice.randrange(len(lines))]
        words = self.submission(name, job, Path("-"))

        def start(*shots: Shot) -> Running:
            running = self.killer.start("submit -", words, *shots, source=pipe)
            end = feed(pipe, running, lines if shots else fed)
            if end is not None and (whole or shots):
                os.close(end)  # else it stays open, and the command waits for more
            elif end is not None:
                self.open_pipes.append(end)
            return running

        return start

    def run(self) -> Callable[..., Running]:
        jobs = self.with_work(served=False)
        return partial(self.killer.start, "run", ["run", *jobs, "--endpoint", FAKE])

    def harvest(self) -> Callable[..., Running]:
        jobs = self.with_work(served=True)
        words = ["harvest", *jobs, "--until-empty", "--endpoint", self.server.url]
        return partial(self.killer.start, "harvest", words)

    def with_work(self, *, served: bool) -> list[str]:
        """Open jobs of the fake's or of the server's, with short and long rows left to do."""
        for kind in (SHORT, LONG):
            if self.rows_left(served, kind[1]) < ENOUGH[kind]:
                self.submit(*kind, served=served)
        return self.open_jobs(served)

    def open_jobs(self, served: bool) -> list[str]:
        """Jobs with rows left to do."""
        return [
            job_id
            for job_id, job in self.jobs.items()
            if job.served == served and self.now[job_id].state not in ("cancelled", "completed")
        ]

    def rows_left(self, served: bool, tokens: int) -> int:
        """Rows without a result in the open jobs with answers of this length."""
        jobs = [self.now[job_id] for job_id in self.open_jobs(served) if self.jobs[job_id].tokens == tokens]
        return sum(job.rows - len(job.results) for job in jobs)

    def submit(self, rows: int, tokens: int, *, served: bool) -> str:
        """Submit a job without being disturbed."""
        name, job = self.new_job(rows, tokens, served=served)
        done = self.killer.done("submit FILE", self.submission(name, job))
        assert done.returncode == 0, done
        self.said.append(done.stdout.strip())
        self.now = audit(self.home)
        self.look()
        return self.said[-1]

    def retry(self) -> Callable[..., Running]:
        failed = [job_id for job_id, job in self.now.items() if job.failed and job.state == "completed"]
        if not failed:
            self.drain(served=False)
            return self.retry()
        return partial(self.killer.start, "retry", ["retry", self.dice.choice(failed)])

    def cancel(self) -> Callable[..., Running]:
        served = self.dice.random() < 0.5
        jobs = self.open_jobs(served)
        job_id = self.dice.choice(jobs) if len(jobs) > 2 else self.submit(*LONG, served=served)
        return partial(self.killer.start, "cancel", ["cancel", job_id])

    def results(self) -> Callable[..., Running]:
        if not self.jobs:
            self.submit(*SHORT, served=False)
        job_id = self.dice.choice(sorted(self.jobs))
        path = self.answers / f"{job_id}.{self.dice.choice(ENDINGS)}"
        return partial(self.killer.start, "results -o", ["results", job_id, "-o", str(path)])

    # What is checked.

    def check(self, running: Running) -> None:
        """Assert that the command's words hold, and that the jobs are the submitted ones."""
        if running.name.startswith("submit"):
            self.note_id(running)
        self.look()
        if running.name == "cancel":
            job_id = running.words[1]
            self.jobs[job_id].cancelled = self.now[job_id].state == "cancelled"
            assert self.jobs[job_id].cancelled or "cancelled" not in running.output.read_text()
        if running.name == "results -o":
            self.check_export(Path(running.words[3]), said="wrote" in running.errors.read_text())
        while self.open_pipes:
            os.close(self.open_pipes.pop())

    def note_id(self, running: Running) -> None:
        """Remember an id that a submit has printed: from then on the job must be there."""
        if printed := running.output.read_text():
            assert printed.endswith("\n"), printed
            self.said.append(printed.strip())

    def look(self) -> None:
        """Every job is one that was submitted, whole; each result is right, and none that was there has gone."""
        assert set(self.said) <= set(self.now), "an id was printed, and there is no such job"
        for job_id, found in self.now.items():
            job = self.jobs.setdefault(job_id, self.submitted[job_id.rpartition("-")[0]])
            assert found.rows == len(job.prompts), f"{job_id} has {found.rows} rows"
            self.check_results(job_id, found.by_row())
            assert found.state == "cancelled" or not job.cancelled

    def check_results(self, job_id: str, rows: dict[int, tuple[str | None, str | None]]) -> None:
        """Each result is right; rows that had an answer have it still."""
        job = self.jobs[job_id]
        wrong = [row for row, result in rows.items() if result != job.expected(row)]
        assert not wrong, f"{job_id}: {wrong}"
        succeeded = frozenset(row for row, (_, error) in rows.items() if error is None)
        assert job.succeeded <= succeeded, f"{job_id} has lost {sorted(job.succeeded - succeeded)}"
        job.succeeded = succeeded

    def check_export(self, path: Path, *, said: bool) -> None:
        """The file is there whole, or not at all unless the command said that it is."""
        if not path.exists():
            assert not said, f"{path} is not there"
            return
        job = self.jobs[path.stem]
        for row in exported(path):
            assert (row["text"], row["error_type"]) == job.expected(row["row_index"])

    # Migrations: of a copy, so that it may be killed once more.

    def migrated(self, way: Way, shot: Shot | None) -> bool:
        """Kill the first command that opens a store of the first version, then let the next ones go on."""
        open_jobs = self.with_work(served=False)
        home = self.folder / "old" / "home"
        shutil.copytree(self.home, home)
        old_store.make_old(home)
        before = audit(home)
        killer = self.killer_of(home)
        words = ["run", *open_jobs, "--endpoint", FAKE]
        running = killer.start("a migration", words, *([killer.aim(shot, way)] if shot else []))
        killed = killer.kill(running, way, aimed_at=shot is not None)
        check_migrated(before, audit(home))
        done = killer.done("run", words)
        assert done.returncode in DONE, done
        assert old_store.version(home) == str(LATEST)
        after = audit(home)
        self.count([(way, "a migration", killed)], after.values())
        for job_id in open_jobs:
            rows = range(len(self.jobs[job_id].prompts))
            assert after[job_id].by_row() == {row: self.jobs[job_id].expected(row) for row in rows}
        shutil.rmtree(home.parent)
        return killed

    # The end.

    def drain(self, *, served: bool) -> None:
        """Let one command do the rest of the work."""
        jobs = self.with_work(served=served)
        endpoint = ["--until-empty", "--endpoint", self.server.url] if served else ["--endpoint", FAKE]
        name = "harvest" if served else "run"
        done = self.killer.done(name, [name, *jobs, *endpoint])
        assert done.returncode in DONE, done
        self.now = audit(self.home)
        self.look()

    def finish(self) -> None:
        """Do the rest: each row is there once, as if nothing had been interrupted, and nothing else is left."""
        for served in (False, True):
            self.drain(served=served)
        for job_id, job in self.jobs.items():
            found, rows = self.now[job_id], range(len(job.prompts))
            if not job.cancelled:
                assert found.by_row() == {row: job.expected(row) for row in rows}, job_id
            path = self.answers / f"{job_id}.parquet"
            done = self.killer.done("results -o", ["results", job_id, "-o", str(path)])
            assert done.returncode == 0, done
            assert [row["row_index"] for row in exported(path)] == sorted(found.by_row())
            self.check_export(path, said=True)
        self.check_swept()

    def check_swept(self) -> None:
        """Once what kills have left is two hours old, the next run sweeps it."""
        grow_old(self.home, seconds=7_200)
        self.drain(served=False)
        assert left_behind(self.home) == []
        exports = [f"{job_id}.{ending}" for job_id in self.jobs for ending in ENDINGS]
        assert {path.name for path in self.answers.iterdir()} <= set(exports)
        assert not list(self.killer.temporary.iterdir())


PREPARE: dict[str, Callable[[Mix], Callable[..., Running]]] = {
    "submit FILE": Mix.submit_file,
    "submit -": Mix.submit_stream,
    "run": Mix.run,
    "harvest": Mix.harvest,
    "retry": Mix.retry,
    "cancel": Mix.cancel,
    "results -o": Mix.results,
}


def check_migrated(before: Mapping[str, Audited], after: Mapping[str, Audited]) -> None:
    """The jobs of an old store are all there, with the results they had."""
    assert before.keys() == after.keys()
    for job_id, job in before.items():
        assert job.by_row().items() <= after[job_id].by_row().items(), job_id


def exported(path: Path) -> list[dict[str, Any]]:
    """The rows of an exported file."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def grow_old(folder: Path, *, seconds: float) -> None:
    """Have everything in a folder written so long ago."""
    for path in (folder, *folder.rglob("*")):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))
