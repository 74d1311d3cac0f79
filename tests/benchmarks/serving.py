"""Cost of the plug-in for a server without offline work: `conserve serve` and stock vLLM take turns."""

import asyncio
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from conserve.bench.answers import LoadAnswer, tbts_ms, ttfts_ms
from conserve.bench.load import LoadTarget, play
from conserve.bench.measure import percentiles
from conserve.bench.traces import Trace, gamma
from conserve.config import load
from conserve.engine.vllm.model.demo_model import ensure_demo_model
from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks serving"
PAIRS = 5
PORTS = {"stock": 8771, "conserve": 8772}
MODEL = "smollm2-demo"
FLAGS = "--max-model-len 2048 --max-num-batched-tokens 512 --kv-cache-memory-bytes 1073741824 --enforce-eager"
STOCK = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
LATENCY = {"rate": 1.5, "cv": 1.0, "duration_s": 20.0, "input_tokens": 256, "output_tokens": 24}
BATCH = 40  # requests at once, for throughput


class Server:
    """One of the two, stopped in its tracks while the other is measured."""

    def __init__(self, name: str, words: Sequence[str], folder: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{PORTS[name]}"
        self._log = (folder / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            words,
            env={**os.environ, "CONSERVE_HOME": str(folder / "home"), "VLLM_CPU_OMP_THREADS_BIND": "0"},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._wait()

    def _wait(self) -> None:
        while True:
            assert self._process.poll() is None, Path(self._log.name).read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def signal(self, number: int) -> None:
        """To all its processes: each is in the session that started with it, or below it."""
        import psutil

        members = [psutil.Process(self._process.pid)]
        members += members[0].children(recursive=True)
        for member in members:
            member.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()


def measure() -> list[Figure]:
    """Ratios of `conserve serve` to stock vLLM, a pair at a time."""
    path = str(ensure_demo_model(load().models_folder))
    flags = shlex.split(FLAGS)
    port = {name: ("--port", str(number)) for name, number in PORTS.items()}
    named = ("--served-model-name", MODEL, "--host", "127.0.0.1")
    stock = [sys.executable, "-c", STOCK, "--model", path, *named, *flags, *port["stock"]]
    slo = ("--ttft-slo", "1500ms", "--tbt-slo", "400ms", "--no-harvest")
    ours = [sys.executable, "-m", "conserve", "serve", MODEL, *slo, *flags, *port["conserve"]]
    with tempfile.TemporaryDirectory() as folder:
        servers: list[Server] = []
        try:
            for name, words in (("stock", stock), ("conserve", ours)):
                servers.append(Server(name, words, Path(folder)))
                servers[-1].signal(signal.SIGSTOP)
            return figures([pair(servers, number) for number in range(-1, PAIRS)][1:])  # the first warms up
        finally:
            for server in servers:
                server.close()


def pair(servers: Sequence[Server], number: int) -> dict[str, float]:
    """Both servers under the same load, in an order that changes; returns ratios."""
    found = {}
    for server in servers if number % 2 else reversed(servers):
        server.signal(signal.SIGCONT)
        target = LoadTarget(base_url=server.url, model=MODEL)
        calm = asyncio.run(play(gamma(seed=number + 1, **LATENCY), target, seed=2 * number + 10))  # type: ignore[arg-type]
        full = asyncio.run(play(batch(), target, seed=2 * number + 11))
        server.signal(signal.SIGSTOP)
        found[server.name] = (*p99s(calm), tokens_per_s(full))
    stock, ours = found["stock"], found["conserve"]
    return dict(
        zip(("ttft", "tbt", "throughput"), (o / s for o, s in zip(ours, stock, strict=True)), strict=True)
    )


def batch() -> Trace:
    """Requests that come all at once."""
    return gamma(1000.0, 1.0, BATCH / 1000, 256, 24, seed=1)


def p99s(answers: Sequence[LoadAnswer]) -> tuple[float, float]:
    """TTFT and TBT in ms."""
    ttft, tbt = percentiles(ttfts_ms(answers)), percentiles(tbts_ms(answers))
    assert ttft is not None
    assert tbt is not None
    return ttft.p99, tbt.p99


def tokens_per_s(answers: Sequence[LoadAnswer]) -> float:
    """Tokens of prompts and answers per second, from the first request to the last answer."""
    tokens = sum(answer.input_tokens + answer.tokens for answer in answers)
    return tokens / (max(answer.ended_s for answer in answers) - min(answer.due_s for answer in answers))


def figures(pairs: Sequence[dict[str, float]]) -> list[Figure]:
    """The three ratios."""
    targets = {"throughput": (0.99, ">= 0.99"), "ttft": (1.02, "<= 1.02"), "tbt": (1.02, "<= 1.02")}
    found = []
    for name, (limit, target) in targets.items():
        samples = [pair[name] for pair in pairs]
        middle = statistics.median(samples)
        label = "throughput" if name == "throughput" else f"P99 {name.upper()}"
        found.append(
            Figure(
                name=f"serving with an empty queue: {label} to stock",
                unit="ratio",
                samples=samples,
                target=target,
                reached=middle >= limit if name == "throughput" else middle <= limit,
                command=COMMAND,
            )
        )
    return found
