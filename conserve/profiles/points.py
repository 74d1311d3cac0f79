"""Batches to measure: a grid that covers the space, and random mixtures for what grids miss."""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product, zip_longest

from conserve.errors import GridTooLarge
from conserve.profiles.batch import Batch, Slice

CHUNKS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)  # tokens of a prefill chunk
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # decode steps in a batch
CONTEXTS = (0, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MIXED_PER_GRID = 3
MIXED = 600  # random batches, more than any budget allows on a CPU
HELD_OUT = 4  # every fourth mixture is held out of the fit and predicted
NOISE_EVERY = 12  # points between two measurements of the noise batch
FITTED = ("prefill", "decode", "mixed")  # kinds of points that go into the fit
FIRST = ("p16@0", "d@256", "p64@0", "8*d@256", "p64@1024", "8*d@1024", "p256@0", "p256@1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationLimits:
    """Largest iteration of an engine."""

    tokens: int  # computed in one iteration: vLLM's max_num_batched_tokens
    requests: int  # vLLM's max_num_seqs
    context: int  # tokens of one request: the model's context length
    kv_tokens: int  # of all requests together
    block_tokens: int  # tokens of a KV block

    def hold(self, slices: Sequence[Slice]) -> bool:
        """True if a batch of these slices fits, with a few more decode steps each."""
        blocks = sum(-(-(s.tokens + s.context + 16) // self.block_tokens) for s in slices)
        return (
            0 < len(slices) <= self.requests
            and sum(s.tokens for s in slices) <= self.tokens
            and all(s.tokens + s.context + 16 <= self.context for s in slices)
            and blocks <= self.kv_tokens // self.block_tokens
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One batch to measure. Kinds: prefill, decode, mixed, held-out, noise."""

    kind: str
    slices: tuple[Slice, ...]

    @property
    def batch(self) -> Batch:
        return Batch.of(self.slices)

    def __str__(self) -> str:
        """``mixed p512@0 8*d@1024``: a chunk of 512 tokens and eight decode steps after 1,024 tokens each."""
        return f"{self.kind} {write_slices(self.slices)}"

    @classmethod
    def parse(cls, text: str) -> "Point":
        """The inverse of `str`; raises ValueError."""
        kind, _, slices = text.partition(" ")
        return cls(kind, read_slices(slices))


def write_slices(slices: Sequence[Slice]) -> str:
    """Slices in one line: equal neighbours are counted, and a decode step has one token unless it names more."""
    runs = [(piece, len(list(run))) for piece, run in groupby(slices)]
    return " ".join(
        write_slice(piece) if count == 1 else f"{count}*{write_slice(piece)}" for piece, count in runs
    )


def write_slice(piece: Slice) -> str:
    """``p512@0`` or ``d@1024``."""
    tokens = "" if piece.decode and piece.tokens == 1 else piece.tokens
    return f"{'d' if piece.decode else 'p'}{tokens}@{piece.context}"


def read_slices(text: str) -> tuple[Slice, ...]:
    """The inverse of `write_slices`; raises ValueError."""
    slices: list[Slice] = []
    for word in text.split():
        match = re.fullmatch(r"(?:(\d+)\*)?([pd])(\d*)@(\d+)", word)
        if match is None:
            raise ValueError(f"{word!r} is no part of a batch")
        count, phase, tokens, context = match.groups()
        slices += [Slice(int(tokens or 1), int(context), phase == "d")] * int(count or 1)
    return tuple(slices)


def plan(limits: IterationLimits, *, seed: int, max_context: int | None = None) -> list[Point]:
    """All points in the order of measuring: whenever one stops, the measured ones cover the space.

    Three mixtures follow each grid point, both in random order. A co-serving engine runs mixtures, in which
    contexts differ and threads wait for each other; the grid covers the corners. `max_context` narrows the
    space to the contexts that a deployment serves, by default all that the engine holds. Raises `GridTooLarge`.
    """
    if max_context is not None:
        limits = narrowed(limits, max_context)
    dice = random.Random(seed)
    grid = [point for point in grid_points(limits) if limits.hold(point.slices)]
    if not grid:
        raise GridTooLarge(
            f"a KV cache of {limits.kv_tokens:,} tokens holds no batch worth measuring; "
            "give the engine more with: -- --kv-cache-memory-bytes BYTES"
        )
    dice.shuffle(grid)
    mixed = [
        Point("held-out" if number % HELD_OUT == 1 else "mixed", mixture(dice, limits))
        for number in range(MIXED)
    ]
    threes = [mixed[start : start + MIXED_PER_GRID] for start in range(0, len(mixed), MIXED_PER_GRID)]
    points: list[Point] = []
    for corner, three in zip_longest(grid, threes):
        points += [corner] if corner is not None else []
        points += three or []
    return list(with_noise(points, limits))


def first_points(points: Sequence[Point]) -> list[Point]:
    """The grid points of a plan that a session begins with, small ones first.

    They differ in every sum that the models use, so their times predict those of all others.
    """
    grid = {write_slices(point.slices): point for point in points if point.kind in ("prefill", "decode")}
    return [grid[name] for name in FIRST if name in grid]


def narrowed(limits: IterationLimits, max_context: int) -> IterationLimits:
    """The limits with at most this context; raises `GridTooLarge` if the engine cannot hold it."""
    most = min(limits.context, limits.kv_tokens)
    if not 0 < max_context <= most:
        raise GridTooLarge(
            f"--max-context {max_context:,} does not fit: this engine holds {limits.context:,} tokens a request "
            f"and {limits.kv_tokens:,} in all; give at most {most:,}"
        )
    return IterationLimits(
        tokens=limits.tokens,
        requests=limits.requests,
        context=max_context,
        kv_tokens=limits.kv_tokens,
        block_tokens=limits.block_tokens,
    )


def grid_points(limits: IterationLimits) -> Iterator[Point]:
    """Single prefill chunks by size and context, and uniform decode batches by size and context."""
    for tokens, context in product(CHUNKS, CONTEXTS):
        yield Point("prefill", (Slice(tokens, context),))
    for rows, context in product(ROWS, CONTEXTS[1:]):
        yield Point("decode", (Slice(1, context, decode=True),) * rows)


def mixture(dice: random.Random, limits: IterationLimits) -> tuple[Slice, ...]:
    """A random batch: decode steps at scattered contexts and up to three chunks, of log-uniform total size."""
    while True:
        budget = int(log_uniform(dice, 16, limits.tokens))
        mean = log_uniform(dice, 64, limits.context / 2)
        rows = dice.choice((0, int(log_uniform(dice, 1, limits.requests)), dice.randint(1, limits.requests)))
        decodes = [
            1 + min(int(dice.expovariate(1 / mean)), limits.context - 32) for _ in range(min(rows, budget))
        ]
        slices = [Slice(1, context, decode=True) for context in decodes]
        left = min(budget, limits.tokens) - len(slices)
        for chunk in range(dice.choice((0, 1, 1, 2, 3)) if slices else dice.choice((1, 2, 3))):
            if left < 1:
                break
            tokens = left if chunk == 0 and dice.random() < 0.5 else max(1, int(left * dice.random()))
            context = dice.choice((0, int(log_uniform(dice, 16, limits.context))))
            tokens = min(tokens, limits.context - 32 - context)
            if tokens > 0:
                slices.append(Slice(tokens, context))
                left -= tokens
        if limits.hold(slices):
            return tuple(slices)


def log_uniform(dice: random.Random, low: float, high: float) -> float:
    """A random number whose logarithm is uniform between those of `low` and `high`."""
    return math.exp(dice.uniform(math.log(low), math.log(max(low, high))))


def with_noise(points: Sequence[Point], limits: IterationLimits) -> Iterator[Point]:
    """The points, with the same batch every now and then: no model can predict how it varies."""
    same = (
        Slice(min(256, limits.tokens // 2), 0),
        *[Slice(1, min(512, limits.context // 2), decode=True)] * 4,
    )
    for number, point in enumerate(points):
        if number % NOISE_EVERY == 0 and limits.hold(same):
            yield Point("noise", same)
        yield point
