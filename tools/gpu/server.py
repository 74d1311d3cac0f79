"""`conserve serve` with offline rows in its queue, over a store of its own."""

import contextlib
import gzip
import json
import os
import random
import shutil
import socket
import subprocess
import sys
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
HOOKS = Path(__file__).with_name("hooks").absolute()


class StepFailed(Exception):
    """A step has no result; `log` has the last lines of its child."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


class Server:
    """A running server of one kind of engine, with a stock server beside it where the kind says so.

    Raises `StepFailed` if they do not answer within the limit.
    """

    def __init__(
        self, kind: str, size: Size, model: str, out: Path, scratch: Path, more: list[str], limit_s: float
    ) -> None:
        self._stands(
            kind,
            size,
            out,
            url=f"http://127.0.0.1:{free_port()}",
            stock_url=f"http://127.0.0.1:{free_port()}" if KINDS[kind].beside else None,
            log=scratch / f"server-{kind}.log",
            home=scratch / f"home-{kind}",
        )
        began, until = time.monotonic(), time.monotonic() + limit_s
        rows = children.start(self._rows(), self.log, self.environment)
        self.process: subprocess.Popen[bytes] | children.Kept = children.start(
            self._words(model, more), self.log, {**self.environment, **self._hooked()}
        )
        self.stock: subprocess.Popen[bytes] | children.Kept | None = None
        if self.stock_url is not None:
            self.stock = children.start(self._stock_words(model, more), self._stock_log, self.environment)
        try:
            self._wait_for(until, lambda: bool(self.report()), "answer")
            self._wait_for_stock(until)
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
            self.stop(5)
            raise
        finally:
            children.end(rows, 1)

    @property
    def _stock_log(self) -> Path:
        return self.log.with_name(f"beside-{self.kind}.log")

    def _stands(
        self, kind: str, size: Size, out: Path, *, url: str, stock_url: str | None, log: Path, home: Path
    ) -> None:
        """Note where the processes are, or will be, and what their commands need."""
        self.kind, self.size, self._out = kind, size, out
        self.url, self.stock_url, self.log, self.home = url, stock_url, log, home
        own = {"CONSERVE_HOME": str(home), "CONSERVE_ENGINE_LOG": str(log)}
        self.environment = {**size.environment(kind), **own}

    def _hooked(self) -> dict[str, str]:
        """Variables of the server's processes alone: its iterations are noted, its warm-up waits for stock vLLM."""
        path = f"{HOOKS}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        beside = {"KIT_BESIDE": str(self._stock_log)} if self.stock_url is not None else {}
        return {"PYTHONPATH": path, "KIT_NOTES": str(self.log.with_suffix(".iterations")), **beside}

    def _wait_for_stock(self, until: float) -> None:
        """Wait for the stock server; rows wait too, which would take the processor that it starts on."""
        if self.stock_url is None:
            return
        policy = self.report()["policy"]
        self.change({"policy": "online-only"})
        self._wait_for(
            until, lambda: bool(self.get("/v1/models", of=self.stock_url)), "have stock vLLM beside it"
        )
        self.change({"policy": policy})

    def _rows(self) -> list[str]:
        numbers = (self.size.rows, *self.size.row_prompt, *self.size.row_answer, *VOCABULARY)
        return children.within("rows", str(self.home / "rows.jsonl"), *map(str, numbers))

    def _words(self, model: str, more: list[str]) -> list[str]:
        memory = min(self.size.host_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
        ours = ("--kv-host-memory", str(memory), "--allow-control", "--port", self.url.rpartition(":")[2])
        return children.conserve("serve", model, *ours, *self.size.engine_flags(self.kind), *more)

    def _stock_words(self, model: str, more: list[str]) -> list[str]:
        assert self.stock_url is not None
        address = ("--host", "127.0.0.1", "--port", self.stock_url.rpartition(":")[2])
        module = ("-m", "conserve.engine.vllm.server.stock", model, str(Path(model).parent))
        return [sys.executable, *module, *self.size.flags, *self.size.stock, *more, *address]

    def _wait_for(self, until: float, true: Callable[[], bool], what: str) -> None:
        while not true():
            if (code := self.process.poll()) is not None:
                raise StepFailed(f"conserve serve ended with {code}", children.tail(self.log))
            if self.stock is not None and (code := self.stock.poll()) is not None:
                raise StepFailed(f"stock vLLM ended with {code}", children.tail(self._stock_log))
            if time.monotonic() > until:
                raise StepFailed(f"conserve serve did not {what} in time", children.tail(self.log))
            time.sleep(LOOK_S)

    @property
    def alive(self) -> bool:
        """False once one of the processes has ended."""
        return self.process.poll() is None and (self.stock is None or self.stock.poll() is None)

    def get(self, path: str, of: str | None = None) -> dict[str, Any]:
        """The JSON at a path; empty if the server does not answer."""
        try:
            with urllib.request.urlopen((of or self.url) + path, timeout=10) as answer:
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

    def stop(self, patience_s: float = children.STOP_PATIENCE_S) -> None:
        """End all its processes."""
        for process in (self.stock, self.process):
            if process is not None:
                children.end(process, patience_s)
        self.copy_logs()

    def copy_logs(self) -> None:
        """Bring the logs and the notes of iterations so far back with the results."""
        for log in (self.log, self._stock_log):
            if log.exists():
                shutil.copyfile(log, self._out / log.name)
        notes = sorted(self.log.parent.glob(f"{self.log.stem}.iterations.*"))
        if notes:
            with gzip.open(self._out / f"{self.log.stem}-iterations.jsonl.gz", "wb") as file:
                file.writelines(note.read_bytes() for note in notes)

    def leave(self, place: Path) -> None:
        """Write down what a later call needs to go on with these processes."""
        self.copy_logs()
        pids = [self.process.pid, self.stock.pid if self.stock is not None else None]
        where = {"url": self.url, "stock_url": self.stock_url, "log": str(self.log), "home": str(self.home)}
        place.write_text(json.dumps({"kind": self.kind, "pids": pids, **where}))

    @classmethod
    def left_at(cls, place: Path, size: Size, out: Path) -> "Server | None":
        """The server that an earlier call left running, if one did."""
        if not place.exists():
            return None
        found, one = json.loads(place.read_text()), cls.__new__(cls)
        place.unlink()
        where = {"url": found["url"], "stock_url": found["stock_url"]}
        one._stands(found["kind"], size, out, log=Path(found["log"]), home=Path(found["home"]), **where)
        one.started_s = one.rows_s = 0.0
        own, stock = found["pids"]
        one.process, one.stock = children.Kept(own), children.Kept(stock) if stock is not None else None
        return one


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
