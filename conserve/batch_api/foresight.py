"""Forecasts and the backlog for the routes, read from the store now and then: clients poll often."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve.jobs.deadlines.backlog import backlog
from conserve.jobs.deadlines.forecast import Forecast, forecasts
from conserve.jobs.deadlines.queue import queued
from conserve.jobs.deadlines.rate import Rates
from conserve.jobs.telemetry.queue_metrics import QueueSeen, rows_waiting
from conserve.store.books import catalog, harvested, leases
from conserve.store.books.queue_name import queue_name
from conserve.store.books.states import JobState
from conserve.store.database.store import Store

KEPT_S = 30.0  # for which forecasts that were made are shown
COURSES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The queue at one moment."""

    at: float
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    queue: QueueSeen = QueueSeen()  # noqa: RUF009  immutable

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


class Foresight:
    """Forecasts of a store, made at most once in `KEPT_S`."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._last: Foreseen | None = None

    def now(self) -> Foreseen:
        """The last forecasts if they are recent, else new ones; other threads wait for those."""
        with self._lock:
            found = self._last = self.recent or self._look(self._clock())
            return found

    @property
    def recent(self) -> Foreseen | None:
        """The last forecasts, if new ones are not due; never waits."""
        last = self._last
        return last if last is not None and 0 <= self._clock() - last.at < KEPT_S else None

    def _look(self, now: float) -> Foreseen:
        with self._store.read() as tx:
            jobs: Sequence[catalog.JobRecord] = catalog.everything(tx)
            slots = harvested.slots(tx)
            leased = leases.jobs(tx, now=now)
        waiting, rates = queued(jobs, now=now), Rates.of(slots)
        return Foreseen(
            at=now,
            forecasts=forecasts(waiting, rates, now=now, courses=COURSES),
            queue=QueueSeen(
                name=queue_name(self._store.id),
                states=Counter(shown_state(job, leased) for job in jobs),
                rows_waiting=rows_waiting(jobs),
                jobs_waiting=len(waiting),
                backlog=backlog(waiting, rates.mean(now), now=now),
            ),
        )


def shown_state(job: catalog.JobRecord, leased: Collection[str]) -> JobState:
    """State of a job as `conserve status` shows it: running while rows of it are under a lease."""
    return JobState.RUNNING if job.state is JobState.QUEUED and job.id in leased else job.state


def whole(moment: float | None) -> int | None:
    """A moment in whole seconds, as OpenAI's stamps are."""
    return None if moment is None else int(moment)
