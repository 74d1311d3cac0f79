"""Cost of the bookkeeping beside the real engine: the same rows with and without a store, one engine."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from conserve.config import load
from conserve.endpoints.protocol import Call, Url
from conserve.endpoints.wrapped import BorrowedEndpoint
from conserve.engine.vllm.embedded import EmbeddedEndpoint
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from tests.benchmarks.report import REPOSITORY, Figure
from tests.submitting import submit

T = TypeVar("T")
PAIRS = 3
PARAMS = {"max_tokens": 64, "temperature": 0}
EXAMPLE = REPOSITORY / "examples" / "gsm8k.parquet"
COMMAND = "python -m tests.benchmarks real_engine"


class Metered(Harvester):
    """A harvester that counts the CPU time of its store thread."""

    store_cpu_s = 0.0

    async def _in_store(self, function: Callable[..., T], *arguments: object) -> T:
        def metered(*inner: object) -> T:
            started = time.thread_time()
            try:
                return function(*inner)
            finally:
                self.store_cpu_s += time.thread_time() - started

        return await super()._in_store(metered, *arguments)


def measure() -> list[Figure]:
    """Alternate bare calls and harvests; report the ratio of their times and the store thread's share."""
    return asyncio.run(alternate())


async def alternate() -> list[Figure]:
    questions = pq.read_table(EXAMPLE)["question"].to_pylist()
    endpoint = EmbeddedEndpoint(engine_flags=["--max-model-len", "2048"], cache_dir=load().models_folder)
    await endpoint.start()
    ratios, shares = [], []
    try:
        await bare(endpoint, questions)  # warm-up
        for pair in range(PAIRS):
            runs: dict[str, Any] = {}
            for kind in ("bare", "stored") if pair % 2 == 0 else ("stored", "bare"):
                runs[kind] = await (bare if kind == "bare" else stored)(endpoint, questions)
            wall_s, store_s = runs["stored"]
            ratios.append(wall_s / runs["bare"])
            shares.append(100 * store_s / wall_s)
            print(f"     pair {pair + 1}: bare {runs['bare']:.2f} s, stored {wall_s:.2f} s", flush=True)
    finally:
        await endpoint.close()
    return [
        Figure(
            name="CPU time of all store work, share of a real run",
            unit="%",
            samples=shares,
            target="< 2",
            reached=max(shares) < 2,
            command=COMMAND,
        ),
        Figure(
            name="run with the store / bare calls, one engine",
            unit="ratio",
            samples=ratios,
            target="<= 1.02",
            reached=statistics.median(ratios) <= 1.02,
            command=COMMAND,
        ),
    ]


async def bare(endpoint: EmbeddedEndpoint, questions: list[str]) -> float:
    """Seconds for all questions at once, without any store."""
    started = time.perf_counter()
    await asyncio.gather(
        *(
            endpoint.complete(
                Call(
                    key=f"bare-{started}-{number}",
                    url=Url.CHAT,
                    body={**PARAMS, "messages": [{"role": "user", "content": question}]},
                )
            )
            for number, question in enumerate(questions)
        )
    )
    return time.perf_counter() - started


async def stored(endpoint: EmbeddedEndpoint, questions: list[str]) -> tuple[float, float]:
    """Seconds for the same through a job, and the store thread's CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(load({"home": Path(folder) / "home"}))
        submit(store, str(EXAMPLE), Task(kind=Kind.PROMPT, template="{{ question }}", params=PARAMS))
        harvester = Metered(store, BorrowedEndpoint(endpoint))
        started = time.perf_counter()
        tally = await harvester.run(asyncio.Event())
        assert tally.succeeded == len(questions)
        store.close()
        return time.perf_counter() - started, harvester.store_cpu_s
