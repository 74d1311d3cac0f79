"""Forecasts and the backlog for the routes, read from the store now and then: clients poll often."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from conserve.errors import ConserveError
from conserve.jobs.deadlines.backlog import backlog
from conserve.jobs.deadlines.forecast import Forecast, forecasts
from conserve.jobs.deadlines.queue import queued
from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.deadlines.work import QueuedJob
from conserve.jobs.telemetry.queue_metrics import QueueSeen, rows_waiting
from conserve.store.books import catalog, harvested, leases
from conserve.store.books.queue_name import queue_name
from conserve.store.books.states import JobState
from conserve.store.database.store import Store

KEPT_S = 30.0  # for which forecasts that were made are shown
COURSES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Forecasts of the jobs at one moment."""

    at: float
    forecasts: Mapping[str, Forecast]

    def document(self, job_id: str | None) -> Mapping[str, Any] | None:
        """Forecast of a job for its batch object; None without one."""
        found = self.forecasts.get(job_id) if job_id else None
        if found is None:
            return None
        return {
            "done_50": whole(found.done_50),
            "done_90": whole(found.done_90),
            "in_time": found.in_time,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Findings of one look at the store."""

    at: float
    waiting: Sequence[QueuedJob]
    rates: Rates
    queue: QueueSeen


class Foresight:
    """The queue of a store, read at most once in `KEPT_S`, and the forecasts of its jobs once one is asked for."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._last: Look | None = None
        self._foreseen: Foreseen | None = None
        self._making: asyncio.Task[Foreseen] | None = None

    def now(self) -> Foreseen:
        """The last forecasts if they are recent, else new ones; other threads wait for those."""
        with self._lock:
            if (found := self.recent) is None:
                look = self._look()
                made = forecasts(look.waiting, look.rates, now=look.at, courses=COURSES)
                found = self._foreseen = Foreseen(at=look.at, forecasts=made)
            return found

    async def shared(self) -> Foreseen:
        """The last forecasts, those that are being replaced too; without such, requests await new ones together.

        Each request in a thread of its own would keep all threads from requests that need no forecast.
        """
        if (found := self.recent) is not None:
            return found
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(run_in_threadpool(self.now))
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        last = self._foreseen
        if last is not None and 0 <= self._clock() - last.at < 2 * KEPT_S:
            return last
        return await asyncio.shield(self._making)

    def queue(self) -> QueueSeen | None:
        """The queue as it was at most `KEPT_S` ago; None while the store cannot be read."""
        with self._lock:
            try:
                return self._look().queue
            except ConserveError:
                return None

    @property
    def recent(self) -> Foreseen | None:
        """The last forecasts, if new ones are not due; never waits."""
        last = self._foreseen
        return last if last is not None and self._is_recent(last.at) else None

    def _is_recent(self, at: float) -> bool:
        return 0 <= self._clock() - at < KEPT_S

    def _look(self) -> Look:
        if self._last is None or not self._is_recent(self._last.at):
            self._last = self._looked(self._clock())
        return self._last

    def _looked(self, now: float) -> Look:
        with self._store.read() as tx:
            jobs: Sequence[catalog.JobRecord] = catalog.everything(tx)
            slots = harvested.slots(tx)
            leased = leases.jobs(tx, now=now)
        waiting, rates = queued(jobs, now=now), Rates.of(slots)
        seen = QueueSeen(
            name=queue_name(self._store.id),
            states=Counter(shown_state(job, leased) for job in jobs),
            rows_waiting=rows_waiting(jobs),
            jobs_waiting=len(waiting),
            backlog=backlog(waiting, rates.mean(now), now=now),
        )
        return Look(at=now, waiting=waiting, rates=rates, queue=seen)


def shown_state(job: catalog.JobRecord, leased: Collection[str]) -> JobState:
    """State of a job as `conserve status` shows it: running while rows of it are under a lease."""
    return JobState.RUNNING if job.state is JobState.QUEUED and job.id in leased else job.state


def whole(moment: float | None) -> int | None:
    """A moment in whole seconds, as OpenAI's stamps are."""
    return None if moment is None else int(moment)
