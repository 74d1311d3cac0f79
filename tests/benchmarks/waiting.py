"""The waiting window: what it costs, and what sharing costs fairness.

Nothing is computed. Prefix tokens reused are those that a prefix cache of `CACHE_BLOCKS`, which forgets the block
used least recently, would have held when the row came.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from conserve.config import load
from conserve.endpoints.fake import FakeEndpoint
from conserve.endpoints.protocol import KvCache, Url
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Task
from conserve.jobs.window.prefix_tree import Key
from conserve.jobs.window.prompt_key import prompt_key
from conserve.jobs.window.waiting import WaitingRow, WaitingWindow
from conserve.store.database.store import Store
from tests.benchmarks.inputs import short_rows
from tests.benchmarks.report import RAW, Figure
from tests.submitting import submit

COMMAND = "python -m tests.benchmarks waiting"
SEED = 44
ROWS, ROW_TOKENS, GROUP_TOKENS, GROUPS, JOBS = 100_000, 500, 400, 1000, 4
RUNS = 3
MOST_INSERT_S, FEWEST_POPS, MOST_BYTES = 5.0, 50_000, 1024

UTILITIES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
TURNS, QUEUE = 60_000, 500  # rows given out, each replaced by one that comes; rows that wait meanwhile
SUBJECTS, SUBJECT_BLOCKS, BLOCKS = 64, 25, 31  # a prefix of 400 tokens each, of 500
LONE_EVERY, LONE_LATER = 10, 100  # one in so many shares nothing: of those there are, and of those that come
CACHE_BLOCKS = 16 * BLOCKS


def measure() -> list[Figure]:
    """All figures; the raw numbers go beside those of the others."""
    raw: dict[str, Any] = {}
    figures = [*costs(raw), *drained(raw), *fairness(raw)]
    RAW.mkdir(exist_ok=True)
    name = f"waiting-{time.strftime('%Y%m%dT%H%M%S')}"
    (RAW / f"{name}.json").write_text(json.dumps(raw))
    print(f"     raw numbers: {name}.json in .bench/", flush=True)
    return figures


# What it costs.


def costs(raw: dict[str, Any]) -> list[Figure]:
    """Time to take all rows in, their prompts hashed; to give them out; and memory."""
    bodies = prompts()
    insert_s, pops, cpu_us = [], [], []
    for run in range(RUNS):
        window = WaitingWindow(0.9, seed=run)
        cpu, begun = time.process_time(), time.perf_counter()
        for row, body in bodies:
            window.insert(row, prompt_key(Url.CHAT, body, KvCache()))
        between = time.perf_counter()
        while len(window):
            window.pop()
        insert_s.append(between - begun)
        pops.append(len(bodies) / (time.perf_counter() - between))
        cpu_us.append((time.process_time() - cpu) / len(bodies) * 1e6)
    raw["costs"] = {"insert_s": insert_s, "pops_per_s": pops, "cpu_us": cpu_us}
    few = sorted(insert_s)[RUNS // 2] <= MOST_INSERT_S
    return [
        figure(
            f"{ROWS:,} rows of {ROW_TOKENS} tokens into the window",
            "s",
            insert_s,
            f"<= {MOST_INSERT_S:g}",
            few,
        ),
        figure(
            "rows out of it", "rows/s", pops, f">= {FEWEST_POPS:,}", statistics.median(pops) >= FEWEST_POPS
        ),
        *memory(bodies),
    ]


def prompts() -> list[tuple[WaitingRow, Mapping[str, Any]]]:
    """Chats of random words in groups, and the rows of several jobs that they are."""
    dice = random.Random(SEED)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=7)) + " " for _ in range(1000)]

    def text(tokens: int) -> str:
        return "".join(dice.choices(words, k=tokens * 4 // 8))

    groups = [text(GROUP_TOKENS) for _ in range(GROUPS)]
    return [
        (
            WaitingRow(n % JOBS, n // JOBS),
            {
                "messages": [
                    {"role": "user", "content": dice.choice(groups) + text(ROW_TOKENS - GROUP_TOKENS)}
                ]
            },
        )
        for n in range(ROWS)
    ]


def memory(bodies: Sequence[tuple[WaitingRow, Mapping[str, Any]]]) -> list[Figure]:
    """Bytes a waiting row beyond its key: in groups, and where each branch of the tree has only two children."""
    grouped = [(row, prompt_key(Url.CHAT, body, KvCache())) for row, body in bodies]
    forked = [(row, forks(number)) for number, (row, _) in enumerate(bodies)]
    found = []
    for name, rows in (("", grouped), (", each branch with two children", forked)):
        tracemalloc.start()
        window = WaitingWindow(1.0)
        before = tracemalloc.get_traced_memory()[0]
        for row, key in rows:
            window.insert(row, key)
        for _ in range(100):
            window.pop()
        used = (tracemalloc.get_traced_memory()[0] - before) / len(window)
        tracemalloc.stop()
        found.append(
            figure(f"memory a waiting row{name}", "B", [used], f"<= {MOST_BYTES}", used <= MOST_BYTES)
        )
    return found


def forks(number: int) -> Key:
    """A key whose blocks are the number's bits, the last first."""
    return array("q", [(number & ((2 << bit) - 1)) | (2 << bit) for bit in range(17)])


# Through the store.


def drained(raw: dict[str, Any]) -> list[Figure]:
    """The benchmark `bookkeeping` with the rows in several jobs, so that all go through the window."""
    with tempfile.TemporaryDirectory() as folder:
        data = short_rows(Path(folder), ROWS // JOBS)
        rates, cpu_us = zip(*(drain(Path(folder) / f"home-{run}", data) for run in range(RUNS)), strict=True)
    raw["drained"] = {"rows_per_s": rates, "cpu_us": cpu_us}
    return [
        figure(f"claim and commit, {JOBS} jobs through the window", "rows/s", rates, "none", True),
        figure("CPU time a row of these", "us", cpu_us, "none", True),
    ]


def drain(home: Path, data: Path) -> tuple[float, float]:
    """Submit the rows several times and harvest them all; rows a second, and CPU time a row in us."""
    store = Store.open(load({"home": home}))
    for job in range(JOBS):
        submit(store, str(data), Task(kind=Kind.PROMPT, template=f"{{{{ q }}}} {job}"))
    cpu, begun = time.process_time(), time.perf_counter()
    tally = asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    assert tally.succeeded == ROWS
    store.close()
    return ROWS / wall_s, cpu_s / ROWS * 1e6


# Sharing against fairness.


class Fairness(NamedTuple):
    """Result of one utility."""

    utility: float
    lone_later: bool  # whether rows without sharing go on coming
    reused: float  # share of prompt tokens found in the cache
    longest: int  # turns that a row without sharing has waited, at most
    served: int  # rows without sharing that got their turn
    waiting: int  # and that had not, at the end
    bound: float  # expected turns of a row with as many staler ones as there are rows


def fairness(raw: dict[str, Any]) -> list[Figure]:
    """A stream of rows that share prefixes and never ends, beside some that share nothing."""
    found = [stream(utility, lone_later=later) for later in (False, True) for utility in UTILITIES]
    raw["fairness"] = [one._asdict() for one in found]
    figures = []
    for one in found:
        starves = one.utility == 1
        kept = one.served == 0 if starves else one.longest <= one.bound
        note = f"{one.served} had their turn, {one.waiting} wait"
        target = "for ever" if starves else f"<= {one.bound:,.0f}"
        name = f"utility {one.utility:g}" + (", more such rows coming" if one.lone_later else "")
        if not one.lone_later:
            figures.append(
                figure(f"longest wait without sharing, {name}", "turns", [one.longest], target, kept, note)
            )
        figures.append(figure(f"prompt tokens reused, {name}", "%", [one.reused * 100], "none", True, note))
    return figures


def stream(utility: float, *, lone_later: bool) -> Fairness:
    """Play a stream of rows: as many come as go."""
    dice, blocks = random.Random(SEED), count()
    subjects = [[next(blocks) for _ in range(SUBJECT_BLOCKS)] for _ in range(SUBJECTS)]
    window = WaitingWindow(utility, seed=SEED)
    cache = Cache(CACHE_BLOCKS)
    keys: dict[int, Key] = {}
    lone: dict[int, int] = {}  # position -> turn in which it came
    longest = served = computed = total = 0

    def come(position: int, turn: int) -> None:
        every = LONE_EVERY if position < QUEUE else LONE_LATER
        alone = position % every == 0 and (lone_later or position < QUEUE)
        front = [] if alone else dice.choice(subjects)
        keys[position] = array("q", [*front, *(next(blocks) for _ in range(BLOCKS - len(front)))])
        if alone:
            lone[position] = turn
        window.insert(WaitingRow(0, position), keys[position])

    for position in range(QUEUE):
        come(position, 0)
    for turn in range(TURNS):
        come(QUEUE + turn, turn)
        position = window.pop().position
        key = keys.pop(position)
        computed += cache.compute(key)
        total += len(key)
        if position in lone:
            longest = max(longest, turn - lone.pop(position))
            served += 1
    longest = max([longest, *(TURNS - came for came in lone.values())])
    bound = (QUEUE + 1) / (1 - utility) if utility < 1 else float("inf")
    return Fairness(utility, lone_later, 1 - computed / total, longest, served, len(lone), bound)


class Cache:
    """A prefix cache that forgets the block used least recently, of one row the last one first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def compute(self, key: Sequence[int]) -> int:
        """Number of this prompt's blocks that the cache lacks; it has them all afterwards."""
        missing = next((len(key) - depth for depth, block in enumerate(key) if block not in self._held), 0)
        for block in reversed(key):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)
        return missing


# Reports.


def figure(
    name: str, unit: str, samples: Sequence[float], target: str, reached: bool, note: str = ""
) -> Figure:
    return Figure(
        name=name, unit=unit, samples=samples, target=target, reached=reached, command=COMMAND, note=note
    )
