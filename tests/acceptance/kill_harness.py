"""Kills the real `conserve run` or `harvest`, aimed or at random; every row must be there exactly once."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.config import load
from conserve.endpoints.fake import WORDS as FAKE_WORDS
from conserve.endpoints.fake import Script, answer_tokens, request_text
from conserve.jobs.task import Kind, Task
from conserve.store.books.readings import JobReading, read_jobs
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests import commands
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot
from tests.acceptance.forks import Forked, Forks
from tests.acceptance.phases import Phase, Trace
from tests.acceptance.record import Record
from tests.submitting import submit

IN_START = 0.1  # share of the random kills that come while an interpreter starts
IN_RECOVERY = 0.1  # share that come between the open store and the first claim
FRESH = 0.05  # share of the others that hit an interpreter of its own where the rest are forks
STOPPED = 0.15  # share of the others that come after a SIGINT
POLL_S = 0.01


class Traced(NamedTuple):
    """A process, where it says it is, and when it was started (monotonic clock)."""

    process: "subprocess.Popen[str] | Forked"
    trace: Trace
    begun: float


@dataclass(slots=True)
class Harness:
    """One job over `prompts`, and processes that work on it until they are killed."""

    home: Path
    prompts: Sequence[str]
    script: str = "token_ms=2&tokens=200&capacity=64"
    server: str | None = None  # harvest on this one rather than run on the fake
    seed: int = 0
    forks: Forks | None = None  # most processes of a storm are forked off it
    constants: dict[str, float] = field(default_factory=dict)  # of the program, as `module__NAME`
    hangs_s: float = commands.HANGS_S  # a process that takes longer to do the rest of the work hangs
    job_id: str = ""
    kills: int = 0
    forked: int = 0
    record: Record = field(default_factory=Record)
    start_s: float | None = None  # what an interpreter took last until its store was open
    recovery_s: float = 0.1  # what a process took last from there to its first claim
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    @property
    def task(self) -> Task:
        return Task(kind=Kind.PROMPT, template="{{ q }}")

    def submit(self) -> None:
        """Queue the job."""
        path = self.home.parent / f"input-{self.seed}.parquet"
        pq.write_table(pa.table({"q": list(self.prompts)}), path)
        store = Store.open(load({"home": self.home}, environ={}))
        self.job_id = submit(store, str(path), self.task).job_id
        store.close()

    def start(self, *shots: Shot, trace: Path | None = None, **constants: float) -> "subprocess.Popen[str]":
        """A real `conserve run` or `harvest`, which fires these shots at itself."""
        arguments, constants = self.arguments(), {**self.constants, **constants}
        if shots or trace or constants:
            aim = aimed.command(shots, *arguments, trace=trace, **constants)
            return commands.start(["-m", "tests.acceptance.aimed", *aim], env=self.env)
        return commands.start(["-m", "conserve", *arguments], env=self.env)

    def started(self, *shots: Shot, **constants: float) -> "subprocess.Popen[str] | Forked":
        """Command as a fork, if there is a process to fork off."""
        return self.start(*shots, **constants) if self.forks is None else self.fork(*shots, **constants)

    def fork(
        self,
        *shots: Shot,
        words: Sequence[str] = (),
        also: Mapping[str, str] | None = None,
        source: Path | None = None,
        **constants: float,
    ) -> Forked:
        """Fork the command, or another one of these words; `also` and `source` as in `aimed` and `forks`."""
        assert self.forks is not None
        self.forked += 1
        output, errors = (
            self.home.parent / f"{name}-{self.seed}-{self.forked}" for name in ("said", "errors")
        )
        aim = aimed.command(shots, *(words or self.arguments()), also=also, **{**self.constants, **constants})
        return self.forks.start(aim, env=self.env, errors=errors, output=output, source=source)

    def arguments(self) -> list[str]:
        """The command, as a user would give it."""
        if self.server is not None:
            return ["harvest", "--until-empty", "--endpoint", self.server]
        return ["run", "--endpoint", f"fake:?{self.script}"]

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead it to the store, and to no settings of the developer's."""
        folders = {"CONSERVE_HOME": self.home, "XDG_CONFIG_HOME": self.home.parent / "config"}
        return {**{name: str(path) for name, path in folders.items()}, "CONSERVE_FAKE": "1"}

    def traced(self, *shots: Shot, fresh: bool = True) -> Traced:
        """Start a process that says where it is; a fork unless it is to be a fresh interpreter."""
        path = self.home.parent / f"trace-{self.seed}-{self.record.processes}"
        self.record.processes += 1
        trace, begun = Trace.fresh(path), time.monotonic()
        if fresh or self.forks is None:
            return Traced(self.start(*shots, trace=path), trace, begun)
        aim = aimed.command(shots, *self.arguments(), trace=path, **self.constants)
        return Traced(self.forks.start(aim, env=self.env, errors=path.with_suffix(".stderr")), trace, begun)

    def kill(self, *shots: Shot, **constants: float) -> None:
        """Work until the shot that kills; what is in the store by then is right."""
        done = commands.ended(self.started(*shots, **constants))
        assert done.returncode == -signal.SIGKILL, (shots, done)
        self.kills += 1
        self.check_so_far(shots)

    def kill_in(self, phase: Phase, *shots: Shot) -> None:
        """Work until the shot that kills, record the kill, and check that it hit this phase."""
        process, trace, _ = self.traced(*shots, fresh=False)
        done = commands.ended(process, self.hangs_s)
        assert done.returncode == -signal.SIGKILL, (phase, shots, done)
        assert trace.phase is phase, f"{shots} hit {trace.phase.title}"
        self.kills += 1
        self.record.aimed[phase] += 1
        self.record.generated += trace.generated
        self.check_so_far(shots)

    def check_so_far(self, shots: Sequence[Shot]) -> None:
        """No row is there twice, and each that is there is right."""
        rows = self.results()
        assert len({row[0] for row in rows}) == len(rows), f"{shots} left a row twice"
        assert all(row[1:] == self.expected(row[0]) for row in rows)

    def kill_after(self, running: Traced, seconds: float) -> bool:
        """SIGKILL the whole group after a while and record what it hit; False if it had finished by then."""
        process, trace, _ = running
        killed = False
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            killed = process.returncode == -signal.SIGKILL  # it may have ended in the meantime
        self.record.generated += trace.generated
        if killed:
            self.kills += 1
            self.record.kills[trace.phase] += 1
        return killed

    def storm(self, kills: int, *, longest_s: float) -> None:
        """Start and kill until that many were killed or the job is done; now and then two at a time.

        A process says when it has started and when it has recovered, so that a slow machine changes little in
        what the kills hit: shares of them come during these, evenly over what they took last, and the others
        within `longest_s` after them. Where an interpreter takes more than a second to start, all else takes
        longer too, and so many times `longest_s` is meant.
        """
        while self.kills < kills and self.reading().state not in ("completed",):
            if self.start_s is not None and self.dice.random() < IN_START:
                self.kill_after(self.traced(), self.dice.uniform(0, self.start_s))
                continue
            fresh = self.start_s is None or self.dice.random() < FRESH
            number = min(self.dice.choice((1, 1, 1, 2)), kills - self.kills)
            for running in [self.traced(fresh=fresh) for _ in range(number)]:
                self.kill_started(running, longest_s)

    def kill_started(self, running: Traced, longest_s: float) -> None:
        """Kill a process in its recovery, or within `longest_s` after it."""
        process, trace, begun = running
        started_s = self.until(lambda: trace.started, running)
        if started_s and isinstance(process, subprocess.Popen):
            self.start_s = time.monotonic() - begun
        if self.dice.random() < IN_RECOVERY:
            self.kill_after(running, self.dice.uniform(0, self.recovery_s))
            return
        self.recovery_s = self.until(lambda: trace.recovered, running) or self.recovery_s
        longest_s *= max(1.0, self.start_s or 1.0)
        seconds = self.dice.uniform(0, longest_s)
        if self.dice.random() < STOPPED:  # a clean stop, cut short by the kill
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            seconds = self.dice.uniform(0, longest_s / 4)
        self.kill_after(running, seconds)

    def until(self, condition: Callable[[], bool], running: Traced) -> float:
        """Wait for a condition or the process's end; returns the seconds waited, 0 if the condition held."""
        begun = time.monotonic()
        if condition():
            return 0.0
        while not condition() and running.process.poll() is None:
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def finish(self) -> int:
        """Let one process run to the end; returns its exit code."""
        if self.forks is None:
            done = commands.ended(self.start(), self.hangs_s)
        else:
            process, trace, _ = self.traced(fresh=False)
            done = commands.ended(process, self.hangs_s)
            self.record.generated += trace.generated
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode

    def reading(self) -> JobReading:
        """The job's counters."""
        readings = read_jobs(load({"home": self.home}, environ={}), now=time.time())
        (reading,) = (reading for reading in readings if reading.id == self.job_id)
        return reading

    def results(self) -> list[tuple[int, str | None, str | None]]:
        """Row, text and error of every result there is."""
        store = Store.open(load({"home": self.home}, environ={}))
        with views(store, now=time.time(), only=[self.job_id]) as opened:
            query = "select row_index, text, error_type from results order by row_index"
            rows: list[tuple[int, str | None, str | None]] = opened.duck.execute(query).fetchall()
        store.close()
        return rows

    def expected(self, row: int) -> tuple[str | None, str | None]:
        """Text and error of a row that nothing ever interrupts."""
        if "REJECT" in self.prompts[row]:
            return None, "invalid_request"
        return answer(self.task, self.prompts[row], Script.from_url(f"fake:?{self.script}").tokens), None

    def check(self) -> None:
        """Every row exactly once, the answer the fake's own to the byte, the counters right."""
        rows = self.results()
        assert [row[0] for row in rows] == list(range(len(self.prompts)))
        assert all(row[1:] == self.expected(row[0]) for row in rows)
        reading = self.reading()
        poison = sum("REJECT" in prompt for prompt in self.prompts)
        assert (reading.succeeded, reading.failed) == (len(self.prompts) - poison, poison)
        assert (reading.waiting, reading.running) == (0, 0)

    def account(self) -> Record:
        """The record of a job that is checked, with what its rows came to."""
        store = Store.open(load({"home": self.home}, environ={}))
        with views(store, now=time.time(), only=[self.job_id]) as opened:
            query = "select count(*), sum(attempts), sum(completion_tokens), sum(resumed_tokens) from results"
            counted = opened.duck.execute(query).fetchone()
        store.close()
        assert counted is not None
        record = self.record
        record.jobs = 1
        record.rows, record.attempts, record.answer_tokens, record.resumed_tokens = map(int, counted)
        assert record.redone_tokens >= 0, record
        return record


def answer(task: Task, prompt: str, tokens: int) -> str:
    """Answer of the fake to this prompt if nothing interrupts it."""
    return " ".join(FAKE_WORDS[t] for t in answer_tokens(request_text(task.body(prompt)), tokens))
