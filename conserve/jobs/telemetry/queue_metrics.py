"""Metrics of the queue: jobs by state, rows and predicted seconds of work that wait, by deadline."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.config import Settings
from conserve.errors import ConserveError
from conserve.jobs.deadlines.backlog import Backlog, backlog
from conserve.jobs.deadlines.queue import queued
from conserve.jobs.deadlines.rate import Rates
from conserve.store.books.queue_name import read_queue_name
from conserve.store.books.readings import read_harvested, read_jobs
from conserve.store.books.shapes import ListedJob
from conserve.store.books.states import GOING, JobState

LABEL = "queue"  # tells the queues of one Prometheus apart
HOUR_S = 3600
KEPT_S = 30.0
WAIT_S = 3.0  # for which a scrape waits for the store; by default Prometheus waits 10 s for a scrape


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSeen:
    """The queue at one moment, and its name."""

    name: str = ""
    states: Mapping[JobState, int] = field(default_factory=dict)
    rows_waiting: int = 0
    jobs_waiting: int = 0
    backlog: Backlog | None = None


class QueueCollector(Collector):
    """Gauges of the queue as it was last read, and the age of that reading.

    A thread reads the store, so that no scrape waits longer than `WAIT_S` for a database that is away.
    """

    def __init__(
        self, look: Callable[[], QueueSeen | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._clock = look, clock
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None
        self._seen: QueueSeen | None = None
        self._seen_at = clock()  # before the first reading the age is that of this collector

    def collect(self) -> Iterator[Metric]:
        self._newest().join(WAIT_S)
        seen, age_s = self._seen, self._clock() - self._seen_at
        yield GaugeMetricFamily("conserve_queue_age_seconds", "Age of the queue's figures.", age_s)
        if seen is None:
            return
        jobs = GaugeMetricFamily("conserve_jobs", "Jobs of the store by state.", labels=["state", LABEL])
        for state in JobState:
            jobs.add_metric([state.value, seen.name], seen.states.get(state, 0))
        yield jobs
        waiting = "Rows without a result, of jobs that may run."
        yield gauge("conserve_rows_waiting", waiting, seen.name, seen.rows_waiting)
        yield gauge("conserve_backlog_jobs", "Jobs with rows to run.", seen.name, seen.jobs_waiting)
        yield from backlog_metrics(seen.backlog, seen.name)

    def _newest(self) -> threading.Thread:
        """The reading that is under way, or a new one."""
        with self._lock:
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._read, name="conserve-queue", daemon=True)
                self._looking.start()
            return self._looking

    def _read(self) -> None:
        began = self._clock()
        if (seen := self._look()) is not None:
            self._seen, self._seen_at = seen, began


def gauge(metric: str, says: str, name: str, value: float) -> Metric:
    """One figure of the queue of this name."""
    found = GaugeMetricFamily(metric, says, labels=[LABEL])
    found.add_metric([name], value)
    return found


def backlog_metrics(found: Backlog | None, name: str) -> Iterator[Metric]:
    """Gauges of the backlog of the queue of this name; none before anything was harvested."""
    if found is None:
        return
    seconds = GaugeMetricFamily(
        "conserve_backlog_seconds",
        "Predicted seconds of work that is due within so many hours.",
        labels=["due_within", LABEL],
    )
    for within_s, due_s in found.due_s:
        seconds.add_metric([f"{within_s // HOUR_S}h", name], due_s)
    seconds.add_metric(["any", name], found.total_s)
    yield seconds
    says = "Largest share, over all deadlines, of the time until it that the work until then takes."
    yield gauge("conserve_deadline_load", says, name, found.load)


def rows_waiting(jobs: Iterable[ListedJob]) -> int:
    """Rows without a result, of jobs that may run."""
    return sum(job.unanswered for job in jobs if job.state in GOING)


class StoreLook:
    """Reads the queue from the store, at most once in `KEPT_S`; scrapes in between get the same figures."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self._at: float | None = None
        self._seen: QueueSeen | None = None
        self._name = ""  # which a store keeps

    def __call__(self) -> QueueSeen | None:
        """The queue as it was at most `KEPT_S` ago; None while the store cannot be read."""
        now = self._clock()
        if self._at is None or not 0 <= now - self._at < KEPT_S:
            self._at, self._seen = now, self._read(now)
        return self._seen

    def _read(self, now: float) -> QueueSeen | None:
        try:
            jobs = read_jobs(self._settings, now=now)
            slots = read_harvested(self._settings)
            self._name = self._name or read_queue_name(self._settings)
        except ConserveError:
            return None
        waiting = queued(jobs, now=now)
        return QueueSeen(
            name=self._name,
            states=Counter(job.state for job in jobs),
            rows_waiting=rows_waiting(jobs),
            jobs_waiting=len(waiting),
            backlog=backlog(waiting, Rates.of(slots).mean(now), now=now),
        )
