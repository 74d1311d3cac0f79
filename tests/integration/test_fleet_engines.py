"""Three real vLLM servers behind one queue: prefixes stay together, and a server that is killed costs no row."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.held_port import held_port

pytestmark = [pytest.mark.engine, pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1800)]

FLAGS = (
    *("--max-model-len", "1024", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(128 << 20), "--dtype", "float32"),
)
NUMBERS = itertools.count()
GROUPS, ROWS = 12, 10
PREFIX = "You answer questions about the town of {name}. Its river, its market and its bridges are old. " * 6


class Program:
    """A command of ConServe over one store, with its output in a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.said = folder / f"{words[0]}-{next(NUMBERS)}.txt"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CONSERVE_")},
            "CONSERVE_HOME": str(folder / "home"),
        }
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "conserve", *words], env=self.environment, stdout=out, stderr=out
            )

    def until(self, condition: Callable[[], object], within_s: float = 900) -> None:
        """Wait for it."""
        give_up_at = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < give_up_at, self.said.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill it with all of its processes."""
        if self.process.poll() is not None:
            return
        family = [
            *psutil.Process(self.process.pid).children(recursive=True),
            psutil.Process(self.process.pid),
        ]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=30)


class Three:
    """Three servers, and commands over the store that they are not fed from by themselves."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.folder, self.model, self.stack = folder, model, stack
        self.urls = [f"http://127.0.0.1:{stack.enter_context(held_port())}" for _ in range(3)]
        self.servers: list[Program] = []
        for url in self.urls:  # one after the other: their starts would take the cores from each other
            self.servers.append(self.serve(url))
            self.servers[-1].until(lambda: "serving " in self.servers[-1].said.read_text())

    def serve(self, url: str) -> Program:
        port = url.rpartition(":")[2]
        words = (
            "serve",
            str(self.model),
            "--no-harvest",
            "--no-batches",
            "--ttft-slo",
            "60s",
            "--port",
            port,
        )
        return self.start(*words, *FLAGS)

    def start(self, *words: str) -> Program:
        program = Program(self.folder, *words)
        self.stack.callback(program.kill)
        return program

    def conserve(self, *words: str) -> str:
        """Output of a command."""
        environment = self.servers[0].environment
        done = subprocess.run(
            [sys.executable, "-m", "conserve", *words],
            env=environment, capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        return done.stdout.strip()

    def submit(self, name: str) -> str:
        """Queue groups of rows that share their beginning; `name` tells them from other jobs' groups."""
        path = self.folder / f"{name}.jsonl"
        prompts = [
            f"{PREFIX.format(name=f'{name}{group}')} Question {row}: how long is it?"
            for group, row in itertools.product(range(GROUPS), range(ROWS))
        ]
        path.write_text("".join(json.dumps({"q": prompt}) + "\n" for prompt in prompts))
        words = ("--prompt", "{{ q }}", "--max-tokens", "24", "--temperature", "0")
        return self.conserve("submit", str(path), *words)

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.conserve("status", job_id, "--json"))
        return found

    def harvest(self, job_id: str, urls: Sequence[str], *then: Callable[[Program], None]) -> dict[str, Any]:
        """Harvest a job on these servers; returns its figures."""
        flags = itertools.chain.from_iterable(("--endpoint", url) for url in urls)
        program = self.start("harvest", job_id, *flags, "--until-empty")
        for happens in then:
            happens(program)
        assert program.process.wait(900) == 0, program.said.read_text()
        return self.job(job_id)


@pytest.fixture(scope="module")
def three(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    with ExitStack() as stack:
        yield Three(tmp_path_factory.mktemp("fleet"), tiny_llama, stack)


def reuse(job: dict[str, Any]) -> float:
    return float(job["cached_tokens"] / job["prompt_tokens"])


def test_three_servers_reuse_prefixes_within_a_tenth_of_one(three: Three) -> None:
    alone = three.harvest(three.submit("one"), three.urls[:1])
    together = three.harvest(three.submit("all"), three.urls)
    assert together["succeeded"] == alone["succeeded"] == GROUPS * ROWS
    print(f"reuse of three servers {reuse(together):.3f}, of one {reuse(alone):.3f}")
    assert reuse(together) >= 0.9 * reuse(alone)


def test_one_that_is_killed_costs_no_row_and_is_replaced(three: Three) -> None:
    job_id = three.submit("kill")

    def kill(program: Program) -> None:
        program.until(lambda: three.job(job_id)["succeeded"] >= GROUPS * ROWS // 6)
        three.servers[1].kill()

    done = three.harvest(job_id, three.urls, kill)
    assert (done["succeeded"], done["failed"], done["rows"]) == (GROUPS * ROWS, 0, GROUPS * ROWS)
    rows = three.conserve("sql", "--job", job_id, "--json", "select row_index from results order by 1")
    assert [json.loads(row)["row_index"] for row in rows.splitlines()] == list(range(GROUPS * ROWS))
    states = {one["url"]: one["state"] for one in json.loads(three.conserve("fleet", "--json"))}
    assert set(states) == set(three.urls)


def test_a_rolling_upgrade_empties_each_server_before_its_restart(three: Three) -> None:
    """Upgrade the servers that are left: drained, stopped, started again, fed again."""
    job_id = three.submit("upgrade")
    flags = itertools.chain.from_iterable(("--endpoint", url) for url in (three.urls[0], three.urls[2]))
    harvester = three.start("harvest", job_id, *flags, "--until-empty")
    harvester.until(lambda: three.job(job_id)["succeeded"] > 0)
    url = three.urls[0]
    three.conserve("fleet", "drain", url, "--wait")
    three.servers[0].process.terminate()
    assert three.servers[0].process.wait(600) == 0
    three.servers[0] = three.serve(url)
    three.servers[0].until(lambda: "serving " in three.servers[0].said.read_text())
    three.conserve("fleet", "undrain", url)
    assert harvester.process.wait(900) == 0, harvester.said.read_text()
    assert three.job(job_id)["succeeded"] == GROUPS * ROWS
