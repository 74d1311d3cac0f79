"""Rows in flight: a task each sends the row to the endpoint and hands its outcome to write-behind."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from conserve.endpoints.protocol import Endpoint
from conserve.errors import (
    EndpointBusy,
    EndpointError,
    EndpointFault,
    EndpointUnusable,
    EngineDied,
    one_line,
)
from conserve.jobs.harvest.hold import Hold
from conserve.jobs.harvest.outage import Outage
from conserve.jobs.harvest.outcome import failure, lacks_json, success
from conserve.jobs.harvest.retry import RetryDecision, RowHistory, decide
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import WriteBehind
from conserve.store.books.results import Result
from conserve.store.books.saved_tokens import unpack_tokens

log = logging.getLogger(__name__)

SAVE_EVERY_TOKENS = 64  # of one row, between two saves
SAVED_PART = 8  # of a long row's saved tokens one part has to come: each save writes all of them again
MOST_REFUSED = 65_536  # rows whose refusals are remembered: other harvesters finish some of them unheard


@dataclass(slots=True, eq=False)
class Flight:
    """One row on its way through the endpoint."""

    work: ReadyRow
    tokens: Sequence[int]  # generated so far
    saved: int  # how many of them the store has, or is about to have
    alone: bool = True  # no other row was in flight meanwhile
    lost: bool = False  # its lease is gone, so its outcome is dropped
    ended: bool = False  # its outcome waits to be written
    task: "asyncio.Task[None] | None" = None

    @property
    def gained(self) -> bool:
        """True if the row has more tokens now than the store has, of whichever server.

        Tokens of another server count too: two servers in turn would otherwise throw each other's away for ever.
        """
        known = unpack_tokens(self.work.row.tokens) if self.work.row.tokens else ()
        return len(self.tokens) > len(known)


class BusyReplies(NamedTuple):
    """Times that a busy endpoint refused a row and answered others meanwhile, and its answers by the last."""

    times: int
    answers: int


class Flights:
    """All rows in flight at an endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        recording: WriteBehind,
        tally: Tally,
        *,
        hold: Hold,
        outage: Outage,
        max_attempts: int,
        max_deaths: int,
        clock: Callable[[], float],
    ) -> None:
        self._endpoint, self._recording, self._tally = endpoint, recording, tally
        self._hold, self._outage, self._clock = hold, outage, clock
        self._max_attempts, self._max_deaths = max_attempts, max_deaths
        self._flights: set[Flight] = set()
        self._answers = 0
        self._refused: dict[tuple[str, int], BusyReplies] = {}  # by job and position
        self._broke: set[str] = set()  # kinds of errors that broke the task of a row
        self.landed = asyncio.Event()  # set when a row has left the endpoint
        self.unusable: EndpointUnusable | None = None  # the error of an endpoint that answers no row any more

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def has_suspect(self) -> bool:
        """True if a suspect is in flight, beside which no other row may run."""
        return any(flight.work.row.suspect for flight in self._flights)

    def launch(self, work: ReadyRow) -> None:
        """Start a row's task, or finish it at once if it could not be rendered."""
        self._recording.unwritten_rows[work.epoch] += 1
        if (fault := self._fault(work)) is not None:
            self._recording.finish(work, failure(work, *fault, now=self._clock()))
            return
        assert work.call is not None
        resumed = work.call.resume_from
        flight = Flight(work, resumed, len(resumed), alone=not self._flights)
        for other in self._flights if len(self._flights) == 1 else ():
            other.alone = False
        self._flights.add(flight)
        flight.task = asyncio.create_task(self._work(flight))
        flight.task.add_done_callback(lambda task: self._land(flight, task))
        self._tally.in_flight = len(self._flights)

    def _fault(self, work: ReadyRow) -> tuple[str, str] | None:
        """Kind and text of the error of a row that must not be sent; None for all others."""
        if work.call is None:
            return work.request.error_type or "template", work.request.error or ""
        deaths = work.row.deaths
        if not work.row.suspect or deaths < self._max_deaths:
            return None
        # A harvester that died cannot fail the row that killed it: the next one does, before it sends the row.
        return (
            EngineDied.kind,
            f"the engine or the whole harvester died {deaths} times with this row alone in it",
        )

    def withdraw(self, *, epochs: Collection[int] = (), jobs: Collection[str] = (), lost: bool) -> None:
        """Cancel the rows in flight that are under these leases or of these jobs."""
        for flight in list(self._flights):
            if flight.work.epoch not in epochs and flight.work.job_id not in jobs:
                continue
            flight.lost = lost
            if flight.task is not None:
                flight.task.cancel()

    async def withdraw_all(self) -> None:
        """Cancel all rows in flight and wait until they have landed."""
        await cancelled([flight.task for flight in self._flights if flight.task is not None])

    def _land(self, flight: Flight, task: "asyncio.Task[None]") -> None:
        """Count a row as out of flight after its task; a row without an outcome gets one here."""
        # A row that was withdrawn goes back with its tokens, even if its task had not begun. A row whose task
        # raised an error fails, whatever the error: nothing else would ever end it, since its lease is renewed.
        self._flights.discard(flight)
        self._tally.in_flight = len(self._flights)
        self.landed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._warn(flight.work, error)
        if flight.ended or flight.lost:
            return
        if isinstance(error, Exception):
            said = f"{type(error).__name__}: {error}"
            self._end(flight, failure(flight.work, EndpointFault.kind, said, now=self._clock()))
        else:
            self._end(flight, RetryDecision(suspect=flight.work.row.suspect))
            self._save_tokens(flight)

    async def _work(self, flight: Flight) -> None:
        """Send one row and hand on its outcome."""
        work = flight.work
        assert work.call is not None
        on_tokens = self._token_saver(flight) if work.can_resume else None
        try:
            completion = await self._endpoint.complete(work.call, on_tokens)
            result = success(work, completion, now=self._clock())
        except EndpointUnusable as error:
            self.unusable = error  # the row goes back with its tokens as it lands
        except EndpointError as error:
            self._judge(flight, error)
        except Exception as error:  # an answer that cannot be kept, or a bug of the endpoint's
            self._warn(work, error)
            self._judge(flight, EndpointFault(f"{type(error).__name__}: {error}"))
        else:
            self._answers += 1
            self._hold.end()
            self._outage.answered()
            self._tally.answer(completion, no_json=lacks_json(work, result))
            self._end(flight, result)

    def _warn(self, work: ReadyRow, error: BaseException) -> None:
        """Warn of a row whose task raised an error, once a kind of error: the results hold all of them."""
        kind = type(error).__name__
        log.debug("row %d of %s", work.row.position, work.job_id, exc_info=error)
        if kind not in self._broke:
            self._broke.add(kind)
            row, said = f"row {work.request.row_index} of {work.job_id}", one_line(f"{kind}: {error}")
            known = {"job": work.job_id, "row": work.request.row_index}
            log.warning(
                "%s has no usable answer (%s); others like it are only counted", row, said, extra=known
            )

    def _token_saver(self, flight: Flight) -> Callable[[Sequence[int]], None]:
        """Callback for a row's tokens, which saves them every `SAVE_EVERY_TOKENS`, or later in a long answer."""

        def on_tokens(token_ids: Sequence[int]) -> None:
            flight.tokens = token_ids
            if len(token_ids) - flight.saved >= max(SAVE_EVERY_TOKENS, flight.saved // SAVED_PART):
                self._save_tokens(flight)

        return on_tokens

    def _save_tokens(self, flight: Flight) -> None:
        """Hand on the row's tokens if the store has not got them all."""
        if flight.work.can_resume and len(flight.tokens) > flight.saved:
            flight.saved = len(flight.tokens)
            self._recording.save(flight.work, flight.tokens)

    def _judge(self, flight: Flight, error: EndpointError) -> None:
        """Fail the row or put it back, as the retry policy says."""
        work = flight.work
        history = RowHistory(
            attempts=work.row.attempts,
            faults=work.row.failures - work.row.deaths,
            deaths=work.row.deaths,
            refusals=self._refusals_of(work) if isinstance(error, EndpointBusy) else 0,
            suspect=work.row.suspect,
            alone=flight.alone,
            gained=flight.gained,
        )
        decision = decide(error, history, max_attempts=self._max_attempts, max_deaths=self._max_deaths)
        if decision.error_type is not None:
            self._end(flight, failure(work, decision.error_type, str(error), now=self._clock()))
            return
        self._tally.retried += 1
        if isinstance(error, EndpointFault) and not decision.is_failure:
            self._warn(work, error)
        self._save_tokens(flight)
        self._end(flight, decision)
        self._tally.waiting_for = self._hold.begin(error, decision.hold_s) or self._tally.waiting_for

    def _refusals_of(self, work: ReadyRow) -> int:
        """Times that a busy endpoint refused the row, between which it answered others; this one counts."""
        key = (work.job_id, work.row.position)
        before = self._refused.pop(key, BusyReplies(0, -1))
        self._refused[key] = BusyReplies(before.times + (self._answers > before.answers), self._answers)
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]  # the one refused longest ago
        return self._refused[key].times

    def _end(self, flight: Flight, outcome: Result | RetryDecision) -> None:
        """Hand on the outcome of a row in flight; a row ends once."""
        assert not flight.ended, f"row {flight.work.row.position} of {flight.work.job_id} ended twice"
        flight.ended = True
        if isinstance(outcome, Result):
            self._refused.pop(flight.work.key, None)
            self._recording.finish(flight.work, outcome)
        else:
            self._recording.put_back(flight.work, outcome)


async def cancelled(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
