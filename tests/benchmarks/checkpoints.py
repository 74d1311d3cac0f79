"""Cost of an eviction for a row that has a checkpoint, and cost of the checkpoint.

The real engine in this process, in eager mode, on the demo model. What is compared takes turns.
"""

import ctypes
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from conserve.bench.presets import CPU
from conserve.config import load
from tests.benchmarks.report import RAW, Figure

COMMAND = "python -m tests.benchmarks checkpoints"
SEED = 47
CONTEXTS = (1000, 3000, 6000)  # tokens of the row that loses its memory
ROUNDS = {1000: 6, 3000: 4, 6000: 3}
BESIDE = 4  # rows that decode meanwhile
MOST_SHARE, MOST_SLOWER, MOST_PREEMPTION_MS = 20.0, 2.0, 1.0  # the floors: percent, percent, ms
RESTORES, PLAIN = 40, 8  # restores, and iterations before each
ROWS, PROMPT, ANSWER = 8, 700, 40  # of a batch whose throughput is measured
BATCHES = 8  # with each policy
ARMS = ("off", "eager", "adaptive")
MOST_COST = {"eager": 2.0, "adaptive": 0.2}  # percent of throughput
RESAMPLES = 2000
HOST_BYTES = 1 << 30
PASSES = 5
SAVING = 2  # iterations after which the last of what a row has lost is saved


def measure() -> list[Figure]:
    """All figures; the raw numbers go beside those of the others."""
    from conserve.engine.vllm.model.demo_model import ensure_demo_model
    from tests.integration.test_checkpoints import transfer
    from tests.preempted_engine import started

    raw: dict[str, Any] = {}
    flags = {"dtype": "auto", "max_num_batched_tokens": 512, "max_num_seqs": 32, "block_size": 64}
    memory = {"max_model_len": 8192, "kv_cache_memory_bytes": 1 << 30}
    config = transfer({"policy": "eager", "host_bytes": HOST_BYTES})
    os.environ.update(CPU.environment)  # one core computes
    with started(
        ensure_demo_model(load().models_folder), kv_transfer_config=config, **flags, **memory
    ) as engine:
        figures = [*resumes(engine, raw), *slowdown(engine, raw), *costs(engine, raw), *bandwidth(raw)]
    RAW.mkdir(exist_ok=True)
    (RAW / "checkpoints.json").write_text(json.dumps(raw))
    return figures


class Victim:
    """A row that loses its memory again and again, beside others that decode."""

    def __init__(self, engine: Any, context: int, seed: int) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        self.engine, self.name = engine, f"row{context}-{seed}"
        self._others = [f"beside{context}-{seed}-{n}" for n in range(BESIDE)]
        engine.add(Ask(self.name, prompt(context, seed), greedy(1000)))
        engine.add(*(Ask(name, prompt(60, seed + n), greedy(4000)) for n, name in enumerate(self._others, 1)))
        self.request = engine.scheduler.requests[engine.internal(self.name)]
        self.run(4)
        while self.checkpoints.saved.tokens(self.request.request_id) < context // 64 * 64:
            engine.step()

    @property
    def checkpoints(self) -> Any:
        return self.engine.scheduler.checkpoints

    def run(self, tokens: int) -> None:
        """Run until the row has so many more tokens."""
        wanted = self.request.num_output_tokens + tokens
        while self.request.num_output_tokens < wanted:
            self.engine.step()

    def resume_s(self, *, restoring: bool) -> float:
        """Time from the moment at which the row may come back to its next token, in s; its KV is saved by then."""
        self.checkpoints.on = True  # what is unsaved is saved in both cases
        self.engine.take_memory(self.name)
        self.stay_away()
        assert not self.checkpoints.is_being_saved(self.request.request_id)
        self.checkpoints.on = restoring
        self.engine.scheduler.restores_pause = 0
        begun = time.perf_counter()
        self.run(1)
        took = time.perf_counter() - begun
        self.checkpoints.on = True
        self.run(3)
        return took

    def stay_away(self) -> None:
        """Keep the row out for some iterations, in which the last of its KV is saved."""
        self.engine.scheduler.restores_pause = 1 << 30
        for _ in range(SAVING):
            self.engine.step()

    def end(self) -> None:
        """Take it and the others out."""
        engine = self.engine
        engine.llm.abort_request(
            [engine.internal(name) for name in (self.name, *self._others)], internal=True
        )
        engine.drain()
        engine.forget()


def resumes(engine: Any, raw: dict[str, Any]) -> list[Figure]:
    """Restoring beside recomputing, and the preemption itself."""
    figures, preempting_ms = [], []
    preempt = engine.scheduler._preempt_request

    def preempting(*args: Any, **rest: Any) -> None:
        begun = time.perf_counter()
        preempt(*args, **rest)
        preempting_ms.append((time.perf_counter() - begun) * 1e3)

    engine.scheduler._preempt_request = preempting
    raw["resume_s"] = {}
    for context in CONTEXTS:
        victim = Victim(engine, context, SEED)
        preempting_ms.clear()
        victim.resume_s(restoring=True)
        pairs = [
            (victim.resume_s(restoring=True), victim.resume_s(restoring=False))
            for _ in range(ROUNDS[context])
        ]
        victim.end()
        raw["resume_s"][context] = pairs
        recomputed = statistics.median(slow for _, slow in pairs)
        restored = statistics.median(quick for quick, _ in pairs)
        shares = [quick / slow * 100 for quick, slow in pairs]
        figures.append(
            figure(
                f"resume at {context:,} tokens: restored / recomputed",
                "%",
                shares,
                MOST_SHARE,
                f"{restored * 1e3:,.0f} ms of {recomputed * 1e3:,.0f} ms",
            )
        )
    engine.scheduler._preempt_request = preempt
    raw["preempting_ms"] = list(preempting_ms)
    figures.append(figure("preempting 6,000 tokens", "ms", preempting_ms, MOST_PREEMPTION_MS, ""))
    return figures


class Timed(NamedTuple):
    """An iteration of the rows beside one that is away or coming back."""

    step: int
    ms: float


def slowdown(engine: Any, raw: dict[str, Any]) -> list[Figure]:
    """Iterations of others while a row comes back, beside those before and after, in which it stays away.

    All become longer with their rows' contexts, so that those without a restore are a line and not a mean.
    """
    victim = Victim(engine, 3000, SEED + 1)
    scheduler, restores = engine.scheduler, victim.checkpoints._restores
    away: list[list[Timed]] = []
    meanwhile: list[list[Timed]] = []
    for _ in range(RESTORES):
        away.append(without(engine, victim))
        scheduler.restores_pause = 0
        meanwhile.append([timed(engine)])
        while restores:
            meanwhile[-1].append(timed(engine))
        victim.run(3)
    away.append(without(engine, victim))
    scheduler.restores_pause = 0
    victim.end()
    around = [before + after for before, after in pairwise(away)]
    ratios = [slower_percent(*each) for each in zip(meanwhile, around, strict=True)]
    raw["slowdown_percent"] = ratios
    raw["restoring_iterations"] = [len(each) for each in meanwhile]
    return [resampled("iterations beside a restore take longer", ratios, MOST_SLOWER)]


def without(engine: Any, victim: Victim) -> list[Timed]:
    """Iterations while the row, which has just lost its memory, is not brought back."""
    engine.take_memory(victim.name)
    victim.stay_away()
    return [timed(engine) for _ in range(PLAIN)]


def slower_percent(beside: Sequence[Timed], others: Sequence[Timed]) -> float:
    """Share by which these take longer than the line through the others says, in percent."""
    line = np.polynomial.Polynomial.fit(*np.array(others).T, deg=1)
    expected = [float(line(each.step)) for each in beside]
    return (sum(each.ms for each in beside) / sum(expected) - 1) * 100


def timed(engine: Any) -> Timed:
    begun = time.perf_counter()
    engine.step()
    return Timed(engine.steps, (time.perf_counter() - begun) * 1e3)


def costs(engine: Any, raw: dict[str, Any]) -> list[Figure]:
    """Throughput with checkpoints that no row needs, and the time that the scheduler spends on them."""
    checkpoints = engine.scheduler.checkpoints
    ask, spent = checkpoints.transfers, [0.0]

    def measured() -> Any:
        begun = time.perf_counter()
        try:
            return ask()
        finally:
            spent[0] += time.perf_counter() - begun

    checkpoints.transfers = measured
    took: dict[str, list[float]] = {arm: [] for arm in ARMS}
    own: dict[str, list[float]] = {arm: [] for arm in ARMS}
    batch_s(engine, "off", -1)
    for number in range(BATCHES):
        for place in range(len(ARMS)):
            arm = ARMS[(number + place) % len(ARMS)]
            spent[0] = 0.0
            took[arm].append(batch_s(engine, arm, number))
            own[arm].append(spent[0] / took[arm][-1] * 100)
    checkpoints.transfers = ask
    raw["batch_s"], raw["transfers_percent"] = took, own
    figures = []
    for arm in ARMS[1:]:
        ratios = [(one / other - 1) * 100 for one, other in zip(took[arm], took["off"], strict=True)]
        figures.append(resampled(f"a batch takes longer with {arm}", ratios, MOST_COST[arm]))
        figures.append(figure(f"the scheduler's part of it, {arm}", "%", own[arm], MOST_COST[arm], ""))
    return figures


def batch_s(engine: Any, arm: str, seed: int) -> float:
    """Time of some rows from beginning to end, in s."""
    from conserve.engine.policy.own_checkpoints import policy_named
    from tests.preempted_engine import Ask, greedy, prompt

    checkpoints = engine.scheduler.checkpoints
    checkpoints.on = arm != "off"
    if checkpoints.on:
        checkpoints.policy = policy_named(arm)
    asked = [Ask(f"batch{seed}-{n}", prompt(PROMPT, seed * 100 + n), greedy(ANSWER)) for n in range(ROWS)]
    engine.add(*asked)
    begun = time.perf_counter()
    engine.drain()
    took = time.perf_counter() - begun
    engine.forget()
    checkpoints.on = True
    return took


def bandwidth(raw: dict[str, Any]) -> list[Figure]:
    """Scattered blocks by the copy thread beside one plain memmove of as many bytes."""
    from tests.integration.test_checkpoints import copy_thread

    thread = copy_thread()
    dice = random.Random(SEED)
    blocks = 94  # 6,000 tokens
    size = blocks * int(thread._device[:, 1].sum())
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    shares: dict[bool, list[float]] = {True: [], False: []}
    speeds = []
    for number in range(PASSES + 1):
        begun = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, size)
        plain_s = time.perf_counter() - begun
        for is_store in (True, False):
            first = dice.randrange(20)
            here = dice.sample(range(first, first + 400), blocks)  # as they lie after many rows came and went
            begun = time.perf_counter()
            thread.copy(here, list(range(blocks)), is_store=is_store).synchronize()
            if number:
                shares[is_store].append(plain_s / (time.perf_counter() - begun) * 100)
                speeds.append(size / plain_s / 1e9)
    raw["bandwidth"] = {"to host": shares[True], "to device": shares[False], "plain GB/s": speeds}
    note = f"{size / 1e6:.0f} MB; plain memmove {statistics.median(speeds):.1f} GB/s"
    return [
        figure("copy speed to host / plain memmove", "%", shares[True], None, note),
        figure("copy speed to device / plain memmove", "%", shares[False], None, note),
    ]


def resampled(name: str, percents: Sequence[float], most: float) -> Figure:
    """Median with its 95 % interval."""
    dice = np.random.default_rng(SEED)
    medians = np.median(dice.choice(np.array(percents), (RESAMPLES, len(percents))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return figure(name, "%", percents, most, f"95 % interval of the median {low:+.2f} to {high:+.2f}")


def figure(name: str, unit: str, samples: Sequence[float], most: float | None, note: str) -> Figure:
    return Figure(
        name=name,
        unit=unit,
        samples=list(samples),
        target="none" if most is None else f"<= {most:g}",
        reached=most is None or statistics.median(samples) <= most,
        command=COMMAND,
        note=note,
    )
