"""The harvester: leases rows, keeps an endpoint busy with them, and makes every answer durable once.

    feed ──> work (one task a row) ──> outbox ──> record (a transaction a batch) ──> shards
                      ^
             watch: renew leases, notice pause and cancel, take back rows of dead owners

All work on the store runs in one thread of its own, so that an fsync never holds up the tokens.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from conserve.config import UTILITY
from conserve.endpoints.protocol import Endpoint, InFlight, KvCache, model_of
from conserve.errors import (
    ConserveError,
    EndpointError,
    EndpointFault,
    EndpointUnusable,
    StoreError,
    one_line,
)
from conserve.jobs.harvest.expiry import WallClock
from conserve.jobs.harvest.forecast import QueueProgress
from conserve.jobs.harvest.hold import Hold
from conserve.jobs.harvest.ledger import Ledger
from conserve.jobs.harvest.outage import Outage, elapsed_or_set
from conserve.jobs.harvest.outcome import failure, success
from conserve.jobs.harvest.recorder import Outbox
from conserve.jobs.harvest.retry import SUSPECT_FAILURES, RetryDecision, decide
from conserve.jobs.harvest.tally import Tally as Tally
from conserve.jobs.harvest.workload import Work
from conserve.store.books import queue
from conserve.store.books.journal import Finished
from conserve.store.books.queue import SavedTokens
from conserve.store.books.results import Result
from conserve.store.database.store import Store
from conserve.store.files import home

log = logging.getLogger(__name__)
T = TypeVar("T")

SAVE_EVERY_TOKENS = 64  # of one row, between two saves
FLUSH_ROWS = 512  # results that make a transaction without waiting for more
FLUSH_S = 0.25  # longest wait of a result for others; a crash costs at most that much work
WATCH_S = 0.5  # how soon pause and cancel are noticed
IDLE_S = 0.2  # how soon new rows are noticed


@dataclass(slots=True, eq=False)
class Flight:
    """One row on its way through the endpoint."""

    work: Work
    tokens: Sequence[int]  # generated so far
    saved: int  # how many of them the store has, or is about to have
    alone: bool = True  # no other row was in flight meanwhile
    lost: bool = False  # its lease is gone, so its outcome is dropped
    ended: bool = False  # its outcome is in the outbox
    task: "asyncio.Task[None] | None" = None


class Harvester:
    """Drains the queue of a store into an endpoint; with `follow`, rows that come later too."""

    def __init__(
        self,
        store: Store,
        endpoint: Endpoint,
        *,
        lease_s: float = 60.0,
        max_attempts: int = 5,
        max_deaths: int = SUSPECT_FAILURES,
        only: Collection[str] | None = None,
        utility: float = UTILITY,
        rebind: bool = False,
        follow: bool = False,
        say: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.store, self.endpoint = store, endpoint
        self.lease_s, self.max_attempts, self.max_deaths = lease_s, max_attempts, max_deaths
        self.clock = clock
        self.monotonic = monotonic or (time.monotonic if clock is time.time else clock)
        self.follow = follow
        self.tally = Tally()
        self.ready_at: float | None = None  # when the endpoint was ready, on the monotonic clock
        self.ended_at: float | None = None  # when the last row was durable, before the endpoint closed
        self._ledger = Ledger(
            store,
            self.tally,
            lease_s=lease_s,
            only=only,
            utility=utility,
            rebind=rebind,
            clock=clock,
            monotonic=self.monotonic,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._outage = Outage(say)
        self._flights: set[Flight] = set()
        self._outbox = Outbox()
        self._held: Counter[int] = Counter()  # epoch -> rows whose outcome is not written yet
        self._landed = asyncio.Event()  # set when a row has left the endpoint
        self._outbox_full = asyncio.Event()
        self._claim_at = 0.0  # next claim while rows are in flight; the last one found nothing
        self._hold = Hold(self.monotonic, say)
        self._say = say
        self._started = False
        self._broken: EndpointUnusable | None = None
        self._broke: set[str] = set()  # kinds of errors that broke the task of a row

    @property
    def owner(self) -> str:
        """Owner of its leases."""
        return self._ledger.owner

    @property
    def doing(self) -> str | None:
        """Step of the endpoint's start; None once it is ready, or if it does not say."""
        return getattr(self.endpoint, "doing", None)

    def progress(self, rows_left: int) -> QueueProgress:
        """Rows and tokens so far; `rows_left` rows of the queue have no durable result."""
        tally, in_flight = self.tally, getattr(self.endpoint, "in_flight", None) or InFlight()
        return QueueProgress(
            rows_done=tally.answered,
            rows_in_flight=tally.in_flight,
            rows_waiting=max(0, rows_left - (tally.answered - tally.succeeded) - tally.in_flight),
            tokens_done=tally.answered_tokens,
            tokens_in_flight=in_flight.computed,
            most_in_flight=in_flight.most,
        )

    async def run(self, stop: asyncio.Event) -> Tally:
        """Work until the queue is empty or `stop` is set; rows in flight then go back with their tokens.

        With `follow`, only `stop` ends the work: while the store or the endpoint is out of reach, the harvester
        waits.
        """
        try:
            await (self._follow(stop) if self.follow else self._session(stop))
        finally:
            await self.endpoint.close()
            self._thread.shutdown()
            self._ledger.close()
        return self.tally

    async def _follow(self, stop: asyncio.Event) -> None:
        """Run sessions until told to stop, with longer waits after each failure."""
        while not stop.is_set():
            try:
                await self._session(stop)
                return
            except (StoreError, EndpointUnusable) as error:
                self._started = self._started and not isinstance(error, EndpointUnusable)
                wait_s = self._outage.begin(error, until_answer=error is self._broken)
                self.tally.waiting_for = str(error)
            await elapsed_or_set(stop, wait_s)

    async def _session(self, stop: asyncio.Event) -> None:
        """Start the endpoint, recover the store and work; however the session ends, no row stays in flight."""
        failed: BaseException | None = None
        try:
            if not self._started:
                await self.endpoint.start()
                self._started, self._broken = True, None
            self.ready_at = self.ready_at or time.monotonic()
            self._ledger.kv_cache = getattr(self.endpoint, "kv_cache", None) or KvCache()
            await self._in_store(self._ledger.reopen)
            await self._flush()  # outcomes that an outage kept from the store
            await self._in_store(self._ledger.recover)
            self._held.clear()
            self._outage.end()
            self.tally.waiting_for = None
            await self._until_drained(stop)
        except BaseException as error:
            failed = error
            raise
        finally:
            await self._put_down(failed)

    async def _until_drained(self, stop: asyncio.Event) -> None:
        """Run the loops until nothing is left to feed or `stop` is set; a loop that fails ends them all."""
        loops: list[asyncio.Task[object]] = [
            asyncio.create_task(self._feed()),
            asyncio.create_task(self._record()),
            asyncio.create_task(self._watch()),
            asyncio.create_task(stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            await cancelled(loops)

    async def _put_down(self, failed: BaseException | None) -> None:
        """Withdraw the rows in flight, save their tokens and give them back.

        In an outage of the store the outbox waits for the next session. The outcomes in a write that failed are
        dropped, since they may have been written; rows whose outcome was not are done again.
        """
        await cancelled([flight.task for flight in self._flights if flight.task is not None])
        self.ended_at = time.monotonic()
        if self.follow and isinstance(failed, StoreError):
            return
        try:
            await self._flush()
            await self._in_store(self._ledger.give_back)
        except ConserveError:
            if failed is None:
                raise
            log.debug("the store could not be told about rows in flight; their leases will expire")
        finally:
            self.ended_at = time.monotonic()

    # Feed: keep the endpoint full.

    async def _feed(self) -> None:
        """Claim rows whenever a quarter of the endpoint is free; return once the queue is empty."""
        while True:
            await self._held_off()
            works = await self._next_works()
            for work in works:
                self._launch(work)
            if works:
                continue
            if not self._flights and await self._in_store(self._ledger.nothing_left) and not self.follow:
                return
            await self._wait_for_landing()

    async def _next_works(self) -> list[Work]:
        """Claim rows if enough of the endpoint is free; a suspect only once no other row is left, and alone."""
        works: list[Work] = []
        self._ledger.model = model_of(self.endpoint)  # a server may come back with another model
        free = self.endpoint.capacity - len(self._flights)
        due = not self._flights or self.monotonic() >= self._claim_at
        if due and free >= max(1, self.endpoint.capacity // 4) and not self._suspect_in_flight():
            works = await self._in_store(self._ledger.claim, free, False, self.endpoint.identity)
            self._claim_at = 0.0 if works else self.monotonic() + IDLE_S
        if not works and not self._flights:
            await self._flush()
            works = await self._in_store(self._ledger.claim, 1, True, self.endpoint.identity)
        return works

    def _suspect_in_flight(self) -> bool:
        return any(flight.work.row.suspect for flight in self._flights)

    async def _held_off(self) -> None:
        """Wait for the end of a hold on the endpoint; raise if the endpoint is unusable."""
        while (left_s := self._hold.left_s) > 0 and self._broken is None:
            await asyncio.sleep(min(left_s, IDLE_S))
        if self._broken is not None:
            raise self._broken
        if self._flights:
            self.tally.waiting_for = None

    async def _wait_for_landing(self) -> None:
        """Sleep until a row lands, then a moment longer, so that many are claimed at once."""
        self._landed.clear()
        full = len(self._flights) > self.endpoint.capacity * 3 // 4
        try:
            await asyncio.wait_for(self._landed.wait(), IDLE_S)
        except TimeoutError:
            return
        if not full:
            await asyncio.sleep(IDLE_S / 20)

    # Work: one row.

    def _launch(self, work: Work) -> None:
        """Start a row's task, or finish it at once if it could not be rendered."""
        self._held[work.epoch] += 1
        if work.call is None:
            request = work.request
            error_type, error = request.error_type or "template", request.error or ""
            self._finish(work, failure(work, error_type, error, now=self.clock()))
            return
        resumed = work.call.resume_from
        flight = Flight(work, resumed, len(resumed), alone=not self._flights)
        for other in self._flights if len(self._flights) == 1 else ():
            other.alone = False
        self._flights.add(flight)
        flight.task = asyncio.create_task(self._work(flight))
        flight.task.add_done_callback(lambda task: self._land(flight, task))
        self.tally.in_flight = len(self._flights)

    def _land(self, flight: Flight, task: "asyncio.Task[None]") -> None:
        """Count a row as out of flight after its task; a row without an outcome gets one here.

        A row that was withdrawn goes back with its tokens, even if its task had not begun. A row whose task raised
        an error fails, whatever the error: nothing else would ever end it, since its lease is renewed.
        """
        self._flights.discard(flight)
        self.tally.in_flight = len(self._flights)
        self._landed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._say_that_it_broke(flight.work, error)
        if flight.ended or flight.lost:
            return
        if isinstance(error, Exception):
            said = f"{type(error).__name__}: {error}"
            self._end(flight, failure(flight.work, EndpointFault.kind, said, now=self.clock()))
        else:
            self._end(flight, RetryDecision())
            self._save_tokens(flight)

    async def _work(self, flight: Flight) -> None:
        """Send one row and put its outcome into the outbox."""
        work = flight.work
        assert work.call is not None
        on_tokens = self._token_saver(flight) if work.can_resume else None
        try:
            completion = await self.endpoint.complete(work.call, on_tokens)
            result = success(work, completion, now=self.clock())
        except EndpointUnusable as error:
            self._broken = error
            self._end(flight, RetryDecision())
        except EndpointError as error:
            self._judge(flight, error)
        except Exception as error:  # an answer that cannot be kept, or a bug of the endpoint's
            self._say_that_it_broke(work, error)
            self._judge(flight, EndpointFault(f"{type(error).__name__}: {error}"))
        else:
            self._hold.end()
            self._outage.answered()
            self.tally.answer(completion)
            self._end(flight, result)

    def _say_that_it_broke(self, work: Work, error: BaseException) -> None:
        """Warn of a row whose task raised an error, once a kind of error: the results hold all of them."""
        kind = type(error).__name__
        log.debug("row %d of %s", work.row.position, work.job_id, exc_info=error)
        if kind not in self._broke:
            self._broke.add(kind)
            row, said = f"row {work.request.row_index} of {work.job_id}", one_line(f"{kind}: {error}")
            log.warning("%s has no usable answer (%s); others like it are only counted", row, said)

    def _token_saver(self, flight: Flight) -> Callable[[Sequence[int]], None]:
        """Callback for a row's tokens, which saves them every `SAVE_EVERY_TOKENS`."""

        def on_tokens(token_ids: Sequence[int]) -> None:
            flight.tokens = token_ids
            if len(token_ids) - flight.saved >= SAVE_EVERY_TOKENS:
                self._save_tokens(flight)

        return on_tokens

    def _save_tokens(self, flight: Flight) -> None:
        """Put the row's tokens into the outbox if the store has not got them all."""
        if not flight.work.can_resume or len(flight.tokens) <= flight.saved:
            return
        flight.saved = len(flight.tokens)
        work = flight.work
        assert work.call is not None
        self._outbox.saved[work.key] = SavedTokens(
            work.epoch, *work.key, queue.pack_tokens(flight.tokens), work.call.identity or ""
        )

    def _judge(self, flight: Flight, error: EndpointError) -> None:
        """Fail the row or put it back, as the retry policy says."""
        work = flight.work
        decision = decide(
            error,
            failures=work.row.failures,
            max_attempts=self.max_attempts,
            alone=flight.alone,
            max_deaths=self.max_deaths,
        )
        if decision.error_type is not None:
            self._end(flight, failure(work, decision.error_type, str(error), now=self.clock()))
            return
        self.tally.retried += 1
        self._save_tokens(flight)
        self._end(flight, decision)
        self.tally.waiting_for = self._hold.begin(error, decision.hold_s) or self.tally.waiting_for

    def _end(self, flight: Flight, outcome: Result | RetryDecision) -> None:
        """Put the outcome of a row in flight into the outbox; a row ends once."""
        assert not flight.ended, f"row {flight.work.row.position} of {flight.work.job_id} ended twice"
        flight.ended = True
        if isinstance(outcome, Result):
            self._finish(flight.work, outcome)
        else:
            self._put_back(flight.work, outcome)

    def _finish(self, work: Work, result: Result) -> None:
        self._outbox.saved.pop(work.key, None)
        self._outbox.finished.append(Finished(work.epoch, *work.key, result))
        if len(self._outbox.finished) >= FLUSH_ROWS:
            self._outbox_full.set()

    def _put_back(self, work: Work, decision: RetryDecision) -> None:
        self._outbox.returned.append((work, decision))

    # Record: make outcomes durable.

    async def _record(self) -> None:
        """Write the outbox whenever it is full, or after `FLUSH_S`."""
        while True:
            await elapsed_or_set(self._outbox_full, FLUSH_S)
            self._outbox_full.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Write the outbox; its rows then no longer count as held.

        A stop waits for the write. A write that the store's thread has yet to begin would otherwise never begin,
        and its rows would be done again.
        """
        outbox, self._outbox = self._outbox, Outbox()
        if not outbox:
            return
        writing = asyncio.ensure_future(self._in_store(self._ledger.write, outbox))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.gather(writing, return_exceptions=True)
            raise
        self._outage.forget()
        self._held.subtract(outbox.epochs)
        self._held += Counter()  # drops leases that have come to zero

    # Watch: leases, and what other processes did to our jobs.

    async def _watch(self) -> None:
        """Renew leases in time; withdraw rows whose lease is gone or whose job was paused, cancelled or removed."""
        wall = WallClock(self.clock, self.monotonic)
        renew_at = self.monotonic() + self.lease_s / 3
        while True:
            await asyncio.sleep(WATCH_S)
            now = self.monotonic()
            if (by := wall.set_by()) is not None:
                self._say(f"the clock was set {'forward' if by > 0 else 'back'} by {abs(by):,.0f} s")
                renew_at = now  # so that leases name their end by the new clock
            if now >= renew_at and self._held:
                epochs = set(self._held)
                alive = await self._in_store(self._ledger.renew, epochs)
                self._withdraw(epochs=epochs - alive, lost=True)
                for gone in epochs - alive:
                    del self._held[gone]
                renew_at = now + self.lease_s / 3
            stopped = await self._in_store(self._ledger.stopped_jobs)
            self._withdraw(jobs=stopped, lost=False)

    def _withdraw(self, *, epochs: Collection[int] = (), jobs: Collection[str] = (), lost: bool) -> None:
        """Cancel the rows in flight that are under these leases or of these jobs."""
        for flight in list(self._flights):
            if flight.work.epoch not in epochs and flight.work.job_id not in jobs:
                continue
            flight.lost = lost
            if flight.task is not None:
                flight.task.cancel()

    # The store's thread.

    async def _in_store(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the store's thread; its `OSError` becomes a `StoreError`."""

        def call() -> T:
            with home.explained(self.store.home):
                return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def cancelled(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
