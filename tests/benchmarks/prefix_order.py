"""Gain of prefix order: real few-shot jobs in the order of their prefixes and of a shuffled input."""

import asyncio
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from conserve.config import load
from conserve.endpoints.protocol import Url
from conserve.endpoints.wrapped import BorrowedEndpoint
from conserve.engine.vllm.embedded import EmbeddedEndpoint
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Order, Task
from conserve.store.books.readings import read_jobs
from conserve.store.database.store import Store
from tests.benchmarks.real_engine import EXAMPLE
from tests.benchmarks.report import Figure
from tests.submitting import submit

COMMAND = "python -m tests.benchmarks prefix_order"
MMLU = Path(__file__).parent / "data" / "mmlu_57x20.parquet"
SEED = 57
BLOCK = 32  # tokens
KV_BYTES = 100 << 20  # about 4,500 tokens: a few subjects' prefixes
FLAGS = (
    *("--max-model-len", "4096", "--block-size", str(BLOCK)),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
)
SHOTS = 8
PAIRS = 3  # of the job that shares nothing


def measure() -> list[Figure]:
    """Run the three jobs in turn on one engine whose KV cache is emptied before each run."""
    return asyncio.run(compare())


async def compare() -> list[Figure]:
    endpoint = EmbeddedEndpoint(engine_flags=FLAGS, cache_dir=load().models_folder)
    await endpoint.start()
    bench = Bench(endpoint)
    try:
        await bench.run(unshared()[:50], Order.INPUT, max_tokens=32)  # warm-up
        return [*await few_shot(bench), *await one_prefix(bench), *await no_sharing(bench)]
    finally:
        await endpoint.close()


class Run(NamedTuple):
    """One job from submit to its last durable answer."""

    rows: int
    wall_s: float
    cpu_s: float  # of this process and the engine's
    prompt_tokens: int
    cached_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.prompt_tokens / self.cpu_s

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def __str__(self) -> str:
        return (
            f"{self.rows:>5} rows {self.wall_s:>7.1f} s {self.cpu_s:>7.1f} CPU s "
            f"{self.tokens_per_s:>8,.0f} prompt tokens/s, "
            f"{self.computed_tokens:,} of {self.prompt_tokens:,} computed"
        )


def spent_cpu_s() -> float:
    """CPU seconds of this process and those it has started, so far."""
    us = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (us, *us.children(recursive=True)))


@dataclass(slots=True)
class Bench:
    """One engine, and jobs through it."""

    endpoint: EmbeddedEndpoint

    async def run(self, prompts: Sequence[str], order: Order, *, max_tokens: int) -> Run:
        """Submit the prompts and harvest them, from an empty prefix cache."""
        llm = (await self.endpoint._engine()).serving.llm
        assert await llm.reset_prefix_cache()
        task = Task(
            kind=Kind.PROMPT,
            url=Url.COMPLETIONS,
            template="{{ prompt }}",
            params={"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            order=order,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.parquet"
            pq.write_table(pa.table({"prompt": prompts}), path)
            settings = load({"home": Path(folder) / "home"})
            store = Store.open(settings)
            started, cpu_s = time.perf_counter(), spent_cpu_s()
            submit(store, str(path), task)
            tally = await Harvester(store, BorrowedEndpoint(self.endpoint)).run(asyncio.Event())
            wall_s, cpu_s = time.perf_counter() - started, spent_cpu_s() - cpu_s
            store.close()
            assert tally.succeeded == len(prompts)
            (job,) = read_jobs(settings, now=time.time())
        run = Run(len(prompts), wall_s, cpu_s, job.prompt_tokens, job.cached_tokens)
        print(f"     {order:<7} {run}", flush=True)
        return run

    async def tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        """The prompts as the engine sees them."""
        tokenizer = (await self.endpoint._engine()).serving.llm.renderer.tokenizer
        return [tokenizer.encode(prompt) for prompt in prompts]


async def few_shot(bench: Bench) -> list[Figure]:
    """MMLU, 5-shot: 57 prefixes, 20 rows of each, shuffled; answers of one token."""
    prompts = mmlu()
    half = len(prompts) // 2
    by_input, by_prefix = [], []
    for part in (prompts[:half], prompts[half:]):  # input order is slow, so each row runs in it once
        by_input.append(await bench.run(part, Order.INPUT, max_tokens=1))
        by_prefix.append(await bench.run(prompts, Order.PREFIX, max_tokens=1))
    pairs = list(zip(by_prefix, by_input, strict=True))
    ratios = [ours.tokens_per_s / plain.tokens_per_s for ours, plain in pairs]
    tree = Tree.of(await bench.tokens(prompts))
    excess = max(recomputed(run, tree) for run in by_prefix)
    return [
        Figure(
            name="prefix order / input order, MMLU 5-shot: throughput",
            unit="times",
            samples=ratios,
            target=">= 2.5, goal 4",
            reached=statistics.median(ratios) >= 2.5,
            command=COMMAND,
        ),
        Figure(
            name="the same by the engine's CPU time",
            unit="times",
            samples=[ours.tokens_per_cpu_s / plain.tokens_per_cpu_s for ours, plain in pairs],
            target="",
            reached=True,
            command=COMMAND,
        ),
        excess_figure(excess),
    ]


def excess_figure(excess: float) -> Figure:
    """Prefix tokens computed beyond each prefix once, as a share of those."""
    return Figure(
        name="the same: prefix tokens computed beyond the least",
        unit="%",
        samples=[100 * excess],
        target="<= 5",
        reached=excess <= 0.05,
        command=COMMAND,
    )


async def one_prefix(bench: Bench) -> list[Figure]:
    """GSM8K, 8-shot: all rows share one prefix, which stays in the cache whatever the order."""
    prompts = gsm8k()
    runs = {order: await bench.run(prompts, order, max_tokens=32) for order in (Order.INPUT, Order.PREFIX)}
    excess = recomputed(runs[Order.PREFIX], Tree.of(await bench.tokens(prompts)))
    return [
        Figure(
            name="prefix order / input order, GSM8K 8-shot: throughput",
            unit="times",
            samples=[runs[Order.PREFIX].tokens_per_s / runs[Order.INPUT].tokens_per_s],
            target="",
            reached=True,
            command=COMMAND,
        ),
        excess_figure(excess),
    ]


async def no_sharing(bench: Bench) -> list[Figure]:
    """Bare questions: nothing to gain, so what the order costs is all there is to see."""
    prompts, ratios = unshared(), []
    for pair in range(PAIRS):
        orders = (Order.INPUT, Order.PREFIX) if pair % 2 == 0 else (Order.PREFIX, Order.INPUT)
        runs = {order: await bench.run(prompts, order, max_tokens=32) for order in orders}
        ratios.append(runs[Order.PREFIX].wall_s / runs[Order.INPUT].wall_s)
    return [
        Figure(
            name="prefix order / input order, nothing shared: time",
            unit="times",
            samples=ratios,
            target="<= 1.01",
            reached=statistics.median(ratios) <= 1.01,
            command=COMMAND,
        )
    ]


@dataclass(frozen=True, slots=True)
class Tree:
    """The job's prompts as a tree of KV blocks: what must be computed at the least."""

    shared: int  # tokens in blocks that more than one row begins with, each counted once
    own: int  # tokens of each row behind those

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> "Tree":
        """Count; a prompt's last token is always computed, so a block that ends with it is its own."""
        rows: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for prompt in prompts:
            for end in range(BLOCK, len(prompt), BLOCK):
                rows[tuple(prompt[:end])] += 1
        shared = sum(1 for count in rows.values() if count > 1)
        reused = sum(count for count in rows.values() if count > 1)
        return cls(shared * BLOCK, sum(map(len, prompts)) - reused * BLOCK)


def recomputed(run: Run, tree: Tree) -> float:
    """Prefix tokens computed beyond each distinct one once, as a share of those."""
    return (run.computed_tokens - tree.own) / tree.shared - 1


def mmlu() -> list[str]:
    """The rows, shuffled: five answered questions of the subject in front of each."""
    subjects: defaultdict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in pq.read_table(MMLU).to_pylist():
        subjects[row["subject"]][row["split"]].append(row)
    prompts = []
    for subject, rows in subjects.items():
        about = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        head += "".join(f"{question(row)} {'ABCD'[row['answer']]}\n\n" for row in rows["dev"])
        prompts += [head + question(row) for row in rows["test"]]
    random.Random(SEED).shuffle(prompts)
    return prompts


def question(row: Mapping[str, Any]) -> str:
    """A question of MMLU's with its choices."""
    choices = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", row["choices"], strict=True))
    return f"{row['question'].strip()}\n{choices}Answer:"


def gsm8k() -> list[str]:
    """Questions behind eight that are answered."""
    rows = pq.read_table(EXAMPLE).to_pylist()
    head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:SHOTS])
    return [f"{head}Question: {row['question']}\nAnswer:" for row in rows[SHOTS:]]


def unshared() -> list[str]:
    """Questions alone, each in blocks of its own."""
    return [str(text) for text in pq.read_table(EXAMPLE)["question"].to_pylist()]
