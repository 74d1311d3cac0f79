"""Policies over a grid of operating points, on simulated time: the worst cell first.

    python -m tests.benchmarks.sweep             # the whole grid, hours; goes on where it was stopped
    python -m tests.benchmarks.sweep --cells 8   # its first cells, which are spread over the grid

Measured cells are kept in .bench/sweep.jsonl.

A cell is a rate (by how busy online-only alone keeps the engine), a burstiness, the lengths of live requests, and a
scale of the SLO. The engine is that of `tests.benchmarks.simulation`: vLLM's scheduler and ConServe's are real, the
model's time is not. Stock vLLM is the plug-in's `priority` and `non-preemptive`, whose schedules are vLLM's own.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conserve.bench import tuning
from conserve.bench.forecast import Engine, play
from conserve.bench.measure import LatencyLimits
from conserve.bench.offline import like_papers
from conserve.bench.profiler import Promise
from conserve.bench.traces import gamma
from conserve.bench.tuning import Workload
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.fit import Samples, fit
from conserve.profiles.hygen import HyGenModel
from conserve.profiles.model import LinearModel
from tests.benchmarks.simulation import ALONE, OURS, Seen, Setting, demo, simulate

BUSY = (0.2, 0.4, 0.6, 0.8)  # share of the time, by online-only alone
CVS = (0.5, 1.0, 2.0, 4.0)
LENGTHS = {
    "chat": (128, 48),
    "code": (256, 16),
    "documents": (900, 32),
    "agents": (600, 96),
}  # tokens in, out
SCALES = (1.0, 1.25, 1.5)  # times online-only's P99s
BLOCK_S, BLOCKS = 30.0, 4
STOCK, PRIORITY, HYGEN, HYGEN_STAR = "non-preemptive", "priority", "hygen", "hygen-star"
POLICIES = (OURS, PRIORITY, "sarathi++", HYGEN_STAR, HYGEN)
FILE = Path(".bench/sweep.jsonl")
STEP = 0.6180339887  # golden ratio: cells of a prefix are spread over the grid
SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An operating point."""

    busy: float
    cv: float
    lengths: str
    scale: float

    @property
    def name(self) -> str:
        """Words for tables."""
        return f"{self.lengths}, {self.busy:.0%} busy, CV {self.cv:g}, SLO x{self.scale:g}"


def grid() -> list[Cell]:
    """All cells, ordered so that each prefix fills the grid evenly."""
    cells = [
        Cell(busy=busy, cv=cv, lengths=lengths, scale=scale)
        for busy, cv, lengths, scale in itertools.product(BUSY, CVS, LENGTHS, SCALES)
    ]
    order = sorted(range(len(cells)), key=lambda number: number * STEP % 1)
    return [cells[number] for number in order]


def setting_of(cell: Cell) -> Setting:
    """Setting with the rate at which online-only keeps the engine so busy."""
    prompt, answer = LENGTHS[cell.lengths]

    def setting(rate: float) -> Setting:
        return demo(
            cell.name,
            lambda seed: gamma(rate, cell.cv, BLOCK_S, prompt, answer, SEED + seed),
            block_s=BLOCK_S,
            blocks=BLOCKS,
        )

    engine = engine_of(setting(1.0))
    low, high = 2 / BLOCK_S, 50.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        traces = [gamma(middle, 1.0, 4 * BLOCK_S, prompt, answer, seed) for seed in range(2)]
        busy = statistics.mean(play(trace, engine, 4 * BLOCK_S).busy for trace in traces)
        low, high = (middle, high) if busy < cell.busy else (low, middle)
    return setting(low)


def engine_of(setting: Setting) -> Engine:
    """The setting's engine, for forecasts."""
    return Engine(
        model=setting.model,
        max_tokens=setting.flags["max_num_batched_tokens"],
        max_requests=setting.flags["max_num_seqs"],
    )


def predictor_of(model: LinearModel) -> HyGenModel:
    """HyGen's predictor, fitted to random batches of this engine."""
    dice = np.random.default_rng(SEED)
    batches = []
    for _ in range(400):
        prompts = [Slice(int(n), 0) for n in np.exp(dice.uniform(2, 7, dice.integers(0, 4)))]
        steps = [Slice(1, int(c), True) for c in dice.integers(8, 1000, dice.integers(1, 100))]
        batches.append(Batch.of([*prompts, *steps]))
    return fit(HyGenModel, Samples.of(batches, [model.predict(batch) for batch in batches]))


def measure(cell: Cell) -> dict[str, Any]:
    """Latencies and offline tokens of each policy in this cell."""
    setting = setting_of(cell)
    alone, most = simulate(setting, ALONE), simulate(setting, STOCK)
    slo = LatencyLimits(cell.scale * alone.slo.ttft_ms, cell.scale * alone.slo.tbt_ms)
    predictor = predictor_of(setting.model)
    terms = tuned(setting, predictor, cell.scale)
    told = {}
    for policy in POLICIES:
        seen = simulate(
            setting,
            policy,
            slo if policy == OURS else None,
            promises={"hygen": predictor.coefficients, "harm": None},
            terms=terms.get(policy),
        )
        told[policy] = compared(seen, alone, most)
    return {
        **asdict(cell),
        "requests": sum(map(len, alone.ttft_ms)),
        "online_only_busy": alone.busy,
        "slo_ms": list(slo),
        "terms": {policy: dict(given) for policy, given in terms.items()},
        "policies": {STOCK: compared(most, alone, most), **told},
    }


def tuned(setting: Setting, predictor: HyGenModel, scale: float) -> Mapping[str, Mapping[str, float]]:
    """Parameters of HyGen's policies for this cell, by HyGen's profiler."""
    engine = engine_of(setting)
    rows = like_papers(512, factor=setting.rows_factor, most=setting.longest_row, seed=SEED)
    workload = Workload(
        engine=engine,
        traces=[setting.arrivals(seed) for seed in range(2)],
        block_s=setting.block_s,
        lengths=list(rows),
        window=setting.window,
    )
    tolerance = min(0.5, max(0.05, scale - 1))
    promised = [Promise("p99", metric, tolerance) for metric in ("ttft", "tbt")]
    alone = workload.alone()
    budget = asyncio.run(tuning.latency_budget(workload, predictor, promised, None, alone))
    rate = asyncio.run(tuning.offline_rate(workload, promised, None, alone))
    return {HYGEN: {"budget_ms": budget.value}, HYGEN_STAR: {"offline_per_s": rate.value}}


def compared(seen: Seen, alone: Seen, most: Seen) -> dict[str, float]:
    """P50 and P99 of both latencies to online-only's, and offline tokens to non-preemptive's."""
    found = {
        f"{name}_p{rank}": percentile(getattr(seen, f"{name}_ms"), rank)
        / percentile(getattr(alone, f"{name}_ms"), rank)
        for name in ("ttft", "tbt")
        for rank in (50, 99)
    }
    return {**found, "offline": sum(seen.offline_tokens) / max(1, sum(most.offline_tokens))}


def percentile(blocks: Sequence[Any], rank: int) -> float:
    return float(np.percentile(np.concatenate(blocks), rank, method="inverted_cdf"))


def known(file: Path) -> list[dict[str, Any]]:
    """Cells that were measured; a line that was cut short is measured again."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def keep(measured: Mapping[str, Any], file: Path) -> None:
    """Append a cell, behind a line that may have been cut short."""
    before = file.read_bytes() if file.exists() else b""
    cut = before and not before.endswith(b"\n")
    with file.open("a") as opened:
        opened.write(("\n" if cut else "") + json.dumps(measured) + "\n")


def cell_of(measured: Mapping[str, Any]) -> Cell:
    """Operating point of a measured cell."""
    return Cell(**{name: measured[name] for name in Cell.__dataclass_fields__})


def worst(measured: Mapping[str, Any], policy: str = OURS) -> float:
    """Largest P99 of a cell, to online-only's."""
    told = measured["policies"][policy]
    return max(told["ttft_p99"], told["tbt_p99"])


COLUMNS = ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "offline")


def table(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines: the worst cell of ConServe's under each policy, then the medians over all cells."""
    ranked = sorted(cells, key=worst, reverse=True)
    yield f"{'':<44}{'policy':<16}" + "".join(f"{name:>10}" for name in COLUMNS)
    names = list(ranked[0]["policies"])
    for policy in (OURS, *(name for name in names if name != OURS)):
        where = cell_of(ranked[0]).name if policy == OURS else ""
        yield f"{where:<44}{policy:<16}" + figures([ranked[0]], policy)
    for policy in (OURS, *(name for name in names if name != OURS)):
        where = f"median of {len(cells)} cells" if policy == OURS else ""
        yield f"{where:<44}{policy:<16}" + figures(ranked, policy)
    for one in ranked[1:]:
        yield f"{cell_of(one).name:<44}{OURS:<16}" + figures([one], OURS)


def figures(cells: Sequence[Mapping[str, Any]], policy: str) -> str:
    """Medians of a policy's columns over these cells."""
    values = (statistics.median(one["policies"][policy][name] for one in cells) for name in COLUMNS)
    return "".join(f"{value:>10.2f}" for value in values)


def main(words: Sequence[str]) -> int:
    """Measure the cells that are missing, then print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sweep", description=__doc__)
    parser.add_argument("--cells", type=int, default=len(grid()))
    parser.add_argument("--output", type=Path, default=FILE)
    given = parser.parse_args(words)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    wanted = grid()[: given.cells]
    done = {cell_of(one): one for one in known(given.output)}
    missing = [cell for cell in wanted if cell not in done]
    begun = time.monotonic()
    for number, cell in enumerate(missing):
        done[cell] = measure(cell)
        keep(done[cell], given.output)
        left_s = (time.monotonic() - begun) / (number + 1) * (len(missing) - number - 1)
        print(f"{number + 1}/{len(missing)} {cell.name}; {left_s / 60:.0f} min left", file=sys.stderr)
    print("\n".join(table([done[cell] for cell in wanted])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
