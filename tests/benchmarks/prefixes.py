"""Live conversations beside rows: what their later turns find in the prefix cache, with and without blocks kept.

The conversations are real: every eighth of Mooncake's, with the blocks of 512 tokens that its prompts share. On the
demo model's engine lengths are a sixteenth (answers an eighth), as long as the other live requests there are.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from conserve.bench.machine import BenchMachine
from conserve.profiles.book import Book
from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks prefixes"
TALKS = Path(__file__).parent / "data" / "mooncake_conversation_talks.parquet"
SHARED, TICK_S, SEED = 512, 3.0, 0  # tokens of a block of the trace; the publisher's times sit on ticks
LONGEST = 30_000  # tokens of a prompt: longer ones do not fit the engine's context
ALONE, OURS = "online-only", "conserve"
PROMISES: Mapping[str, Mapping[str, Any]] = {
    "harm 10 %": {"harm": 0.1},
    "P99s of online-only": {},
}
SHARES = (0.0, 0.5, 0.9)  # of the KV memory, kept at most


class Turn(NamedTuple):
    """A request of a conversation. `blocks` name what its prompt shares, each `block_tokens` long."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    block_tokens: int

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids; equal names have equal tokens."""
        filling = range(self.block_tokens - 2)
        ids = [token for name in self.blocks for token in (name % 997, name // 997 % 997, *filling)]
        return ids[: self.input_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """An engine and the conversations on it."""

    name: str
    machine: BenchMachine
    part: int  # of the conversations, one in so many
    shorter: tuple[int, int]  # lengths of prompts and answers, divided by these
    time_s: float

    def turns(self) -> list[Turn]:
        """The turns that come, in their order."""
        dice, (prompts, answers) = np.random.default_rng(SEED), self.shorter
        return sorted(
            Turn(
                at_s=row["arrival_s"] + float(dice.uniform(0, TICK_S)),
                input_tokens=max(1, row["input_tokens"] // prompts),
                output_tokens=max(1, row["output_tokens"] // answers),
                blocks=row["hash_ids"],
                block_tokens=SHARED // prompts,
            )
            for row in pq.read_table(TALKS).to_pylist()
            if row["arrival_s"] < self.time_s - TICK_S
            and row["input_tokens"] <= LONGEST
            and row["hash_ids"][1] % self.part == 0
        )


@cache
def fields() -> Sequence[Field]:
    """The demo model on one core at three loads, and Llama-3.1 8B on an H100, which takes hours."""
    demo = BenchMachine.demo()
    demo = replace(
        demo,
        flags={**demo.flags, "block_size": demo.flags["block_size"] // 2},
        num_blocks=2 * demo.num_blocks,
        host_blocks=2 * demo.host_blocks,
        copy_ms=demo.copy_ms / 2,
    )
    h100 = BenchMachine.of(Book(Path("nowhere")).named("llama-3.1-8b-h100"))
    return (
        Field(name="the demo model", machine=demo, part=1, shorter=(16, 8), time_s=1200.0),
        Field(name="half as many", machine=demo, part=2, shorter=(16, 8), time_s=1200.0),
        Field(name="longer ones", machine=demo, part=1, shorter=(12, 8), time_s=1200.0),
        Field(name="8B on an H100", machine=h100, part=2, shorter=(1, 1), time_s=600.0),
    )


@dataclass(frozen=True, slots=True)
class Played:
    """Latencies of live requests, what they found, and the offline tokens beside them."""

    ttft_ms: np.ndarray[Any, Any]
    tbt_ms: np.ndarray[Any, Any]
    found: float  # share of live prompts' tokens
    lost: float
    offline_tokens_per_s: float


def play(field: Field, policy: str, promises: Mapping[str, Any]) -> Played:
    """Play the conversations under a policy."""
    from conserve.cli.sweep import sizes_of
    from conserve.engine.vllm.simulation.play import simulate

    machine = field.machine
    (block,) = simulate(
        sizes_of(machine),
        policy,
        [field.turns()],
        block_s=field.time_s,
        rows=cycle(machine.rows(4096, seed=SEED)) if policy != ALONE else iter(()),
        window=machine.window,
        promises=promises,
        checkpoints=policy == OURS,
    )
    said = block.last.live_prefixes
    tokens = block.last.offline.tokens - block.first.offline.tokens
    return Played(
        ttft_ms=np.array([answer.ttft_ms for answer in block.answers]),
        tbt_ms=np.concatenate([answer.tbts_ms for answer in block.answers]),
        found=said.found_tokens / said.prompt_tokens,
        lost=said.lost_tokens / said.prompt_tokens,
        offline_tokens_per_s=tokens / (block.ended_s - block.began_s),
    )


def measure() -> list[Figure]:
    """Each engine under both kinds of promise, with as much kept as `SHARES` say.

    FIELDS=0,3 chooses; by default all but the last.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    wanted = [fields()[int(number)] for number in os.environ.get("FIELDS", "0,1,2").split(",")]
    return [figure for field in wanted for figure in figures(field)]


def figures(field: Field) -> Iterator[Figure]:
    """Figures of one engine."""
    alone = play(field, ALONE, {})
    yield figure(f"{field.name}: online-only, found", "%", 100 * alone.found, "", reached=True)
    p99s = {
        name: float(np.percentile(values, 99))
        for name, values in (("ttft_slo_ms", alone.ttft_ms), ("tbt_slo_ms", alone.tbt_ms))
    }
    for name, promises in PROMISES.items():
        least = None
        for share in SHARES:
            ours = play(field, OURS, {**(promises or p99s), "live_prefixes": share})
            least = least or ours
            title = f"{field.name}, {name}, {share:.0%} kept"
            lost = f"{100 * ours.lost:.3g} % lost"
            yield figure(f"{title}: found", "%", 100 * ours.found, "", reached=True, note=lost)
            for what, values, base in (
                ("TTFT", ours.ttft_ms, alone.ttft_ms),
                ("TBT", ours.tbt_ms, alone.tbt_ms),
            ):
                for rank in (50, 99):
                    ratio = float(np.percentile(values, rank) / np.percentile(base, rank))
                    yield figure(
                        f"{title}: P{rank} {what} to online-only's", "", ratio, "<= 1.1", reached=ratio <= 1.1
                    )
            rows = ours.offline_tokens_per_s / least.offline_tokens_per_s
            yield figure(f"{title}: offline tokens to none kept", "", rows, ">= 0.95", reached=rows >= 0.95)


def figure(name: str, unit: str, value: float, target: str, *, reached: bool, note: str = "") -> Figure:
    return Figure(
        name=name, unit=unit, samples=[value], target=target, reached=reached, command=COMMAND, note=note
    )
