"""Deadlines over replayed days: work that is late in slack order, first come first served, and with an oracle.

Pure simulation. Thirty jobs come over a day; each minute gives them the tokens that live traffic leaves, so
no order takes a token from live requests. Rows that a job has left at its deadline are late, and leave the queue. A
prefix cache says which blocks of a prompt are computed.
"""

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean, median
from typing import NamedTuple

from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.slack import SlackOrder, slack_order
from conserve.jobs.deadlines.work import QueuedJob, RemainingWork
from conserve.jobs.window.prefix_tree import Key
from conserve.jobs.window.waiting import WaitingRow, WaitingWindow
from conserve.store.books.slots import SLOT_S
from tests.benchmarks.forecast import DATA, DAY_MIN, harvested_by_minute, stretched, week
from tests.benchmarks.report import Figure
from tests.benchmarks.waiting import Cache

COMMAND = "python -m tests.benchmarks deadlines"
SEED = 62
DAYS = 6  # of queues, over each trace
JOBS, ROWS = 30, (100, 700)
SUBJECTS, SUBJECT_BLOCKS, ROW_BLOCKS = 57, 25, 6  # every job has rows of all subjects, each with its prefix
BLOCK_TOKENS = 16
ANSWERS = (50, 600)  # mean tokens of a job's answers
DATED = 0.7  # of the jobs
TIME_H = (1.0, 10.0)  # from a job's submission to its deadline
LOAD = 0.9  # of the day's tokens that the jobs want if each computes every prefix once
CACHE_BLOCKS = 4 * (SUBJECT_BLOCKS + ROW_BLOCKS)
TRACES = {
    "azure_conv_2023_1h": stretched(DATA / "azure_conv_2023_1h.parquet"),
    "burstgpt_week1": week(DATA / "burstgpt_week1_minute_token_rate.parquet"),
}


class Row(NamedTuple):
    """A row's prompt and the tokens of its answer."""

    key: Key
    answer: float


@dataclass(slots=True)
class Job:
    """A job of the simulated day."""

    seq: int
    submitted_min: int
    deadline_min: int | None
    rows: list[Row]
    done: list[float] = field(default_factory=list)  # tokens computed for each answered row

    @property
    def unanswered(self) -> int:
        return len(self.rows) - len(self.done)

    def queued(self, usual_tokens: float) -> QueuedJob:
        """The job as the slack order takes it; until a row of it is done, rows take `usual_tokens` each."""
        return QueuedJob(
            id=str(self.seq),
            seq=self.seq,
            work=RemainingWork(
                rows_left=self.unanswered,
                row_tokens=fmean(self.done) if self.done else usual_tokens,
                rows_seen=len(self.done),
            ),
            deadline=None if self.deadline_min is None else 60.0 * self.deadline_min,
        )


class Day(NamedTuple):
    """Outcome of a day."""

    late: float  # share of the dated rows that were not done at their deadline
    kept: float  # share of the dated jobs that were
    reused: float  # share of the prompt blocks that the cache held
    undated: float  # share of the undated rows done by the end


Choose = Callable[[WaitingWindow, Mapping[int, Job], int], SlackOrder]


def measure() -> list[Figure]:
    """Late work of each order, over the same days."""
    return [one for name, minutes in TRACES.items() for one in compared(name, minutes(random.Random(SEED)))]


def compared(name: str, live: Sequence[float]) -> Iterator[Figure]:
    """Figures of one trace."""
    harvest = harvested_by_minute(live)
    found: dict[str, list[Day]] = {
        "slack": [],
        "first come": [],
        "prefixes alone": [],
        "strict": [],
        "oracle": [],
    }
    for seed in range(DAYS):
        start = DAY_MIN + (seed % 5) * DAY_MIN
        for order, days in found.items():
            days.append(played(order, harvest, start, seed))
    late = {order: [100 * day.late for day in days] for order, days in found.items()}
    share = median(late["slack"]) / max(median(late["first come"]), 1e-9)
    yield figure(f"{name}: late work, first come", late["first come"], "", True)
    yield figure(f"{name}: late work, prefixes alone", late["prefixes alone"], "", True)
    yield figure(f"{name}: late work, slack order", late["slack"], "<= half of first come", share <= 0.5)
    yield figure(f"{name}: late work, deadlines alone", late["strict"], "", True)
    yield figure(f"{name}: late work, oracle", late["oracle"], "", True)
    for order, days in found.items():
        yield figure(f"{name}: jobs in time, {order}", [100 * day.kept for day in days], "", True)
    for order in ("prefixes alone", "slack", "strict"):
        reused = [100 * day.reused for day in found[order]]
        yield figure(f"{name}: blocks reused, {order}", reused, "", True)
    yield figure(f"{name}: undated rows done, slack", [100 * day.undated for day in found["slack"]], "", True)


def figure(name: str, samples: Sequence[float], target: str, reached: bool) -> Figure:
    """A figure in percent."""
    return Figure(name=name, unit="%", samples=samples, target=target, reached=reached, command=COMMAND)


def jobs_of_a_day(seed: int) -> list[Job]:
    """Thirty jobs, the same for every order."""
    dice, blocks = random.Random(seed), count(1)
    subjects = [[next(blocks) for _ in range(SUBJECT_BLOCKS)] for _ in range(SUBJECTS)]
    submitted = sorted(dice.randrange(int(0.7 * DAY_MIN)) for _ in range(JOBS))
    found = []
    for seq, minute in enumerate(submitted):
        mean = dice.uniform(*ANSWERS)
        rows = [
            Row(
                array("q", [*dice.choice(subjects), *(next(blocks) for _ in range(ROW_BLOCKS))]),
                mean * dice.lognormvariate(-0.125, 0.5),
            )
            for _ in range(dice.randint(*ROWS))
        ]
        deadline = minute + int(60 * dice.uniform(*TIME_H)) if dice.random() < DATED else None
        found.append(Job(seq, minute, deadline, rows))
    return found


def wanted_tokens(jobs: Sequence[Job]) -> float:
    """Tokens of all rows, if each job computes every prefix once."""
    own = sum(BLOCK_TOKENS * ROW_BLOCKS + row.answer for job in jobs for row in job.rows)
    return own + len(jobs) * SUBJECTS * SUBJECT_BLOCKS * BLOCK_TOKENS


def played(name: str, harvest: Sequence[float], start: int, seed: int) -> Day:
    """Play one day in one order."""
    jobs = jobs_of_a_day(seed)
    scale = wanted_tokens(jobs) / LOAD / sum(harvest[start : start + DAY_MIN])
    sim = Simulation(name, {job.seq: job for job in jobs}, seen(harvest, start, scale))
    for minute in range(DAY_MIN):
        sim.step(minute, scale * harvest[start + minute])
    return sim.day()


def seen(harvest: Sequence[float], start: int, scale: float) -> Rates:
    """Rates of the days before, as a store keeps them; the day begins at 0."""
    slot_min = SLOT_S // 60
    return Rates.of(
        [
            ((begin - start) // slot_min, scale * sum(harvest[begin : begin + slot_min]), float(SLOT_S))
            for begin in range(0, start, slot_min)
        ]
    )


class Simulation:
    """A day of one order."""

    def __init__(self, name: str, jobs: Mapping[int, Job], rates: Rates) -> None:
        self._name, self._jobs, self._rates = name, jobs, rates
        self._window = WaitingWindow(1.0 if name == "oracle" else 0.9, seed=SEED)
        self._cache = Cache(CACHE_BLOCKS)
        self._tokens = 0.0  # left of the minutes so far
        self._here: dict[int, Job] = {}
        self._late: dict[int, int] = {}
        self._blocks = self._computed = 0

    def step(self, minute: int, tokens: float) -> None:
        """Let jobs come and expire, then run rows for a minute's tokens."""
        for job in self._jobs.values():
            if job.submitted_min == minute:
                self._here[job.seq] = job
                for position, row in enumerate(job.rows):
                    self._window.insert(WaitingRow(job.seq, position), row.key)
            if job.deadline_min == minute:
                self._late[job.seq] = job.unanswered
                self._window.discard_job(job.seq)
                self._here.pop(job.seq, None)
        self._window.arrange(self._order(minute))
        self._tokens += tokens if len(self._window) else 0.0
        while self._tokens > 0 and len(self._window):
            self._run(self._window.pop())

    def _run(self, row: WaitingRow) -> None:
        job = self._jobs[row.job]
        key, answer = job.rows[row.position]
        computed = self._cache.compute(key)
        self._blocks += len(key)
        self._computed += computed
        tokens = BLOCK_TOKENS * computed + answer
        job.done.append(tokens)
        self._tokens -= tokens
        if not job.unanswered:
            self._here.pop(job.seq)

    def _order(self, minute: int) -> SlackOrder:
        """Order of the jobs that are here."""
        if self._name == "prefixes alone":
            return SlackOrder()
        if self._name == "first come":  # as if each had a deadline, in order of submission
            return SlackOrder(urgent=tuple(sorted(self._here)), share=0.0)
        usual = fmean([fmean(job.done) for job in self._jobs.values() if job.done] or [500.0])
        jobs = [job.queued(usual) for job in self._here.values()]
        if self._name == "oracle":  # earliest deadline first leaves least late, if nothing is kept for others
            return slack_order(jobs, now=60.0 * minute, tokens_per_s=None, share=0.0)
        rate = None if self._name == "strict" else self._rates.mean(60.0 * minute)
        return slack_order(jobs, now=60.0 * minute, tokens_per_s=rate)

    def day(self) -> Day:
        """Outcome of the day; rows of jobs whose deadline is later than it count as undated."""
        dated = [
            job for job in self._jobs.values() if job.deadline_min is not None and job.deadline_min < DAY_MIN
        ]
        undated = [job for job in self._jobs.values() if job not in dated]
        late = sum(self._late[job.seq] for job in dated)
        return Day(
            late=late / sum(len(job.rows) for job in dated),
            kept=fmean(not self._late[job.seq] for job in dated),
            reused=1 - self._computed / self._blocks,
            undated=sum(len(job.done) for job in undated) / max(1, sum(len(job.rows) for job in undated)),
        )
