"""Calibration of the forecast, over replayed days: how often a job is done by the moment it was forecast for.

Pure simulation. Live traffic of a trace takes its part of an engine's tokens, minute by minute, and jobs take the
rest in the order of the harvester. A forecast sees what a store would: rates of the quarters of an hour before, and
the rows answered so far.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pyarrow.parquet as pq

from conserve.jobs.deadlines.forecast import Forecast, forecasts
from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.slack import SHARE
from conserve.jobs.deadlines.work import QueuedJob, RemainingWork
from conserve.store.books.slots import SLOT_S
from conserve.store.books.states import OnLate
from tests.benchmarks.report import Figure

COMMAND = "python -m tests.benchmarks forecast"
DATA = Path(__file__).parent / "data"
BUNDLED = Path(__file__).parents[2] / "conserve" / "bench" / "data"
SEED = 61
CASES = 200  # of each trace
DAYS = 8
DAY_MIN = 24 * 60
BUSY = 0.4  # of the engine's tokens that live traffic takes on average
LEAST_KEPT, MOST_KEPT = 0.85, 0.95


class Trace(NamedTuple):
    """Live requests of a trace, or the rates of a week, as tokens by minute over several days."""

    name: str
    minutes: Callable[[random.Random], list[float]]
    held_back: bool = False  # the constants of the forecast were chosen without it


def week(path: Path) -> Callable[[random.Random], list[float]]:
    """A week of rates, as it was."""
    return lambda dice: [float(rate) * 60 for rate in pq.read_table(path)["tokens_per_s"].to_pylist()]


def stretched(path: Path) -> Callable[[random.Random], list[float]]:
    """Days of a short trace stretched to 24 hours; on each, a request comes Poisson(1) times."""

    def minutes(dice: random.Random) -> list[float]:
        table = pq.read_table(path)
        arrivals = table["arrival_s"].to_pylist()
        tokens = [
            a + b
            for a, b in zip(*(table[f"{c}_tokens"].to_pylist() for c in ("input", "output")), strict=True)
        ]
        scale = (DAY_MIN - 1e-6) / (arrivals[-1] + 1e-9)
        places = [int(arrival * scale) for arrival in arrivals]
        found = [0.0] * (DAYS * DAY_MIN)
        for day in range(DAYS):
            for place, size in zip(places, tokens, strict=True):
                found[day * DAY_MIN + place] += size * poisson_1(dice)
        return found

    return minutes


def poisson_1(dice: random.Random) -> int:
    """Draw of a Poisson distribution of mean 1."""
    product, count = dice.random(), 0
    while product > 0.36787944117144233:
        product *= dice.random()
        count += 1
    return count


TRACES = (
    Trace("azure_conv_2023_1h", stretched(DATA / "azure_conv_2023_1h.parquet")),
    Trace("burstgpt_week1", week(DATA / "burstgpt_week1_minute_token_rate.parquet")),
    Trace(
        "azure_code_2023_10min", stretched(BUNDLED / "azure_code_2023_10min_bursty.parquet"), held_back=True
    ),
    Trace("mooncake_conversation", stretched(DATA / "mooncake_conversation_lengths.parquet"), held_back=True),
)


def measure() -> list[Figure]:
    """Shares of jobs that were done by the moment forecast with 90 and 50 % probability."""
    return [figure for trace in TRACES for figure in calibration(trace)]


def calibration(trace: Trace) -> Iterator[Figure]:
    """Figures of one trace."""
    dice = random.Random(SEED)
    harvest = harvested_by_minute(trace.minutes(dice))
    lengths = [a + b for a, b in zip(*(column.to_pylist() for column in row_lengths()), strict=True)]
    outcomes = [case(harvest, lengths, dice) for _ in range(CASES)]
    kept = fmean(outcome.kept_90 for outcome in outcomes)
    half = fmean(outcome.kept_50 for outcome in outcomes)
    said = fmean(outcome.in_time_said for outcome in outcomes)
    true = fmean(outcome.in_time for outcome in outcomes)
    label = f"{trace.name}{', held back' if trace.held_back else ''}"
    reached = LEAST_KEPT <= kept <= MOST_KEPT
    yield figure(f"{label}: done by the 90 % forecast", [100 * kept], "85 to 95", reached)
    yield figure(f"{label}: done by the 50 % forecast", [100 * half], "", True)
    yield figure(f"{label}: in time, said", [100 * said], "", True)
    yield figure(f"{label}: in time, true", [100 * true], "", True)
    brier = fmean((outcome.in_time_said - outcome.in_time) ** 2 for outcome in outcomes)
    yield figure(f"{label}: squared error of that", [brier], "< 0.25, a coin's", brier < 0.25, unit="")


def figure(name: str, samples: Sequence[float], target: str, reached: bool, unit: str = "%") -> Figure:
    """A figure, in percent unless another unit is named."""
    return Figure(name=name, unit=unit, samples=samples, target=target, reached=reached, command=COMMAND)


def row_lengths() -> list[object]:
    """Lengths of prompts and answers of offline rows."""
    table = pq.read_table(DATA / "arxiv_summarization_lengths.parquet")
    return [table["input_tokens"], table["output_tokens"]]


def harvested_by_minute(live: Sequence[float]) -> list[float]:
    """Tokens that are left for rows in each minute."""
    most = fmean(live) / BUSY
    return [max(0.0, most - tokens) for tokens in live]


class Outcome(NamedTuple):
    """One job: what was forecast, against what came."""

    kept_90: bool
    kept_50: bool
    in_time_said: float
    in_time: bool


@dataclass(slots=True)
class Running:
    """A job of the simulated queue."""

    job: QueuedJob
    tokens_left: float
    rank: float  # among jobs without a deadline, whose order prefixes decide


def case(harvest: Sequence[float], lengths: Sequence[int], dice: random.Random) -> Outcome:
    """Forecast one job of a random queue at a random minute, and let the queue run."""
    now_min = dice.randrange(DAY_MIN, len(harvest) - 2 * DAY_MIN)
    queue = random_queue(fmean(harvest) * 60, lengths, now_min * 60.0, dice)
    target = dice.choice([running.job for running in queue])
    found = forecasts(
        [running.job for running in queue], seen(harvest, now_min), now=now_min * 60.0, courses=100
    )
    done = done_at(queue, target.id, harvest, now_min)
    return outcome(found[target.id], done, target)


def outcome(found: Forecast, done: float, job: QueuedJob) -> Outcome:
    """Compare a forecast with the moment at which the job was done."""
    late = float("inf")
    deadline = job.deadline if job.deadline is not None else late
    return Outcome(
        kept_90=done <= (found.done_90 or late),
        kept_50=done <= (found.done_50 or late),
        in_time_said=1.0 if found.in_time is None else found.in_time,
        in_time=done <= deadline,
    )


def random_queue(
    hour_tokens: float, lengths: Sequence[int], now: float, dice: random.Random
) -> list[Running]:
    """One to five jobs of a quarter of an hour to eight hours, some with a deadline, some with rows answered."""
    queue = []
    for seq in range(dice.randint(1, 5)):
        wanted = hour_tokens * 0.25 * 32 ** dice.random()
        scale = hour_tokens / 2000 / fmean(lengths) * dice.lognormvariate(0, 0.4)
        rows, tokens = 0, 0.0
        while tokens < wanted:
            tokens += scale * dice.choice(lengths)
            rows += 1
        seen_rows = dice.choice((0, 10, 100, 1000))
        mean = scale * fmean(dice.choices(lengths, k=seen_rows)) if seen_rows else hour_tokens / 2000
        deadline = now + 3600 * dice.uniform(0.5, 24) if dice.random() < 0.6 else None
        work = RemainingWork(rows_left=rows, row_tokens=mean, rows_seen=seen_rows)
        job = QueuedJob(id=f"job-{seq}", seq=seq, work=work, deadline=deadline, on_late=OnLate.BEST_EFFORT)
        queue.append(Running(job, tokens, dice.random()))
    return queue


def seen(harvest: Sequence[float], now_min: int) -> Rates:
    """Rates that the store has by now."""
    slot_min = SLOT_S // 60
    slots = []
    for begin in range(0, now_min, slot_min):
        minutes = harvest[begin : min(begin + slot_min, now_min)]
        slots.append((begin // slot_min, sum(minutes), 60.0 * len(minutes)))
    return Rates.of(slots)


def done_at(queue: Sequence[Running], target: str, harvest: Sequence[float], now_min: int) -> float:
    """Moment at which the job is done; infinite if the trace ends before."""
    for minute in range(now_min, len(harvest)):
        spend(queue, harvest[minute])
        if any(running.job.id == target and running.tokens_left <= 0 for running in queue):
            return (minute + 1) * 60.0
    return float("inf")


def spend(queue: Sequence[Running], tokens: float) -> None:
    """Give a minute's tokens to the jobs: by deadline, with a share for those without one."""
    left = [running for running in queue if running.tokens_left > 0]
    dated = sorted((r for r in left if r.job.deadline is not None), key=lambda r: r.job.deadline or 0.0)
    undated = sorted((r for r in left if r.job.deadline is None), key=lambda r: r.rank)
    kept = tokens * SHARE if dated and undated else 0.0
    rest = give(dated, tokens - kept) if dated else tokens
    give([*undated, *dated], kept + rest)


def give(jobs: Sequence[Running], tokens: float) -> float:
    """Give tokens to jobs in turn; returns what is over."""
    for running in jobs:
        given = min(tokens, running.tokens_left)
        running.tokens_left -= given
        tokens -= given
    return tokens
