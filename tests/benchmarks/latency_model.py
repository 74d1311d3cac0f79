"""Errors of latency models on batches that they were not fitted to, and the cost of the models.

A profile is measured as `conserve profile` does. After each of its measurements a batch of another kind is
run, composed as a scheduler would from the lengths of the Azure conversation trace (online) and of arXiv
summarisation (offline): so the machine's drift, several percent in ten minutes, hits both alike. Each such
batch is run five times, far apart, and predictions are compared with the medians; the scatter of equal
batches is reported beside them, and the errors of an engine that corrects itself.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from conserve.config import load
from conserve.engine.profiling import conclude
from conserve.engine.profiling import measure as measure_points
from conserve.engine.vllm.profiling.rig import EngineRig
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.correction import CorrectedModel
from conserve.profiles.fit import Errors, Samples, errors, fit
from conserve.profiles.points import IterationLimits, plan, write_slices
from conserve.profiles.profile import MODELS, Profile
from conserve.profiles.record import Header, Record
from tests.benchmarks.report import RAW, Figure

COMMAND = "python -m tests.benchmarks latency_model"
DATA = Path(__file__).parent / "data"
SEED = 20231116
BATCHES = 80
ROUNDS = 5
PROFILE_S = 150.0
Lengths = list[tuple[int, int]]


def lengths(name: str) -> Lengths:
    """Input and output tokens of each request."""
    table = pq.read_table(DATA / name, columns=["input_tokens", "output_tokens"])
    return list(zip(table[0].to_pylist(), table[1].to_pylist(), strict=True))


def compose(
    dice: random.Random, online: Lengths, offline: Lengths, limits: IterationLimits
) -> tuple[Slice, ...]:
    """An iteration of a co-serving engine: decode steps of both kinds, prefills, offline chunks to fill."""
    longest = limits.context - 32
    while True:
        budget = dice.choice((256, 512, 1024, limits.tokens))
        slices = []
        for requests, most in ((online, 16), (offline, 48)):
            for _ in range(dice.randint(0, most)):
                given, generated = dice.choice(requests)
                slices.append(Slice(1, min(longest, given + dice.randint(0, generated)), True))
        left = budget - len(slices)
        while left > 0 and dice.random() < 0.35:
            tokens = min(left, dice.choice(online)[0], longest)
            slices.append(Slice(tokens, 0))
            left -= tokens
        for _ in range(2):
            if left > 0 and dice.random() < 0.8:
                given = min(dice.choice(offline)[0], longest)
                context = dice.choice((0, dice.randrange(given) // limits.block_tokens * limits.block_tokens))
                tokens = min(left, given - context)
                slices.append(Slice(tokens, context))
                left -= tokens
        if limits.hold(slices):
            return tuple(slices)


class Alternating:
    """A rig that runs one test batch after each measurement of a session, off the session's clock."""

    def __init__(self, rig: EngineRig, batches: Sequence[Sequence[Slice]], dice: random.Random) -> None:
        self.rig, self.name, self.key, self.limits = rig, rig.name, rig.key, rig.limits
        self.runs: list[tuple[int, float]] = []  # a batch's number and its time in ms, in order
        self._batches = batches
        self._left = [number for _ in range(ROUNDS) for number in dice.sample(range(BATCHES), BATCHES)]
        self._away_s = 0.0
        self.empty_iteration_ms = rig.empty_iteration_ms
        self.kv_copies = rig.kv_copies
        self.safepoint = rig.safepoint

    def measure(self, slices: Sequence[Slice], repeats: int) -> list[float]:
        times = self.rig.measure(slices, repeats)
        begun = time.perf_counter()
        self.run_next()
        self._away_s += time.perf_counter() - begun
        return times

    def run_next(self) -> bool:
        """Run a test batch, if any is left."""
        if not self._left:
            return False
        number = self._left.pop(0)
        self.runs.append((number, self.rig.measure(self._batches[number], 1)[0]))
        return True

    def clock(self) -> float:
        """Seconds, without those of the test batches."""
        return time.perf_counter() - self._away_s


def measure() -> list[Figure]:
    """All figures of the latency models."""
    dice = random.Random(SEED)
    online, offline = lengths("azure_conv_2023_1h.parquet"), lengths("arxiv_summarization_lengths.parquet")
    rig = EngineRig.start("smollm2-demo", engine_flags=[], cache_dir=load().models_folder)
    try:
        batches = [compose(dice, online, offline, rig.limits) for _ in range(BATCHES)]
        both = Alternating(rig, batches, dice)
        record = Record.open(None, Header(rig.key.digest, ""))
        measure_points(both, plan(rig.limits, seed=SEED), record, budget_s=PROFILE_S, clock=both.clock)
        while both.run_next():
            pass
        profile = conclude(rig, record)
    finally:
        rig.close()
    keep(profile, batches, both.runs)
    return [*accuracy(profile, batches, both.runs), *costs()]


def accuracy(
    profile: Profile, batches: Sequence[Sequence[Slice]], runs: Sequence[tuple[int, float]]
) -> list[Figure]:
    """Errors against the medians, overruns of single runs, and the same with on-line correction."""
    times: dict[int, list[float]] = {}
    for number, ms in runs:
        times.setdefault(number, []).append(ms)
    medians = [statistics.median(times[number]) for number in range(len(batches))]
    test = Samples.of([Batch.of(batch) for batch in batches], medians)
    scatter = [abs(ms / medians[number] - 1) * 100 for number, ms in runs]
    found = {
        name: errors(test.predictions(profile.model(name)), test.ms, margin=1.0, overrun_share=0.0)
        for name in MODELS
    }
    best = min(found.values(), key=lambda e: e.mape)
    figures = [
        figure(
            "scatter of one batch around its median",
            float(np.mean(scatter)),
            "none",
            True,
            "mean of all runs",
        ),
        error_figure("MAPE, ConServe's model", found["conserve"], 4.0),
        error_figure("MAPE, the better model", best, 2.0),
        error_figure("MAPE, the paper's five coefficients", found["conserve-paper"], None),
        error_figure("MAPE, HyGen's model", found["hygen"], None),
    ]
    for name in MODELS:
        model = CorrectedModel(profile.model(name), profile.models[name].residuals)
        predicted = [model.predict(Batch.of(batch)) for batch in batches]
        margins = [model.margin(ms) for ms in predicted]
        over = [ms > predicted[n] * margins[n] for n, ms in runs]
        figures.append(
            figure(
                f"overruns at the profile's margin, {name}",
                float(np.mean(over)) * 100,
                "<= 1" if name == profile.best else "none",
                name != profile.best or np.mean(over) <= 0.01,
                f"mean margin {statistics.mean(margins):.3f}, {len(runs)} iterations",
            )
        )
    return [*figures, *corrected(profile, batches, runs, medians)]


def corrected(
    profile: Profile,
    batches: Sequence[Sequence[Slice]],
    runs: Sequence[tuple[int, float]],
    medians: Sequence[float],
) -> list[Figure]:
    """The same iterations as the engine would see them: predicted, then learned from, one after another."""
    model = CorrectedModel(profile.model("conserve"), profile.models["conserve"].residuals)
    off, off_single, over, margins = [], [], [], []
    for number, ms in runs:
        batch = Batch.of(batches[number])
        predicted = model.predict(batch)
        off.append(abs(predicted / medians[number] - 1) * 100)
        off_single.append(abs(predicted / ms - 1) * 100)
        margins.append(model.margin(predicted))
        over.append(ms > predicted * margins[-1])
        model.observe(batch, ms)
    return [
        figure(
            "MAPE, ConServe's model corrected on line",
            float(np.mean(off)),
            "none",
            True,
            "against the medians",
        ),
        figure(
            "the same against single iterations", float(np.mean(off_single)), "none", True, "with the scatter"
        ),
        figure(
            "overruns at the corrected margin",
            float(np.mean(over)) * 100,
            "<= 1",
            np.mean(over) <= 0.01,
            f"mean margin {statistics.mean(margins):.3f}",
        ),
    ]


def costs() -> list[Figure]:
    """Time of fitting a model, and of asking it."""
    dice = random.Random(SEED)
    truth = MODELS["conserve"].of(0.3, 1e-4, 2e-4, 1.5e-3, 0.1, 1.0, 1e-3, 15.0)
    some = [Batch.of([Slice(1, dice.randrange(4000), True)] * dice.randrange(1, 64)) for _ in range(1000)]
    for batch in some:
        batch.add(dice.randrange(1, 1000), dice.choice((0, 1000, 4000)))
    samples = Samples.of(some * 80, [truth.predict(batch) * dice.gauss(1, 0.02) for batch in some] * 80)
    fits, predictions, questions = [], [], []
    fit(MODELS["conserve"], samples)  # loads scipy
    batch = Batch.of([Slice(1, 1000 + n, True) for n in range(256)])
    budget = truth.predict(batch) + 150
    for _ in range(7):
        fits.append(timed_s(lambda: fit(MODELS["conserve"], samples), 1) * 1e3)
        predictions.append(timed_s(lambda: truth.predict(batch), 10_000) * 1e6)
        questions.append(timed_s(lambda: truth.can_schedule(batch, Slice(2048, 500), budget), 10_000) * 1e6)
    return [
        Figure(
            name="fit of 80,000 samples", unit="ms", samples=fits, target="< 50",
            reached=statistics.median(fits) < 50, command=COMMAND,
        ),
        Figure(
            name="predict", unit="us", samples=predictions, target="<= 5",
            reached=statistics.median(predictions) <= 5, command=COMMAND,
        ),
        Figure(
            name="can_schedule on a batch of 256", unit="us", samples=questions, target="<= 20",
            reached=statistics.median(questions) <= 20, command=COMMAND,
        ),
    ]  # fmt: skip


def timed_s(work: object, repeats: int) -> float:
    """Seconds per call."""
    begun = time.perf_counter()
    for _ in range(repeats):
        work()  # type: ignore[operator]
    return (time.perf_counter() - begun) / repeats


def figure(name: str, value: float, target: str, reached: object, note: str) -> Figure:
    return Figure(
        name=name, unit="%", samples=[value], target=target, reached=bool(reached), command=COMMAND, note=note
    )


def error_figure(name: str, found: Errors, most: float | None) -> Figure:
    note = (
        f"P50 {found.p50_error:.2%}, P90 {found.p90_error:.2%}, P99 {found.p99_error:.2%}, "
        f"bias {found.bias:+.2%}, {found.batches} batches"
    )
    target = f"<= {most:g}" if most else "none"
    return figure(name, found.mape * 100, target, most is None or found.mape * 100 <= most, note)


def keep(profile: Profile, batches: Sequence[Sequence[Slice]], runs: Sequence[tuple[int, float]]) -> None:
    """The raw numbers, for looking at residuals."""
    RAW.mkdir(exist_ok=True)
    document = {
        "samples": profile.samples,
        "noise": [profile.noise.back_to_back, profile.noise.over_time] if profile.noise else None,
        "batches": [write_slices(batch) for batch in batches],
        "runs": runs,
    }
    (RAW / f"latency_model-{time.strftime('%Y%m%dT%H%M%S')}.json").write_text(json.dumps(document))
