"""Observer of a harvester's work: what metrics and traces are made from."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from conserve.endpoints.protocol import Call, Completion, Endpoint, OnTokens
from conserve.endpoints.wrapped import WrappedEndpoint
from conserve.jobs.harvest.workload import ReadyRow
from conserve.store.books.journal import Committed

log = logging.getLogger(__name__)
T = TypeVar("T")


class Observer:
    """Observes nothing; metrics and traces override what they need.

    `claimed`, `committed` and `moved` run in the store's thread, the others in the event loop. `begun` is a moment
    in s since 1970.
    """

    def claimed(self, works: Sequence[ReadyRow], *, begun: float, seconds: float) -> None:
        """Rows were leased and loaded; none if the queue had none."""

    def trace_context(self, call: Call) -> str | None:
        """W3C `traceparent` that a call takes to the server; None without a trace."""
        return None

    def answered(self, call: Call, completion: Completion, *, begun: float, seconds: float) -> None:
        """A call was answered."""

    def broke(self, call: Call, error: BaseException, *, begun: float, seconds: float) -> None:
        """A call ended without an answer, also by its withdrawal."""

    def committed(self, committed: Committed, *, begun: float, seconds: float) -> None:
        """Results became durable in one transaction, without the time of shards."""

    def moved(self, job_id: str, positions: Sequence[int], *, begun: float, seconds: float) -> None:
        """Results of a job moved from the journal to shards."""


class Observers(Observer):
    """Several observers as one; the trace context is the first that one of them has.

    One that raises an error is warned of once, and costs no row.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._broke: set[str] = set()  # kinds of errors

    def claimed(self, works: Sequence[ReadyRow], *, begun: float, seconds: float) -> None:
        self._tell(lambda one: one.claimed(works, begun=begun, seconds=seconds))

    def trace_context(self, call: Call) -> str | None:
        return next(filter(None, self._tell(lambda one: one.trace_context(call))), None)

    def answered(self, call: Call, completion: Completion, *, begun: float, seconds: float) -> None:
        self._tell(lambda one: one.answered(call, completion, begun=begun, seconds=seconds))

    def broke(self, call: Call, error: BaseException, *, begun: float, seconds: float) -> None:
        self._tell(lambda one: one.broke(call, error, begun=begun, seconds=seconds))

    def committed(self, committed: Committed, *, begun: float, seconds: float) -> None:
        self._tell(lambda one: one.committed(committed, begun=begun, seconds=seconds))

    def moved(self, job_id: str, positions: Sequence[int], *, begun: float, seconds: float) -> None:
        self._tell(lambda one: one.moved(job_id, positions, begun=begun, seconds=seconds))

    def _tell(self, moment: Callable[[Observer], T]) -> list[T]:
        said = []
        for observer in self._observers:
            try:
                said.append(moment(observer))
            except Exception as error:
                self._warn(observer, error)
        return said

    def _warn(self, observer: Observer, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._broke:
            self._broke.add(kind)
            log.warning("%s lost figures of a row (%s: %s)", type(observer).__name__, kind, error)


class ObservedEndpoint(WrappedEndpoint):
    """An endpoint whose calls are observed."""

    def __init__(
        self,
        endpoint: Endpoint,
        observer: Observer,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(endpoint)
        self._observer, self._clock, self._monotonic = observer, clock, monotonic

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        """Answer a call; its trace context goes with it."""
        call = call.traced(self._observer.trace_context(call))
        begun, since = self._clock(), self._monotonic()
        try:
            completion = await self._endpoint.complete(call, on_tokens)
        except BaseException as error:
            self._observer.broke(call, error, begun=begun, seconds=self._monotonic() - since)
            raise
        self._observer.answered(call, completion, begun=begun, seconds=self._monotonic() - since)
        return completion
