"""Kills the real `conserve run` or `harvest` at random moments; every row must be there exactly once."""

import os
import random
import signal
import subprocess
import sys
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

    def start(self) -> "subprocess.Popen[str]":
        """A real `conserve run` or `harvest` in a process group of its own."""
        arguments = ["run", "--endpoint", f"fake:?{self.script}"]
        if self.server is not None:
            arguments = ["harvest", "--until-empty", "--endpoint", self.server]
        command = [sys.executable, "-m", "conserve", *arguments]
        return subprocess.Popen(
            command,
            env={**os.environ, "CONSERVE_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kill_after(self, process: "subprocess.Popen[str]", seconds: float) -> bool:
        """SIGKILL the whole group after a while; False if it had finished by then."""
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            self.kills += 1
            return True
        return False

    def storm(self, kills: int, *, longest_s: float) -> None:
        """Start and kill until that many were killed or the job is done; now and then two at a time."""
        while self.kills < kills and self.reading().state not in ("completed",):
            processes = [self.start() for _ in range(self.dice.choice((1, 1, 1, 2)))]
            for process in processes:
                if self.dice.random() < 0.2:  # a clean stop, cut short by the kill
                    time.sleep(self.dice.uniform(0, longest_s / 2))
                    process.send_signal(signal.SIGINT)
                self.kill_after(process, self.dice.uniform(0.1, longest_s))

    def finish(self) -> int:
        """Let one process run to the end; returns its exit code."""
        process = self.start()
        _, stderr = process.communicate(timeout=120)
        assert "Traceback" not in stderr, stderr
        return process.returncode

    def reading(self) -> JobReading:
        """The job's counters."""
        readings = read_jobs(load({"home": self.home}, environ={}), now=time.time())
        (reading,) = (reading for reading in readings if reading.id == self.job_id)
        return reading

    def check(self) -> None:
        """Every row exactly once, the answer the fake's own to the byte, the counters right."""
        store = Store.open(load({"home": self.home}, environ={}))
        with views(store, now=time.time(), only=[self.job_id]) as opened:
            rows = opened.duck.execute(
                "select row_index, text, error_type from results order by row_index"
            ).fetchall()
        store.close()
        assert [row[0] for row in rows] == list(range(len(self.prompts)))
        tokens = Script.from_url(f"fake:?{self.script}").tokens
        for (_, text, error_type), prompt in zip(rows, self.prompts, strict=True):
            if "REJECT" in prompt:
                assert (text, error_type) == (None, "invalid_request")
            else:
                assert (text, error_type) == (answer(self.task, prompt, tokens), None)
        reading = self.reading()
        poison = sum("REJECT" in prompt for prompt in self.prompts)
        assert (reading.succeeded, reading.failed) == (len(self.prompts) - poison, poison)
        assert (reading.waiting, reading.running) == (0, 0)


def answer(task: Task, prompt: str, tokens: int) -> str:
    """What the fake answers to this prompt when nothing ever interrupts it."""
    return " ".join(FAKE_WORDS[t] for t in answer_tokens(request_text(task.body(prompt)), tokens))
