"""The price of harm: offline throughput over the harm to live requests, on simulated time.

The settings and the engine are those of `tests.benchmarks.simulation`, with fewer blocks.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from tests.benchmarks.report import Figure
from tests.benchmarks.simulation import ALONE, OURS, Floats, Seen, Setting, bursty, paper, phases, simulate

COMMAND = "python -m tests.benchmarks exchange"
HARMS = (0.05, 0.10, 0.25, 0.50)
JUDGED = 0.10
QUIET_S = 150.0
NON_PREEMPTIVE = "non-preemptive"
RANKS = (50, 99)


def measure() -> list[Figure]:
    """Each setting under each promise."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = [
        *(replace(setting, blocks=16) for setting in (phases(), bursty(0.4), bursty(1.2))),
        replace(paper(0.5), blocks=2),
    ]
    return [*batching(bursty(0.8)), *chain.from_iterable(map(figures, settings))]


def batching(setting: Setting) -> Iterator[Figure]:
    """Offline tokens of a server without live requests to those of vLLM's own scheduler, as in `conserve run`."""
    empty = replace(setting, arrivals=lambda seed: [], blocks=1, block_s=QUIET_S)
    (alone,) = simulate(empty, "priority").offline_tokens
    for name, promises in (("harm 10%", {"harm": 0.1}), ("an SLO", {"ttft_slo_ms": 1200, "tbt_slo_ms": 500})):
        for policy, how in (("", ""), ("/off", ", rows cannot leave")):
            (tokens,) = simulate(empty, OURS + policy, promises=promises).offline_tokens
            value, floor = tokens / alone, None if policy else 0.98
            print(f"no live requests, {name}{how}: {value:.3f}", flush=True)
            yield figure(
                f"no live requests, {name}{how}: offline tokens to vLLM's", value, floor, at_most=False
            )


def figures(setting: Setting) -> Iterator[Figure]:
    """Latencies of each promise to those of online-only, and its offline tokens to non-preemptive's."""
    alone, most = simulate(setting, ALONE), simulate(setting, NON_PREEMPTIVE)
    requests = sum(map(len, alone.ttft_ms))
    print(
        f"{setting.name}: {requests:,} requests, online-only is busy {alone.busy:.0%} of the time", flush=True
    )
    print(f"  {'online-only, ms':<18}" + "".join(f"{ms:>10,.1f}" for ms in latencies(alone)), flush=True)
    yield from told(setting, NON_PREEMPTIVE, most, alone, most)
    for harm in HARMS:
        seen = simulate(setting, OURS, promises={"harm": harm})
        yield from told(setting, f"harm {harm:.0%}", seen, alone, most, judged=harm == JUDGED)
    yield from told(
        setting, "P50 and P99", simulate(setting, OURS, promises=middle_and_end(alone)), alone, most
    )
    yield from told(setting, "P99 only", simulate(setting, OURS, alone.slo), alone, most)


def middle_and_end(alone: Seen) -> Mapping[str, Any]:
    """Promises of twice online-only's medians, and of its P99s."""
    ttft_50, ttft_99, tbt_50, tbt_99 = latencies(alone)
    return {
        "ttft_slo_ms": {"p50": min(2 * ttft_50, ttft_99), "p99": ttft_99},
        "tbt_slo_ms": {"p50": min(2 * tbt_50, tbt_99), "p99": tbt_99},
    }


def told(
    setting: Setting, promise: str, seen: Seen, alone: Seen, most: Seen, *, judged: bool = False
) -> Iterator[Figure]:
    """Print a line of the table, and yield its figures."""
    harm = [ours / theirs for ours, theirs in zip(latencies(seen), latencies(alone), strict=True)]
    throughput = sum(seen.offline_tokens) / sum(most.offline_tokens)
    print(f"  {promise:<18}" + "".join(f"{one:>10.3f}" for one in (*harm, throughput)), flush=True)
    for name, value in zip(("P50 TTFT", "P99 TTFT", "P50 TBT", "P99 TBT"), harm, strict=True):
        floor = 1.10 if judged and name.startswith("P50") else None
        yield figure(f"{setting.name}, {promise}: {name} to online-only's", value, floor)
    yield figure(f"{setting.name}, {promise}: offline tokens to non-preemptive's", throughput, None)


def figure(name: str, value: float, floor: float | None, *, at_most: bool = True) -> Figure:
    reached = floor is None or (value <= floor if at_most else value >= floor)
    return Figure(
        name=name,
        unit="",
        samples=[value],
        target="-" if floor is None else f"{'<=' if at_most else '>='} {floor:g}",
        reached=reached,
        command=COMMAND,
    )


def latencies(seen: Seen) -> Sequence[float]:
    """P50 and P99 of TTFT, then of TBT, in ms."""
    return [at_rank(blocks, rank) for blocks in (seen.ttft_ms, seen.tbt_ms) for rank in RANKS]


def at_rank(blocks: Sequence[Floats], rank: float) -> float:
    return float(np.percentile(np.concatenate(blocks), rank, method="inverted_cdf"))
