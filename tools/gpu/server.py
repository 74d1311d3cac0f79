"""`conserve serve` with offline rows in its queue, over a store of its own."""

import contextlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.gpu import children, words
from tools.gpu.engines import KINDS, Size

VOCABULARY = (100, 20_000)  # ids of random tokens, without special ones
LOOK_S = 0.5


class StepFailed(Exception):
    """A step has no result; `log` has the last lines of its child."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


class Server:
    """A running server of one kind of engine. Raises `StepFailed` if it does not answer within its limit."""

    def __init__(
        self, kind: str, size: Size, model: str, out: Path, scratch: Path, more: list[str], limit_s: float
    ) -> None:
        self.kind, self.size = kind, size
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log, self.home = out / f"server-{kind}.log", scratch / f"home-{kind}"
        self.environment = {
            **size.environment(kind),
            "CONSERVE_HOME": str(self.home),
            "CONSERVE_ENGINE_LOG": str(self.log),
        }
        began, until = time.monotonic(), time.monotonic() + limit_s
        rows = children.start(self._rows(), self.log, self.environment)
        self.process = children.start(self._words(model, more), self.log, self.environment)
        try:
            self._wait_for(until, lambda: bool(self.report()), "answer")
            self.started_s = round(time.monotonic() - began, 1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                rows.wait(max(1.0, until - time.monotonic()))
            if rows.returncode != 0:
                raise StepFailed("the rows were not submitted", children.tail(self.log))
            self._wait_for(
                until, lambda: (self.report().get("offline") or {}).get("tokens", 0) > 0, "compute a row"
            )
            self.rows_s = round(time.monotonic() - began, 1)
        except BaseException:
            children.end(self.process, 5)
            raise
        finally:
            children.end(rows, 1)

    def _rows(self) -> list[str]:
        numbers = (self.size.rows, *self.size.row_prompt, *self.size.row_answer, *VOCABULARY)
        return children.within("rows", str(self.home / "rows.jsonl"), *map(str, numbers))

    def _words(self, model: str, more: list[str]) -> list[str]:
        memory = min(self.size.host_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
        ours = ("--kv-host-memory", str(memory), "--allow-control", "--port", self.url.rpartition(":")[2])
        return children.conserve("serve", model, *ours, *self.size.flags, *KINDS[self.kind].flags, *more)

    def _wait_for(self, until: float, true: Callable[[], bool], what: str) -> None:
        while not true():
            if not self.alive:
                code = self.process.returncode
                raise StepFailed(f"conserve serve ended with {code}", children.tail(self.log))
            if time.monotonic() > until:
                raise StepFailed(f"conserve serve did not {what} in time", children.tail(self.log))
            time.sleep(LOOK_S)

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self.process.poll() is None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path; empty if the server does not answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return {}

    def report(self) -> dict[str, Any]:
        """The scheduler's report; empty if the server does not answer."""
        return self.get("/v1/conserve")

    def told(self) -> dict[str, Any]:
        """The engine's words about itself."""
        log = self.log.read_text(errors="replace")
        return words.told(self.report(), log, self.get("/version").get("version"))

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Change preemption, checkpoints or SLO."""
        try:
            with self._post("/v1/conserve", wanted) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise StepFailed(
                f"{json.dumps(wanted)} was answered {error.code}: {error.read()[:300]!r}"
            ) from error
        except OSError as error:
            raise StepFailed(f"the server does not answer: {error}", children.tail(self.log)) from error

    def ask(self, seed: int, lengths: tuple[int, int]) -> dict[str, float]:
        """Send one live request of random tokens; returns its latencies in ms."""
        model = self.get("/v1/models")["data"][0]["id"]
        prompt = random.Random(seed).choices(range(*VOCABULARY), k=lengths[0])
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": lengths[1],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.monotonic()
        with self._post("/v1/completions", body) as answer:
            times = [1000 * (time.monotonic() - began) for line in answer if line.startswith(b"data: {")]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return {"ttft_ms": round(times[0], 1), "longest_gap_ms": round(max(gaps, default=0.0), 1)}

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60)

    def queue(self) -> list[dict[str, Any]]:
        """Rows of the job by state: with none waiting, throughput of rows is too low."""
        asked = subprocess.run(
            children.conserve("jobs", "--json"),
            env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        kept = ("state", "rows", "waiting", "running", "succeeded", "failed", "error")
        with contextlib.suppress(ValueError):
            return [{name: job.get(name) for name in kept} for job in json.loads(asked.stdout)]
        return [{"error": asked.stderr[-300:]}]

    def stop(self) -> None:
        """End all its processes."""
        children.end(self.process)


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
