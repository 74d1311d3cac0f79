"""Time until offline rows leave an iteration, and the cost of safepoints.

The real engine in this process on the demo model, in eager mode. MODE=pieces compiles it in pieces, as on GPUs
and as `conserve serve --no-enforce-eager` does; MODE=graph as one graph, as vLLM's CPU build does alone. What is
compared takes turns, down to single iterations where they are long.
"""

import contextlib
import gc
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from conserve.config import load
from tests.benchmarks.report import RAW, Figure

MODE = os.environ.get("MODE", "eager")
COMMAND = ("" if MODE == "eager" else f"MODE={MODE} ") + "python -m tests.benchmarks preemption"
SEED = 43
TOKENS = 2048  # of the iteration that is preempted
STEPS = (1, 2, 4, 8)  # layers between two safepoints
RAISES = 16  # for each step; three times as many at one layer
MOST_SHARE, MOST_LAYERS = 5.0, 2.0  # the floors at one layer: percent of the iteration, times of a layer
DECODES, DECODE_ROUNDS, DECODE_BLOCKS, BLOCK = 32, 8, 96, 1  # rows; rounds of groups of blocks of iterations
CHUNK, CHUNKS = 512, 100  # tokens; groups of iterations
MOST_COST, MOST_ALONE = 1.1, 0.5  # percent of an iteration
OFF, CONTROL = 0, -1  # layers between safepoints: there are none; the same, to see what chance does
ARMS = (OFF, 8, CONTROL, 1)  # 8 where there is no TTFT promise to shorten it
RESAMPLES = 2000
RUNNING, PAIRS = 256, 180
COLD = 300  # safepoints of each kind


def measure() -> list[Figure]:
    """All figures; the raw numbers and a drawing of the reactions go beside those of the others."""
    from conserve.engine.vllm.model.demo_model import ensure_demo_model
    from tests.preempted_engine import started

    raw: dict[str, Any] = {"mode": MODE}
    model = ensure_demo_model(load().models_folder)
    flags: dict[str, Any] = {"dtype": "auto", "max_num_batched_tokens": TOKENS, "max_num_seqs": 64}
    flags |= {"block_size": 128, "max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30}
    figures = scheduling(raw)
    if MODE == "graph":
        flags["compilation_config"] = {"mode": 2}
    with started(model, enforce_eager=MODE == "eager", **flags) as engine:
        engine.worker._safepoints._orders = engine.real_orders
        figures = [*reactions(engine, raw), *costs(engine, raw), *figures]
    keep(raw)
    return figures


# How soon control comes back.


def reactions(engine: Any, raw: dict[str, Any]) -> list[Figure]:
    """Times from raising the flag until the scheduler has control again."""
    dice = random.Random(SEED)
    moments = {step: stratified(dice, RAISES * (3 if step == 1 else 1)) for step in STEPS}
    watch = Watch(engine)
    whole_ms = [watch.iteration(dice, step=8) for _ in range(3)][1:]
    found: dict[int, list[float]] = {step: [] for step in STEPS}
    late = 0
    while any(moments.values()):
        whole_ms.append(watch.iteration(dice, step=8))
        for step in dice.sample([1, 1, *STEPS], len(STEPS) + 2):
            if not moments[step]:
                continue
            wait_s = moments[step].pop() * statistics.median(whole_ms) / 1e3
            reaction_ms = watch.reaction(dice, step=step, wait_s=wait_s)
            if reaction_ms is None:  # this iteration was over sooner than others
                late += 1
            else:
                found[step].append(reaction_ms)
    watch.close()
    typical_ms = statistics.median(whole_ms)
    raw["reactions"] = {"whole_ms": whole_ms, "layers": engine.layers, "ms": found, "late": late}
    return [reaction_figure(step, ms, typical_ms, engine.layers) for step, ms in found.items()]


def stratified(dice: random.Random, count: int) -> list[float]:
    """Moments between 0 and 1, in random order and one in each of as many parts."""
    return [(part + dice.random()) / count for part in dice.sample(range(count), count)]


class Watch:
    """Runs iterations of one offline chunk, and notes when the scheduler gets their results."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._number = 0
        self._began_at = self._back_at = 0.0
        self._begun = threading.Event()
        self._plain = engine.scheduler.update_from_output
        self._begin = engine.preemptions.begin
        engine.scheduler.update_from_output = self._update
        engine.preemptions.begin = self._begins

    def close(self) -> None:
        """Put the engine's own functions back."""
        self._engine.scheduler.update_from_output = self._plain
        self._engine.preemptions.begin = self._begin

    def iteration(self, dice: random.Random, *, step: int) -> float:
        """Milliseconds from the stamp until control is back, undisturbed."""
        self._run(dice, step)
        return (self._back_at - self._began_at) * 1e3

    def reaction(self, dice: random.Random, *, step: int, wait_s: float) -> float | None:
        """The same from raising the flag so long after the stamp; None if the iteration was over by then."""
        raised: list[float] = []
        thread = threading.Thread(target=self._raise, args=(wait_s, raised))
        thread.start()
        self._run(dice, step)
        thread.join()
        return (self._back_at - raised[0]) * 1e3 if raised and raised[0] < self._back_at else None

    def _run(self, dice: random.Random, step: int) -> None:
        from tests.preempted_engine import Ask, greedy, prompt

        engine = self._engine
        self._number += 1
        name = f"chunk{self._number}"
        engine.preemptions._every = step
        engine.add(Ask(name, prompt(TOKENS + 64, dice.randrange(1 << 30)), greedy(2)))
        engine.step()
        engine.llm.abort_request([engine.internal(name)], internal=True)

    def _raise(self, wait_s: float, raised: list[float]) -> None:
        from conserve.engine.runtime.safepoint import ALL_ROWS

        preemptions = self._engine.preemptions
        self._begun.wait()
        time.sleep(max(0.0, self._began_at + wait_s - time.monotonic()))
        running = next(iter(preemptions._in_flight), None)
        if running is None:
            return
        raised.append(time.monotonic())
        preemptions._flag.raise_for(running.stamp.iteration, ALL_ROWS)

    def _begins(self, *args: Any, **kw: Any) -> None:
        self._begin(*args, **kw)
        self._began_at = time.monotonic()
        self._begun.set()

    def _update(self, *args: Any) -> Any:
        self._back_at = time.monotonic()
        self._begun.clear()
        return self._plain(*args)


def reaction_figure(step: int, ms: Sequence[float], whole_ms: float, layers: int) -> Figure:
    shares = [one / whole_ms * 100 for one in ms]
    worst = float(np.percentile(shares, 99))
    in_layers = worst * layers / 100
    return Figure(
        name=f"reaction of {TOKENS} tokens, safepoint every {step}",
        unit="%",
        samples=shares,
        target=f"P99 <= {MOST_SHARE:g}, {MOST_LAYERS:g} layers" if step == 1 else "none",
        reached=step > 1 or (worst <= MOST_SHARE and in_layers <= MOST_LAYERS),
        command=COMMAND,
        note=f"of {whole_ms:,.0f} ms; P99 {worst:.1f} %, {in_layers:.2f} layers of {layers}",
    )


# Cost of safepoints where no row leaves.


def costs(engine: Any, raw: dict[str, Any]) -> list[Figure]:
    """Iterations with safepoints beside iterations without; the safepoints alone too, where rows can leave."""
    measured = {
        f"{DECODES} decode steps": decode_triples(engine),
        f"{CHUNK} prompt tokens": chunk_triples(engine),
    }
    raw["decode_ms"], raw["chunk_ms"] = measured.values()
    figures = [
        cost_figure(f"{name}, safepoint every {step}", step, triples)
        for name, triples in measured.items()
        for step in ARMS[1:]
    ]  # one is of the control
    figures += cold_figures(engine, raw)
    alone = {"eager": between_layers_alone, "pieces": segments_alone}.get(MODE)
    return figures + (alone(engine, measured, raw) if alone is not None else [])


def cold_figures(engine: Any, raw: dict[str, Any]) -> list[Figure]:
    """A safepoint behind 64 MiB of other memory: between layers the caches hold weights, not its code."""
    from conserve.engine.vllm.iteration import Stamp

    safepoints, clock = engine.worker._safepoints, time.perf_counter_ns
    safepoints.arm(Stamp(iteration=1 << 40, flag=engine.preemptions._flag.name, rows=[], every=1))
    words, slot, known = safepoints.order() or safepoints._orders.word(safepoints.stamp)
    weights = np.ones(1 << 24, np.float32)

    def asked() -> int:
        return safepoints._orders.rows_ordered(safepoints.stamp) or clock()

    def checked() -> int:
        return safepoints.check(0) or clock()

    def looked() -> int:
        return clock() if words[slot] <= known else 0

    kinds = {"nothing": clock, "asking": asked, "check": checked, "look in place": looked}
    us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(COLD):
        for kind, passed in kinds.items():
            weights.sum()
            begun = clock()
            us[kind].append((passed() - begun) / 1e3)
    safepoints.disarm()
    raw["cold_us"] = us
    bare = statistics.median(us.pop("nothing"))
    return [
        figure(
            f"a safepoint in cold caches: {kind}",
            "us",
            [one - bare for one in found],
            None,
            "clock taken off",
        )
        for kind, found in us.items()
    ]


def segments_alone(
    engine: Any, measured: Mapping[str, Sequence["Triple"]], raw: dict[str, Any]
) -> list[Figure]:
    """Compare a pass in segments with vLLM's own function, with pieces that compute nothing."""
    added = raw["segments_us"] = segments_us(engine)
    figures = []
    for name, triples in measured.items():
        plain_ms = unarmed_ms(triples)
        for step, samples in added.items():
            shares = [us / plain_ms / 10 for us in samples]
            note = f"{statistics.median(samples):.0f} us of {plain_ms:.1f} ms"
            what = f"segments alone, {name}, safepoint every {step}"
            figures.append(figure(what, "%", shares, MOST_ALONE, note))
    return figures


def segments_us(engine: Any) -> dict[int, list[float]]:
    """Time that a pass takes longer in segments, in us, by layers between safepoints: a sample is 100 passes."""
    from conserve.engine.vllm.iteration import Stamp

    safepoints, rows = engine.worker._safepoints, engine.worker._rows
    output = SimpleNamespace(total_num_scheduled_tokens=DECODES, num_scheduled_tokens={})
    us: dict[int, list[float]] = {step: [] for step in ARMS if step > OFF}
    with segments_that_compute_nothing(rows, engine.worker._runner) as (args, whole):

        def passes(run: Callable[[], Any]) -> float:
            begun = time.perf_counter()
            for _ in range(100):
                run()
            return (time.perf_counter() - begun) * 1e4

        for _ in range(40):
            bare = passes(lambda: whole(*args))
            for step, samples in us.items():
                rows.begin(output, watched=True)
                safepoints.arm(
                    Stamp(iteration=1 << 40, flag=engine.preemptions._flag.name, rows=[], every=step)
                )
                samples.append(passes(lambda: rows.forward(args)) - bare)
                safepoints.disarm()
                rows.end({})
    return us


@contextlib.contextmanager
def segments_that_compute_nothing(rows: Any, runner: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Meanwhile each piece returns what it returned once; yields a pass's arguments, and vLLM's own function."""
    from conserve.engine.vllm.preemption.segments import ATTENTION, FUNCTION, PIECES

    names, computing = rows._segments.globals, dict(rows._segments.globals)
    seen: list[tuple[Any, ...]] = []
    forward = rows.forward

    def remembered(call: Any) -> Any:
        returned: list[Any] = []

        def piece(*args: Any) -> Any:
            if not returned:
                returned.append(call(*args))
            return returned[0]

        return piece

    def noting(args: tuple[Any, ...]) -> Any:
        seen.append(args)
        return forward(args)

    names[PIECES] = [remembered(piece) for piece in computing[PIECES]]
    names.update({name: remembered(names[name]) for name in computing if name.startswith(ATTENTION)})
    rows.forward, rows.busy = noting, True
    try:
        runner.run_dummy(DECODES)
        del rows.forward
        rows.busy = False
        pieces = names[PIECES]
        yield seen[-1], lambda *args: names[FUNCTION](*args, **{PIECES: pieces})
    finally:
        rows.__dict__.pop("forward", None)
        names.update(computing)


def between_layers_alone(
    engine: Any, measured: Mapping[str, Sequence["Triple"]], raw: dict[str, Any]
) -> list[Figure]:
    """Calls of safepoints between layers, and their share of the measured iterations."""
    calls = raw["call_us"] = call_us(engine)
    figures = []
    for name, triples in measured.items():
        plain_ms = unarmed_ms(triples)
        added = [us * engine.layers / plain_ms / 10 for us in calls["armed"]]
        figures.append(
            figure(f"safepoints at each layer alone, {name}", "%", added, MOST_COST, f"of {plain_ms:.1f} ms")
        )
    figures.append(figure("a safepoint, armed", "us", calls["armed"], None, "beyond the bare call"))
    figures.append(figure("a safepoint, disarmed", "us", calls["disarmed"], None, "the same"))
    return figures


Triple = Mapping[int, Sequence[float]]  # an arm's iterations, in ms


def unarmed_ms(triples: Sequence[Triple]) -> float:
    """Median of the iterations without safepoints."""
    return statistics.median(ms for triple in triples for ms in triple[OFF])


def decode_triples(engine: Any) -> list[Triple]:
    """Blocks of iterations in which so many offline rows decode."""
    from tests.preempted_engine import Ask, greedy, prompt

    triples: list[Triple] = []
    for number in range(DECODE_ROUNDS):
        names = [f"decode{number}-{row}" for row in range(DECODES)]
        most = 64 + DECODE_BLOCKS * BLOCK * len(ARMS)
        engine.add(*(Ask(name, prompt(60, number * 100 + n), greedy(most)) for n, name in enumerate(names)))
        for _ in range(6):
            engine.step()
        assert len(engine.scheduler.running) == DECODES
        triples += [
            {arm: [timed(engine, arm) for _ in range(BLOCK)] for arm in turned(block)}
            for block in range(DECODE_BLOCKS)
        ]
        engine.llm.abort_request([engine.internal(name) for name in names], internal=True)
    return triples


def chunk_triples(engine: Any) -> list[Triple]:
    """Single iterations of one offline prompt."""
    from tests.preempted_engine import Ask, greedy, prompt

    def one(arm: int, seed: int) -> float:
        engine.add(Ask(f"prompt{seed}", prompt(CHUNK, seed), greedy(1)))
        return timed(engine, arm)

    return [
        {arm: [one(arm, 1_000_000 + 10 * number + arm)] for arm in turned(number)} for number in range(CHUNKS)
    ]


def turned(number: int) -> Sequence[int]:
    """The arms in random order, so that none always follows the same other one."""
    return random.Random(SEED + number).sample(ARMS, len(ARMS))


def timed(engine: Any, arm: int) -> float:
    """An iteration in ms, with a safepoint every so many layers."""
    engine.preemptions.follow("prompt" if arm > OFF else "off")
    engine.preemptions._every = arm if arm > OFF else None
    begun = time.perf_counter()
    engine.step()
    took_ms = (time.perf_counter() - begun) * 1e3
    engine.preemptions.follow("prompt")
    return took_ms


def cost_figure(name: str, step: int, triples: Sequence[Triple]) -> Figure:
    """The median over triples of armed to unarmed, each the median of its block."""
    ratios = np.array([statistics.median(t[step]) / statistics.median(t[OFF]) - 1 for t in triples]) * 100
    dice = np.random.default_rng(SEED)
    medians = np.median(dice.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return figure(
        f"an iteration takes longer: {name}" if step > OFF else f"chance alone: {name.partition(',')[0]}",
        "%",
        ratios.tolist(),
        MOST_COST if step > OFF else None,
        f"95 % interval of the median {low:+.2f} to {high:+.2f}",
    )


def call_us(engine: Any) -> dict[str, list[float]]:
    """Time that a layer's call takes longer for its safepoint, in us: one sample is many passes."""
    import torch

    from conserve.engine.vllm.iteration import Stamp
    from conserve.engine.vllm.preemption.safepoints import between_layers

    safepoints, rows = engine.worker._safepoints, engine.worker._rows
    layers, guarded = ([Layer() for _ in range(engine.layers)] for _ in range(2))
    between_layers(guarded, safepoints, rows)  # type: ignore[arg-type]
    hidden, positions = torch.zeros(DECODES, 576), torch.zeros(DECODES, dtype=torch.int64)
    output = SimpleNamespace(total_num_scheduled_tokens=DECODES, num_scheduled_tokens={})
    stamp = Stamp(iteration=1 << 40, flag=engine.preemptions._flag.name, rows=[], every=1)

    def passes(through: Sequence[Layer]) -> float:
        begun = time.perf_counter()
        for _ in range(100):
            for layer in through:
                layer.forward(positions, hidden, hidden)
        return (time.perf_counter() - begun) * 1e6 / 100 / len(through)

    us: dict[str, list[float]] = {"armed": [], "disarmed": []}
    for _ in range(40):
        bare = passes(layers)
        us["disarmed"].append(passes(guarded) - bare)
        if rows is not None:
            rows.begin(output, watched=True)
        safepoints.arm(stamp)
        us["armed"].append(passes(guarded) - bare)
        safepoints.disarm()
        if rows is not None:
            rows.end(())
    return us


class Layer:
    """Does nothing, as a decoder layer would."""

    def forward(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        return hidden, residual


# What it costs the scheduler.


def scheduling(raw: dict[str, Any]) -> list[Figure]:
    """Stamps, and blocks that become reusable when they are computed: one scheduler, with and without."""
    from conserve.engine.vllm.iteration import IterationOutcome, put
    from conserve.engine.vllm.settings import WORKER
    from tests.bare_scheduler import BareEngine, engine_config
    from tests.benchmarks.scheduling import ANSWER, PROMPT
    from tests.benchmarks.scheduling import timed as scheduled

    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"max_num_seqs": RUNNING, "max_num_batched_tokens": 8192}
        section = {"policy": "conserve", "tbt_slo_ms": 1e6}
        made = BareEngine(engine_config(Path(folder), section=section, worker_cls=WORKER, **sizes))
    result = made.result

    def with_outcome(output: Any) -> Any:
        brought = result(output)
        put(brought, IterationOutcome(layers=30, safepoints=30, separable=True))
        return brought

    made.result = with_outcome  # type: ignore[method-assign]
    for _ in range(RUNNING):
        made.add(PROMPT, ANSWER, offline=True)
    for _ in range(20):
        made.step()
    preemptions = made.scheduler.arrival_monitor
    assert preemptions.enabled
    gc.collect()
    gc.disable()
    added_us = []
    for pair in range(PAIRS):
        ms = {}
        for policy in ("off", "prompt") if pair % 2 else ("prompt", "off"):
            preemptions.follow(policy)
            ms[policy] = scheduled(made)
        added_us.append((ms["prompt"] - ms["off"]) * 1e3)
    gc.enable()
    assert len(made.scheduler.running) == RUNNING
    made.scheduler.shutdown()
    raw["scheduling_us"] = added_us
    medians = [statistics.median(added_us[number::5]) for number in range(5)]
    return [
        figure(f"scheduling adds, {RUNNING} offline rows running", "us", medians, None, "to an iteration")
    ]


# Reports.


def figure(name: str, unit: str, samples: Sequence[float], most: float | None, note: str) -> Figure:
    return Figure(
        name=name,
        unit=unit,
        samples=samples,
        target="none" if most is None else f"<= {most:g}",
        reached=most is None or statistics.median(samples) <= most,
        command=COMMAND,
        note=note,
    )


def keep(raw: Mapping[str, Any]) -> None:
    """Keep the raw numbers."""
    RAW.mkdir(exist_ok=True)
    name = f"preemption-{time.strftime('%Y%m%dT%H%M%S')}"
    (RAW / f"{name}.json").write_text(json.dumps(raw))
    print(f"     raw numbers: {name}.json in .bench/", flush=True)
