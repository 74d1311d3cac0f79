"""`--on-late push` on simulated time: rows late at the deadline and live latency, beside `expire` and no rows.

The real scheduler plans every iteration (`tests.benchmarks.simulation` says what is real and what is not). A job
has more rows than fit before its deadline at the usual limits. Under push its rows carry the mark while the 90 %
forecast is behind the deadline, looked at as often as a harvester does.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from math import ceil, inf
from typing import Any

import numpy as np

from conserve.bench.offline import like_papers
from conserve.bench.traces import gamma
from conserve.jobs.deadlines.forecast import finite, forecasts
from conserve.jobs.deadlines.rate import WEEK, Rates
from conserve.jobs.deadlines.work import QueuedJob, RemainingWork
from conserve.jobs.harvest.turns import COURSES, LOOK_S
from conserve.store.books.slots import SLOT_S
from tests.benchmarks.report import Figure
from tests.benchmarks.simulation import ALONE, OURS, SEED, paper

COMMAND = "python -m tests.benchmarks pushing"
SCALE = 1.5
TIME_S = 240.0  # from the job's first row to its deadline
MORE = (1.25, 1.5)  # rows of the job for one that is done in time at the usual limits
MOST_ROWS = 1 << 14
PROMISES: Mapping[str, Mapping[str, Any]] = {
    "harm 10 %": {"harm": 0.1},
    "TTFT 2 s, TBT 10 ms": {"ttft_slo_ms": 2000.0, "tbt_slo_ms": 10.0},
    "TTFT 2 s, TBT 60 ms": {"ttft_slo_ms": 2000.0, "tbt_slo_ms": 60.0},
}
PER_S, BURSTINESS, PROMPT, ANSWER = 1.0, 0.5, 4096, 256  # live requests


@dataclass(slots=True)
class Outcome:
    """A run up to the deadline."""

    ttft_ms: float = 0.0  # P99 of live requests
    tbt_ms: float = 0.0
    done: int = 0  # rows
    tokens: int = 0  # of rows
    pushed: int = 0  # of these, beyond the usual limit
    marked: list[bool] = field(default_factory=list)  # at each look: the job's rows push


def measure() -> list[Figure]:
    """Rows late and live P99 under both promises and for each size of the job."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    alone = run(ALONE, {})
    found = [one for name, promises in PROMISES.items() for one in figures(name, promises, alone)]
    return [*latencies("no rows", alone, inf, inf), *found]


def figures(name: str, promises: Mapping[str, Any], alone: Outcome) -> Iterator[Figure]:
    """Figures of one promise; its TBT is that of a harm beside `alone` where it is a harm."""
    usual = run(OURS, promises)
    tbt_ms = promises.get("tbt_slo_ms") or (1 + promises["harm"]) * alone.tbt_ms
    yield from latencies(f"{name}: expire", usual, inf, tbt_ms)
    for more in MORE:
        job = ceil(more * usual.done)
        pushed = run(OURS, promises, rows=job, rate=usual.tokens / TIME_S)
        late = [100 * (1 - one.done / job) for one in (usual, pushed)]
        share = f"{pushed.pushed / pushed.tokens:.1%} of the tokens pushed, {pushed.marked.count(True)} of "
        note = f"expire {late[0]:.3g} %; {share}{len(pushed.marked)} looks marked"
        yield figure(
            f"{name}: {more:g} times the rows, late", "%", late[1], "<= expire's", late[1] <= late[0], note
        )
        yield from latencies(
            f"{name}: {more:g} times the rows, push", pushed, SCALE * usual.ttft_ms, SCALE * tbt_ms
        )


def latencies(name: str, one: Outcome, ttft_ms: float, tbt_ms: float) -> Iterator[Figure]:
    """The P99s of live requests beside the largest that are promised."""
    for what, ms, most in (("TTFT", one.ttft_ms, ttft_ms), ("TBT", one.tbt_ms, tbt_ms)):
        target = f"<= {most:.4g}" if most < inf else ""
        yield figure(f"{name}, P99 {what}", "ms", ms, target, ms <= most, "")


def figure(name: str, unit: str, value: float, target: str, reached: bool, note: str) -> Figure:
    return Figure(
        name=name, unit=unit, samples=[value], target=target, reached=reached, command=COMMAND, note=note
    )


@cache
def row_lengths() -> Sequence[tuple[int, int]]:
    """Tokens of prompts and answers."""
    return list(like_papers(MOST_ROWS, factor=1.0, most=32768, seed=SEED))


def run(
    policy: str, promises: Mapping[str, Any], *, rows: int = MOST_ROWS, rate: float | None = None
) -> Outcome:
    """Run a job of so many rows beside live requests; with a rate, which forecasts follow, it may push."""
    from conserve.engine.vllm.simulation.play import SimulatedMachine, _engine

    setting, lengths, found = paper(PER_S), row_lengths()[:rows], Outcome()
    machine = SimulatedMachine(
        model=setting.model, layers=setting.layers, flags=setting.flags, num_blocks=setting.num_blocks
    )
    section = {**promises, "push_slo_scale": SCALE}
    with _engine(
        machine,
        policy,
        iter(lengths),
        window=setting.window,
        promises=section,
        separable=True,
        checkpoints=False,
    ) as engine:
        began_s, given, plain, until = engine.clock.now, 0, engine.request, engine.go_on_until

        def request(*args: Any, **said: Any) -> Any:
            nonlocal given
            if not said.get("offline"):
                return plain(*args, **said)
            now = engine.clock.now - began_s
            if rate and now >= len(found.marked) * LOOK_S:
                found.marked.append(late(lengths, given - engine._rows, rate, now))
            given += 1
            pushes = bool(found.marked and found.marked[-1])
            return plain(*args, **said, **({"extra_args": {"conserve_push": 1}} if pushes else {}))

        def go_on_until(moment: float) -> None:
            until(moment)
            found.done = given - engine._rows

        engine.request, engine.go_on_until = request, go_on_until
        answers = engine.play(gamma(PER_S, BURSTINESS, TIME_S, PROMPT, ANSWER, SEED), TIME_S)
        found.tokens, found.pushed = engine.counted, engine.said["pushing"]["tokens"]
    found.ttft_ms = p99([answer.ttft_ms for answer in answers])
    found.tbt_ms = p99(np.concatenate([answer.tbts_ms for answer in answers]))
    return found


def late(lengths: Sequence[tuple[int, int]], done: int, rate: float, now: float) -> bool:
    """True if the 90 % forecast is behind the deadline: the rate was seen in every slot of a week."""
    mean = sum(map(sum, islice(lengths, done))) / done if done else 1.0 * sum(lengths[0])
    job = QueuedJob(
        id="job",
        seq=0,
        work=RemainingWork(rows_left=len(lengths) - done, row_tokens=mean, rows_seen=done),
        deadline=TIME_S,
    )
    rates = Rates(dict.fromkeys(range(-WEEK, 0), rate))
    assert TIME_S < SLOT_S
    return finite(forecasts([job], rates, now=now, courses=COURSES)["job"].done_90) > TIME_S


def p99(ms: Any) -> float:
    return float(np.percentile(ms, 99, method="inverted_cdf"))
