"""Iterations scheduled ahead beside live requests or not, on simulated time, by an accelerator's measured speed.

The real scheduler with our policy, on a simulated host and device (`simulated_accelerator`). The model is
Llama-3.1-8B's shape on an H200 as a server was measured there (docs/gpu): 4.8 ms a decode step, 99 ms a prompt of
4,096 tokens, and 2.4 ms of the host's work an iteration where none are scheduled ahead. The scheduler learns a
latency model in its warm-up, as `conserve serve` does.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from conserve.bench.traces import gamma
from conserve.profiles.conserve import ConServeModel
from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks accelerator"
H200_LLAMA_8B = ConServeModel.of(0.0137, 2.3e-6, 5.4e-7, 3.2e-5, 0.0103, 0.33, 0.0, 4.65)
HOST_S = 1.2e-3  # before an iteration, and behind it
LAUNCHES = (512, 18e-3, 0.75, 6.5)  # as measured; see `LaunchTimes`
LAYERS, KV_BLOCKS, BLOCK = 32, 57_600, 16
FLAGS = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "block_size": BLOCK, "max_model_len": 8192}
PROMPT, ANSWER, CV = 4096, 256, 0.5
ROW_PROMPT, ROW_ANSWER = (1200, 3900), (64, 128)  # shortest and longest
WINDOW = 600  # rows in the engine
RATES = (0.7, 2.0)
WARM_S, BLOCK_S, SEED = 5.0, float(os.environ.get("BLOCK_S", "60")), int(os.environ.get("SEED", "0"))
SCATTER = 0.03
ALONE, OURS = "online-only", "conserve"

Promise = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Latencies of live requests in ms, and tokens of rows."""

    ttft_ms: np.ndarray[Any, Any]
    tbt_ms: np.ndarray[Any, Any]
    rows_per_s: float  # tokens

    def quantiles(self) -> dict[str, float]:
        """P50 and P99 of both."""
        each = {"TTFT": self.ttft_ms, "TBT": self.tbt_ms}
        return {f"P{p} {name}": float(np.percentile(ms, p)) for name, ms in each.items() for p in (50, 99)}


def measure() -> list[Figure]:
    """Compare both ways under three promises at two rates."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return [figure for rate in RATES for figure in at(rate)]


def at(rate: float) -> Iterator[Figure]:
    """Figures at so many requests per second."""
    alone = play(ALONE, rate, {})
    found = alone.quantiles()
    yield from figures(f"{rate:g}/s, online-only", alone, alone)
    ttft_ms, tbt_ms = found["P99 TTFT"], found["P99 TBT"]
    promises: dict[str, Promise] = {
        "online-only's P99s": {"ttft_slo_ms": ttft_ms, "tbt_slo_ms": tbt_ms},
        "1.25 times": {"ttft_slo_ms": 1.25 * ttft_ms, "tbt_slo_ms": 1.25 * tbt_ms},
        "2 times": {"ttft_slo_ms": 2 * ttft_ms, "tbt_slo_ms": 2 * tbt_ms},
        "harm 10 %": {"harm": 0.1},
    }
    for promised, promise in promises.items():
        for ahead in (True, False):
            way = "ahead" if ahead else "not ahead"
            yield from figures(
                f"{rate:g}/s, {promised}, {way}", play(OURS, rate, promise, ahead=ahead), alone
            )


def figures(name: str, seen: Point, alone: Point) -> Iterator[Figure]:
    """Each latency to online-only's, and the tokens of rows."""
    theirs = alone.quantiles()
    for latency, ms in seen.quantiles().items():
        yield figure(f"{name}: {latency}", "", ms / theirs[latency], note=f"{ms:.1f} ms")
    yield figure(f"{name}: rows", "tokens/s", seen.rows_per_s)


def figure(name: str, unit: str, value: float, note: str = "") -> Figure:
    """One figure without a target."""
    return Figure(
        name=name, unit=unit, samples=[value], target="none", reached=True, command=COMMAND, note=note
    )


def play(policy: str, rate: float, promise: Promise, *, ahead: bool = True) -> Point:
    """One block under a policy, after some seconds of rows alone. Online-only is scheduled ahead, as vLLM does."""
    from conserve.engine.section import AUTO, EngineSection
    from conserve.engine.vllm.preemption import arrivals as arriving
    from conserve.engine.vllm.settings import WORKER
    from conserve.engine.vllm.simulation.bare import Clock, bare_config
    from tests.benchmarks.simulated_accelerator import LaunchTimes, SimulatedAccelerator

    dice = np.random.default_rng(SEED)
    rows = (
        (int(dice.integers(*ROW_PROMPT, endpoint=True)), int(dice.integers(*ROW_ANSWER, endpoint=True)))
        for _ in iter(int, 1)
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, clock.installed():
        said = {"policy": policy, "profile": AUTO, "harm": None, "receipt": 0.0, **promise}
        config = bare_config(Path(folder), section=EngineSection.of(said), **FLAGS)
        config.parallel_config.worker_cls = WORKER
        config.scheduler_config.async_scheduling = ahead
        # vLLM's V2 runner, under which iterations may be scheduled ahead, is none of a machine without Triton.
        with patch.object(arriving, "why_not", lambda _: None):
            engine = SimulatedAccelerator(
                config, clock=clock, model=H200_LLAMA_8B, layers=LAYERS, num_blocks=KV_BLOCKS,
                offline=rows if policy == OURS else iter(()), window=WINDOW, scatter=SCATTER, seed=SEED,
                host_s=HOST_S, launches=LaunchTimes(*LAUNCHES),
            )  # fmt: skip
        try:
            engine.warm_up()
            engine.go_on_until(clock.now + WARM_S)
            answers = engine.play(gamma(rate, CV, BLOCK_S, PROMPT, ANSWER, SEED), BLOCK_S)
        finally:
            engine.scheduler.shutdown()
    return Point(
        ttft_ms=np.array([answer.ttft_ms for answer in answers]),
        tbt_ms=np.concatenate([answer.tbts_ms for answer in answers]),
        rows_per_s=engine.counted / BLOCK_S,
    )
