"""Policies on simulated time: the real scheduler, the same arrivals for each, and as many blocks as it takes.

What chance decides among two hundred live requests, the slowest of them above all, is seen here over many more.
What is real and what is not stands in `conserve.engine.vllm.simulation.engine`.
"""

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np

from conserve.bench.attainment import LatencyLimits
from conserve.bench.deployment import SchedulerCounters
from conserve.bench.offline import like_papers
from conserve.bench.presets import CPU
from conserve.bench.traces import Trace, find_trace, gamma, on_off, read
from conserve.errors import InputError
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.book import Book
from conserve.profiles.conserve import ConServeModel
from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks simulation"
RUN = 12  # blocks judged together, as in a comparison of that many rounds
SEED = 7
ALONE, OURS, UNINTERRUPTED = "online-only", "conserve", "conserve/never"

Floats = np.ndarray[Any, np.dtype[np.float64]]

# As `conserve profile` measured the demo model with the flags of the CPU preset and its worker on one core, in an
# hour in which the machine was about half as fast as in those of the comparisons in docs/benchmarks.
DEMO = (1.404, 3.811e-4, 8.629e-4, 4.952e-3, 0.2298, 2.274, 0.0, 30.07)
FASTER = 2.2
DEMO_LAYERS, DEMO_KV_BYTES = 30, 2 * 30 * 3 * 64 * 2  # a token's: 30 layers, 3 heads of 64, bf16
PAPERS_KV_BYTES, PAPERS_KV_MEMORY = 2 * 32 * 8 * 128 * 2, 60e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A machine, its live traffic and its offline rows."""

    name: str
    model: ConServeModel
    layers: int
    flags: Mapping[str, int]  # of the engine
    num_blocks: int  # of KV
    arrivals: Callable[[int], Trace]  # of a block, by seed
    block_s: float
    blocks: int
    longest_row: int  # tokens
    rows_factor: float
    window: int  # offline rows in the engine


def demo(name: str, arrivals: Callable[[int], Trace], *, block_s: float, blocks: int = 8 * RUN) -> Setting:
    """The CPU preset."""
    given = dict(zip(CPU.engine_flags[::2], CPU.engine_flags[1::2], strict=True))
    flags = {flag.removeprefix("--").replace("-", "_"): int(value) for flag, value in given.items()}
    kv_bytes = flags.pop("kv_cache_memory_bytes")
    return Setting(
        name=name,
        model=ConServeModel.of(*(ms / FASTER for ms in DEMO)),
        layers=DEMO_LAYERS,
        num_blocks=kv_bytes // (flags["block_size"] * DEMO_KV_BYTES),
        flags=flags,
        arrivals=arrivals,
        block_s=block_s,
        blocks=blocks,
        longest_row=CPU.offline_longest,
        rows_factor=CPU.offline_factor,
        window=CPU.offline_window or CPU.offline_rows,
    )


def bursty(rate: float) -> Setting:
    """The trace as the CPU preset plays it, at another rate."""
    trace, preset = read(find_trace("azure_code_2023_10min_bursty")), replace(CPU, rate=rate)

    def arrivals(seed: int) -> Trace:
        for other in itertools.count(seed, 1000):
            try:
                return preset.arrivals(trace, other)
            except InputError:  # nothing is left of it
                continue
        raise AssertionError

    return demo(f"bursty, {rate:g}/s", arrivals, block_s=CPU.block_s)


def phases() -> Setting:
    """ON/OFF: 0.9 requests a second of 256 tokens for 6 s of every 15."""
    return demo("ON/OFF", lambda seed: on_off(0.9, 6, 9, 30.0, 256, 32, seed), block_s=30.0)


def paper(rate: float) -> Setting:
    """Setting of conserve-2026's figure 6 and ablation: Llama-3.1 8B, an H100, 4,096 tokens in, 256 out, CV 0.5."""
    profile, block_s, block_size = Book(Path("nowhere")).named("llama-3.1-8b-h100"), 30.0, 64
    return Setting(
        name=f"the paper's, {rate:g}/s",
        model=ConServeModel(profile.models["conserve"].coefficients),
        layers=32,
        flags={
            "max_num_batched_tokens": 8192,
            "max_model_len": 32768,
            "max_num_seqs": 256,
            "block_size": block_size,
        },
        num_blocks=int(PAPERS_KV_MEMORY / (block_size * PAPERS_KV_BYTES)),
        arrivals=lambda seed: gamma(rate, 0.5, block_s, 4096, 256, seed),
        block_s=block_s,
        blocks=RUN,
        longest_row=32768,
        rows_factor=1.0,
        window=256,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Latencies of live requests under one policy, and the offline tokens beside them, block by block."""

    ttft_ms: Sequence[Floats]
    tbt_ms: Sequence[Floats]
    offline_tokens: Sequence[int] = ()  # computed while requests arrived, as `conserve bench` counts them
    wasted: float = 0.0  # of offline tokens
    live_tokens_recomputed: int = 0
    busy: float = 0.0  # of the time

    def runs(self) -> list[Self]:
        """Split the blocks into comparisons of `RUN` blocks each."""
        starts = range(0, len(self.ttft_ms), RUN)
        return [
            replace(
                self,
                **{
                    name: getattr(self, name)[at : at + RUN]
                    for name in ("ttft_ms", "tbt_ms", "offline_tokens")
                },
            )
            for at in starts
        ]

    @property
    def slo(self) -> LatencyLimits:
        """The P99s."""
        return LatencyLimits(ttft_ms=p99(self.ttft_ms), tbt_ms=p99(self.tbt_ms))

    @property
    def worst_ms(self) -> float:
        """The longest TTFT."""
        return max(float(block.max()) for block in self.ttft_ms)


def p99(blocks: Sequence[Floats]) -> float:
    return float(np.percentile(np.concatenate(blocks), 99, method="inverted_cdf"))


def simulate(
    setting: Setting,
    policy: str,
    slo: LatencyLimits | None = None,
    *,
    separable: bool = True,
    promises: Mapping[str, Any] | None = None,
    terms: Mapping[str, float] | None = None,
) -> Seen:
    """Play block after block on one engine, which has run offline rows alone before.

    Where rows are not `separable`, none leaves an iteration alone or joins a later one (`View.apart`). `promises`
    are further entries of the engine's section, `terms` are HyGen's parameters.
    """
    from conserve.engine.vllm.simulation.play import SimulatedMachine
    from conserve.engine.vllm.simulation.play import simulate as play

    machine = SimulatedMachine(
        model=setting.model, layers=setting.layers, flags=setting.flags, num_blocks=setting.num_blocks
    )
    given = {"ttft_slo_ms": slo and slo.ttft_ms, "tbt_slo_ms": slo and slo.tbt_ms, **(promises or {})}
    rows = like_papers(1 << 16, factor=setting.rows_factor, most=setting.longest_row, seed=SEED)
    played = list(
        play(
            machine,
            policy,
            map(setting.arrivals, range(setting.blocks)),
            block_s=setting.block_s,
            rows=rows,
            window=setting.window,
            promises=given,
            terms=terms,
            separable=separable,
        )
    )
    ended_s = played[-1].began_s + setting.block_s
    counted = SchedulerCounters.of(played[-1].last).since(SchedulerCounters.of(played[0].first))
    return Seen(
        ttft_ms=[np.array([answer.ttft_ms for answer in block.answers]) for block in played],
        tbt_ms=[
            np.concatenate([np.empty(0), *(answer.tbts_ms for answer in block.answers)]) for block in played
        ],
        offline_tokens=[block.last.offline.tokens - block.first.offline.tokens for block in played],
        wasted=counted["tokens_wasted"] / max(1, counted["offline_tokens"]),
        live_tokens_recomputed=counted["live_tokens_recomputed"],
        busy=counted["busy_s"] / (ended_s - played[0].began_s),
    )


def prompts_alone(setting: Setting) -> Seen:
    """First come, first served cannot do with less: each prompt's own work, and nothing else ever.

    What every iteration takes whatever is in it is counted once for as long as a request waits, as if all of their
    prompts were in one.
    """
    constant_ms, ttft_ms = setting.model.predict(Batch()), []
    for seed in range(setting.blocks):
        free_s, block = 0.0, []
        for arrival in setting.arrivals(seed):
            prompt_ms = setting.model.predict(Batch.of([Slice(arrival.input_tokens, 0)]))
            if arrival.at_s < free_s:
                prompt_ms -= constant_ms
            free_s = max(free_s, arrival.at_s) + prompt_ms / 1e3
            block.append((free_s - arrival.at_s) * 1e3)
        ttft_ms.append(np.array(block))
    return Seen(ttft_ms=ttft_ms, tbt_ms=[])


def measure() -> list[Figure]:
    """Each setting under three policies."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = [phases(), bursty(0.2), bursty(0.4), bursty(0.8), paper(1), paper(2)]
    return list(itertools.chain.from_iterable(map(figures, settings)))


def figures(setting: Setting) -> Iterator[Figure]:
    """Figures of one setting: a sample for every `RUN` blocks each, and in the note the figure of all blocks."""
    alone = simulate(setting, ALONE)
    ours, uninterrupted = (simulate(setting, policy, alone.slo) for policy in (OURS, UNINTERRUPTED))
    least = prompts_alone(setting)
    requests = sum(map(len, ours.ttft_ms))

    def figure(
        name: str,
        of: Callable[[Seen, Seen], float],
        beside: Seen,
        floor: float,
        *,
        at_most: bool = False,
        note: str = "",
    ) -> Figure:
        samples = [of(*pair) for pair in zip(ours.runs(), beside.runs(), strict=True)]
        middle = statistics.median(samples)
        return Figure(
            name=f"{setting.name}: {name}",
            unit="",
            samples=samples,
            target=f"{'<=' if at_most else '>='} {floor:g}",
            reached=middle <= floor if at_most else middle >= floor,
            command=COMMAND,
            note=f"all {requests:,} requests {of(ours, beside):.3g}{note}",
        )

    yield figure(
        "P99 TTFT, uninterrupted / conserve",
        lambda one, other: p99(other.ttft_ms) / p99(one.ttft_ms),
        uninterrupted,
        1.3,
        note=f"; prompts alone {p99(uninterrupted.ttft_ms) / p99(least.ttft_ms):.3g}; "
        f"online-only is busy {alone.busy:.0%} of the time",
    )
    yield figure(
        "worst TTFT lower than uninterrupted",
        lambda one, other: 1 - one.worst_ms / other.worst_ms,
        uninterrupted,
        0.3,
        note=f"; prompts alone {1 - least.worst_ms / uninterrupted.worst_ms:.3g}",
    )
    for what in ("TTFT", "TBT"):
        of = attrgetter(f"{what.lower()}_ms")
        yield figure(
            f"P99 {what} to online-only's",
            lambda one, other, of=of: p99(of(one)) / p99(of(other)),
            alone,
            1.1,
            at_most=True,
        )
    yield figure(
        "offline throughput to uninterrupted",
        lambda one, other: sum(one.offline_tokens) / sum(other.offline_tokens),
        uninterrupted,
        0.97,
        note=f"; {ours.wasted:.2%} wasted",
    )
