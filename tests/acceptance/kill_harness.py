"""Kills the real `conserve run` or `harvest`, aimed or at random; every row must be there exactly once."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conserve.config import load
from conserve.endpoints.fake import WORDS as FAKE_WORDS
from conserve.endpoints.fake import Script, answer_tokens, request_text
from conserve.jobs.submit import submit
from conserve.jobs.task import Kind, Task
from conserve.store.query import views
from conserve.store.readings import JobReading, read_jobs
from conserve.store.store import Store
from tests import commands
from tests.acceptance import aimed
from tests.acceptance.aimed import Shot

STEPS = (
    "conserve.store.queue:claim",
    "conserve.store.queue:save_tokens",
    "conserve.store.choice:choose",
    "conserve.store.journal:commit",
    "conserve.store.journal:count",
    "conserve.store.shards:to_arrow",
    "conserve.store.shards:register",
    "conserve.store.home:write_durably",
    "conserve.jobs.workload:Workload.load",
    "conserve.jobs.recorder:Recorder.write",
)
"""Where a process may be killed: everything that it does to the store."""


@dataclass(slots=True)
class Harness:
    """One job over `prompts`, and processes that work on it until they are killed."""

    home: Path
    prompts: Sequence[str]
    script: str = "token_ms=2&tokens=200&capacity=64"
    server: str | None = None  # harvest on this one rather than run on the fake
    seed: int = 0
    job_id: str = ""
    kills: int = 0
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

    def start(self, *shots: Shot, options: Sequence[str] = (), **constants: int) -> "subprocess.Popen[str]":
        """A real `conserve run` or `harvest`, which fires these shots at itself."""
        arguments = ["run", "--endpoint", f"fake:?{self.script}", *options]
        if self.server is not None:
            arguments = ["harvest", "--until-empty", "--endpoint", self.server, *options]
        program = aimed.command(shots, *arguments, **constants) if shots else ["-m", "conserve", *arguments]
        return commands.start(program, env={"CONSERVE_HOME": str(self.home)})

    def kill(self, *shots: Shot, **constants: int) -> None:
        """Work until the shot that kills; what is in the store by then is right."""
        done = commands.ended(self.start(*shots, **constants))
        assert done.returncode == -signal.SIGKILL, (shots, done)
        self.kills += 1
        rows = self.results()
        assert len({row[0] for row in rows}) == len(rows), f"{shots} left a row twice"
        assert all(row[1:] == self.expected(row[0]) for row in rows)

    def storm(self, kills: int, *, longest_s: float) -> None:
        """Start and kill until that many were killed or the job is done."""
        while self.kills < kills and self.reading().state != "completed":
            if self.dice.random() < 0.5:
                self.kill_at_a_random_call()
            else:
                self.kill_at_a_random_moment(longest_s)

    def kill_at_a_random_call(self) -> None:
        """Kill at the n-th call of some step, if it comes to that."""
        shot = Shot(at=self.dice.choice(STEPS), call=self.dice.randint(1, 20), after=self.dice.random() < 0.5)
        self.kills += commands.ended(self.start(shot)).returncode == -signal.SIGKILL

    def kill_at_a_random_moment(self, longest_s: float) -> None:
        """Kill the whole group some time after rows were leased; now and then two, or after a clean stop began."""
        for process in [self.start() for _ in range(self.dice.choice((1, 1, 1, 2)))]:
            while process.poll() is None and self.reading().running == 0:
                time.sleep(0.01)
            time.sleep(self.dice.uniform(0, longest_s))  # the moment of the kill is what is random
            if self.dice.random() < 0.2 and process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(self.dice.uniform(0, longest_s / 4))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                self.kills += 1
            commands.ended(process)

    def finish(self) -> int:
        """Let one process run to the end; returns its exit code."""
        done = commands.ended(self.start())
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


def answer(task: Task, prompt: str, tokens: int) -> str:
    """What the fake answers to this prompt when nothing ever interrupts it."""
    return " ".join(FAKE_WORDS[t] for t in answer_tokens(request_text(task.body(prompt)), tokens))
