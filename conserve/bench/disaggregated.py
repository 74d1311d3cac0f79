"""DistServe with priorities: how many engines for prefill and for decode, and how long prefill's iterations. Pure.

Its authors choose both for a workload (Zhong et al., OSDI 2024, section 4), and ConServe (2026) reports "the best
prefill/decode GPU ratio" of eight. Here each choice plays all of the cell's arrivals.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from math import ceil, inf
from operator import attrgetter

from conserve.bench.attainment import LatencyLimits
from conserve.bench.machine import BenchMachine
from conserve.bench.measure import Block, outcome
from conserve.bench.traces import Trace
from conserve.units import count

SPLITS = ((1, 1), (1, 2), (2, 1))  # engines for prefill and for decode, at first
MOST_ENGINES = 8
LEAST_TOKENS = 128
STEP = 4  # between the token budgets that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSplit:
    """Engines of a pool, and most tokens in an iteration of those for prefill."""

    prefill: int
    decode: int
    tokens: int

    @property
    def engines(self) -> int:
        """Engines of both kinds."""
        return self.prefill + self.decode

    @property
    def wider(self) -> "EngineSplit | None":
        """The split with one more engine of the kind that has more; None if neither has, or none is left."""
        if self.prefill == self.decode or self.engines == MOST_ENGINES:
            return None
        more = self.prefill > self.decode
        return replace(self, prefill=self.prefill + more, decode=self.decode + (not more))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSplit:
    """The chosen split, how many were tried, and if it keeps the SLO."""

    split: EngineSplit
    tried: int
    kept: bool

    def sentence(self) -> str:
        """Line for the user."""
        split = self.split
        how = "keeps the SLO with the most rows" if self.kept else "comes nearest to the SLO"
        return (
            f"distserve-p: {count(split.prefill, 'engine')} for prefill ({split.tokens} tokens an iteration) and "
            f"{split.decode} for decode, which of {self.tried} choices {how}"
        )


def budgets(machine: BenchMachine) -> list[int]:
    """Token budgets of prefill to try on this engine, the middle one first."""
    most = machine.flags["max_num_batched_tokens"]
    tokens, found = max(LEAST_TOKENS, machine.flags["max_num_seqs"]), [most]
    while tokens < most:
        found.append(tokens)
        tokens *= STEP
    return sorted(found, key=lambda tokens: (tokens != sorted(found)[len(found) // 2], tokens))


def pooled(blocks: Sequence[Trace], engines: int) -> list[Trace]:
    """Arrivals of so many engines at once: those of so many blocks, one on top of the other.

    Each engine of a pool has as many live requests as an engine alone. Where the blocks do not come out even, the
    first ones are played again: later within the block, since no two of their requests come at once.
    """
    total = ceil(len(blocks) / engines) * engines
    plays = ceil(total / len(blocks))
    around = [_later(blocks[number % len(blocks)], number // len(blocks) / plays) for number in range(total)]
    groups = [around[first : first + engines] for first in range(0, total, engines)]
    return [
        replace(group[0], arrivals=tuple(merge(*(one.arrivals for one in group), key=attrgetter("at_s"))))
        for group in groups
    ]


def _later(block: Trace, part: float) -> Trace:
    """The block with its arrivals later by this part of it; the last ones come first."""
    by_s, end_s = part * block.duration_s, block.duration_s
    moved = (one._replace(at_s=(one.at_s + by_s) % end_s) for one in block)
    return replace(block, arrivals=tuple(sorted(moved, key=attrgetter("at_s"))))


def best_split(
    machine: BenchMachine,
    play: Callable[[EngineSplit], Sequence[Block]],
    slo: LatencyLimits,
    rows_per_s: Callable[[Sequence[Block]], float],
) -> BestSplit:
    """The split that keeps the SLO with the most rows, else the one nearest to it; then its token budget, as well.

    `play` plays a split. Engines are added to one of the kinds for as long as that is better.
    """
    first, *others = budgets(machine)
    scores: dict[EngineSplit, tuple[bool, float]] = {}

    def tried(splits: Iterable[EngineSplit]) -> EngineSplit:
        for split in splits:
            scores[split] = score(play(split), slo, rows_per_s)
        return max(scores, key=scores.__getitem__)

    best = tried(EngineSplit(prefill=prefill, decode=decode, tokens=first) for prefill, decode in SPLITS)
    while (wider := best.wider) is not None and wider not in scores:
        best = tried([wider])
    found = tried(replace(best, tokens=tokens) for tokens in others)
    return BestSplit(split=found, tried=len(scores), kept=scores[found][0])


def score(
    blocks: Sequence[Block], slo: LatencyLimits, rows_per_s: Callable[[Sequence[Block]], float]
) -> tuple[bool, float]:
    """Rank these blocks: by whether they keep the SLO, then by their rows, or by how near to the SLO they come."""
    found = outcome(blocks, None)
    over = max(
        (one.p99 / most for one, most in zip((found.ttft_ms, found.tbt_ms), slo, strict=True) if one),
        default=inf,
    )
    return (True, rows_per_s(blocks)) if over <= 1 else (False, -over)
