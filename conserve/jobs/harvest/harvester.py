"""The harvester: leases rows, keeps an endpoint busy with them, and makes every answer durable once.

    feed ──> flights (one task a row) ──> write-behind ──> recorder (journal, a transaction a batch) ──> shards
                       ^
              watch: renew leases, notice pause and cancel, take back rows of dead owners

All work on the store runs in one thread of its own, so that an fsync never holds up the tokens.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from typing import TypeVar

from conserve import errors, open_files
from conserve.config import UTILITY
from conserve.endpoints.protocol import Endpoint, model_of
from conserve.errors import ConserveError, EndpointUnusable, StoreError, StoreMoved, StoreUnreachable
from conserve.jobs.harvest.calls import Calls
from conserve.jobs.harvest.expiry import WallClock
from conserve.jobs.harvest.flights import Flights, cancelled
from conserve.jobs.harvest.hold import Hold
from conserve.jobs.harvest.ledger import Ledger
from conserve.jobs.harvest.notes import ServerNotes
from conserve.jobs.harvest.observer import ObservedEndpoint, Observer
from conserve.jobs.harvest.outage import Outage
from conserve.jobs.harvest.retry import SUSPECT_FAILURES
from conserve.jobs.harvest.suspects import SuspectTurns
from conserve.jobs.harvest.sweeps import Sweeps
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.time_left import QueueProgress
from conserve.jobs.harvest.waiting import elapsed_or_set
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import Outcomes, WriteBehind
from conserve.store.database.connection import UNDONE, code
from conserve.store.database.store import Store
from conserve.store.database.wakeup import Listener
from conserve.store.files import os_errors

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_S = 0.5  # how soon pause and cancel are noticed
IDLE_S = 0.2  # how soon new rows are noticed
LISTENING_S = 2.0  # how soon either is noticed without a call, where the store calls them out
MANY_JOBS = 100  # whose shards take seconds
COLLECT_AT = 50_000  # objects more than at the last run of the garbage collector, some 10 MB


@contextmanager
def collected_apart() -> Iterator[None]:
    """Have Python's garbage collector run rarely, and leave out the objects that exist already, in this context.

    The objects of rows in flight are so many that it runs all the time. Looking through those of all imported
    modules each time took a fifth of a row's processor time, and through those of the rows a tenth, all in vain:
    they are in no cycles.
    """
    others, thresholds = gc.get_freeze_count(), gc.get_threshold()
    gc.freeze()
    if rarer := 0 < thresholds[0] < COLLECT_AT:
        gc.set_threshold(COLLECT_AT, *thresholds[1:])
    try:
        yield
    finally:
        if rarer:  # else the process, or another harvester in it, had done so
            gc.set_threshold(*thresholds)
        if not others:  # else the process had a reason of its own
            gc.unfreeze()


class Harvester:
    """Drains the queue of a store into an endpoint; with `follow`, rows that come later too.

    Leases last `lease_s` seconds unless renewed. A row fails after `max_attempts` faulty answers, or after
    `max_deaths` engines that died with that row alone. `only` limits the jobs, `share` holds weights of groups of
    jobs, and `rebind` binds jobs of other models to this one. `clock` tells the time that is stored, `monotonic`
    measures. Raises `SettingsError` for weights that cannot be read.
    """

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
        share: str | None = None,
        rebind: bool = False,
        follow: bool = False,
        say: Callable[[str], None] = log.info,
        warn: Callable[[str], None] | None = None,  # of outages; `say` by default
        observer: Observer | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.store, self.endpoint = (
            store,
            endpoint if observer is None else ObservedEndpoint(endpoint, observer),
        )
        self.lease_s = lease_s
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
            share=share,
            rebind=rebind,
            clock=clock,
            monotonic=self.monotonic,
            observer=observer or Observer(),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        said = say if follow else log.warning  # a run that ends by itself says little else
        self._outage = Outage(said, self.tally.outages, warn=warn if follow else None)
        self._claim_at = 0.0  # next claim while rows are in flight; the last one found nothing
        self._suspects = SuspectTurns(store, only=only, clock=clock, monotonic=self.monotonic)
        self._hold = Hold(self.monotonic, say, warn=warn)
        self._recording = WriteBehind(self._write, self._outage)
        self._flights = Flights(
            self.endpoint,
            self._recording,
            self.tally,
            hold=self._hold,
            outage=self._outage,
            max_attempts=max_attempts,
            max_deaths=max_deaths,
            clock=clock,
        )
        self._calls = Calls(self._look_again)
        self._sweeps = Sweeps(store, clock=clock)
        self._called = False  # since the last look for stopped jobs
        self._say = say
        self._started = False
        self._notes = ServerNotes(
            endpoint, store, self.owner, self._in_store, clock=clock, monotonic=self.monotonic
        )

    @property
    def owner(self) -> str:
        """Owner of its leases."""
        return self._ledger.owner

    @property
    def model(self) -> str | None:
        """Name of the model whose jobs it runs; None before the endpoint has started."""
        return self._ledger.model

    @property
    def doing(self) -> str | None:
        """Step of the endpoint's start; None once it is ready, or if it does not say."""
        return self.endpoint.doing

    def progress(self, rows_left: int) -> QueueProgress:
        """Rows and tokens so far; `rows_left` rows of the queue have no durable result."""
        tally, in_flight = self.tally, self.endpoint.in_flight
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
        waits. A bucket out of reach is waited for without `follow` too.
        """
        open_files.raise_limit()  # for the files of jobs, and a connection a row
        try:
            with collected_apart():
                await self._sessions(stop)
        finally:
            await self.endpoint.close()
            self._thread.shutdown()
            self._ledger.close()
        return self.tally

    async def _sessions(self, stop: asyncio.Event) -> None:
        """Run sessions until one ends or told to stop, with longer waits after each failure that is waited out."""
        while not stop.is_set():
            try:
                await self._session(stop)
                return
            except (StoreMoved, errors.ModelUnnamed):
                raise
            except (StoreError, EndpointUnusable) as error:
                if not self._waits_out(error):
                    raise
                self._started = self._started and not isinstance(error, EndpointUnusable)
                wait_s = self._outage.begin(error, until_answer=error is self._flights.unusable)
                self.tally.waiting_for = str(error)
            await elapsed_or_set(stop, wait_s)

    def _waits_out(self, error: BaseException) -> bool:
        """True if the harvester goes on once the cause of an error is over."""
        return self.follow or isinstance(error, StoreUnreachable) or code(error) in UNDONE

    async def _session(self, stop: asyncio.Event) -> None:
        """Start the endpoint, recover the store and work; however the session ends, no row stays in flight."""
        failed: BaseException | None = None
        try:
            if not self._started:
                await self.endpoint.start()
                self._started, self._flights.unusable = True, None
            self.ready_at = self.ready_at or time.monotonic()
            self._ledger.kv_cache = self.endpoint.kv_cache
            self._ledger.model = model_of(self.endpoint)
            await self._in_store(self._ledger.reopen)
            await self._recording.flush()  # outcomes that an outage kept from the store
            await self._in_store(self._ledger.recover)
            self._calls.begin(await self._in_store(Listener.of, self.store.engine))
            await self._notes.look()
            self._recording.unwritten_rows.clear()
            self._outage.end()
            self.tally.waiting_for = None
            await self._until_drained(stop)
            await self._write_shards(stop)
        except BaseException as error:
            failed = error
            raise
        finally:
            await self._end_session(failed)

    async def _until_drained(self, stop: asyncio.Event) -> None:
        """Run the loops until nothing is left to feed or `stop` is set; a loop that fails ends them all."""
        loops: list[asyncio.Task[object]] = [
            asyncio.create_task(self._feed()),
            asyncio.create_task(self._recording.run()),
            asyncio.create_task(self._watch()),
            asyncio.create_task(stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            await cancelled(loops)

    async def _write_shards(self, stop: asyncio.Event) -> None:
        """Write the shards that are left, one at a time; those that `stop` forestalls are left to the next run."""
        recorder = self._ledger.recorder
        while not stop.is_set() and await self._in_store(recorder.compact, True):
            many = recorder.ended > MANY_JOBS
            files = f"results of {recorder.ended:,} ended jobs go to their files"
            self.tally.waiting_for = files if many else None

    async def _end_session(self, failed: BaseException | None) -> None:
        """Withdraw the rows in flight, save their tokens and give them back."""
        # In an outage of the store outcomes wait for the next session, with those in a write that failed.
        self._calls.end()
        await self._flights.withdraw_all()
        self.ended_at = time.monotonic()
        if self.follow and isinstance(failed, StoreError) and not isinstance(failed, StoreUnreachable):
            return
        try:
            await self._recording.flush()
            await self._in_store(self._ledger.give_back)
        except ConserveError:
            if failed is None:
                raise
            log.debug("the store could not be told about rows in flight; their leases will expire")
        finally:
            self.ended_at = time.monotonic()

    async def _feed(self) -> None:
        """Claim rows whenever a quarter of the endpoint is free; return once the queue is empty."""
        while True:
            await self._held_off()
            self._flights.landed.clear()  # before the look: a landing or a call during it is not slept through
            works = await self._next_works()
            for work in works:
                self._flights.launch(work)
            if works:
                continue
            if not self._flights and await self._in_store(self._ledger.nothing_left) and not self.follow:
                return
            await self._wait_for_landing()

    async def _next_works(self) -> list[ReadyRow]:
        """Claim rows if enough of the endpoint is free; a suspect alone, at its turn or if no other row is left."""
        works: list[ReadyRow] = []
        self._ledger.model = model_of(self.endpoint)  # a server may come back with another model
        if self.endpoint.capacity < 1:  # all servers are drained, or out of reach
            return []
        free = self.endpoint.capacity - len(self._flights)
        due = not self._flights or self.monotonic() >= self._claim_at
        enough = free >= max(1, self.endpoint.capacity // 4)
        ours = bool(self._flights) or self._recording.is_at_work  # rows that may come back meanwhile
        skipped = False  # there is nothing to claim, as a look told
        if due and enough and not self._flights.has_suspect and not await self._are_suspects_next():
            self._claim_at = inf  # unless the store calls meanwhile
            works = await self._in_store(self._ledger.claim, free, False, self.endpoint.identity)
            skipped = self._ledger.skipped_claim and not ours
            if works:
                self._claim_at = 0.0
            elif self._claim_at == inf:
                self._claim_at = self.monotonic() + self._idle_s
        if not works and not self._flights:
            await self._recording.flush()
            if not skipped:
                works = await self._in_store(self._ledger.claim, 1, True, self.endpoint.identity)
            if not works:
                self._suspects.none_left()
        return works

    async def _are_suspects_next(self) -> bool:
        """True if suspects have their turn, so that no other row is to be claimed."""
        if self._suspects.is_to_look:
            await self._in_store(self._suspects.look, self._ledger.model)
        return self._suspects.are_next(others_fly=bool(self._flights))

    @property
    def _idle_s(self) -> float:
        """Seconds until the next look for rows if the store calls out none."""
        return max(IDLE_S, self._ledger.wait_s(LISTENING_S)) if self._calls.listening else IDLE_S

    def _look_again(self) -> None:
        """Look for rows at once, and for stopped jobs: the store has called."""
        self._claim_at, self._called = 0.0, True
        self._flights.landed.set()

    async def _held_off(self) -> None:
        """Wait for the end of a hold on the endpoint; raise if the endpoint is unusable."""
        while (left_s := self._hold.left_s) > 0 and self._flights.unusable is None:
            await asyncio.sleep(min(left_s, IDLE_S))
        if self._flights.unusable is not None:
            raise self._flights.unusable
        if self._flights:
            self.tally.waiting_for = None

    async def _wait_for_landing(self) -> None:
        """Sleep until a row lands or the store calls, then a moment longer, so that many are claimed at once."""
        full = len(self._flights) > self.endpoint.capacity * 3 // 4
        landed = await elapsed_or_set(self._flights.landed, IDLE_S if self._flights else self._idle_s)
        if landed and not full:
            await asyncio.sleep(IDLE_S / 20)

    async def _watch(self) -> None:
        """Renew leases in time; withdraw rows whose lease is gone or whose job was paused, cancelled or removed."""
        wall = WallClock(self.clock, self.monotonic)
        renew_at, look_at = self.monotonic() + self.lease_s / 3, 0.0
        while True:
            await asyncio.sleep(WATCH_S)
            now = self.monotonic()
            if (by := wall.set_by()) is not None:
                self._say(f"the clock was set {'forward' if by > 0 else 'back'} by {abs(by):,.0f} s")
                renew_at = now  # so that leases name their end by the new clock
            if now >= renew_at and self._recording.unwritten_rows:
                async with self._recording.writing:  # which may end leases that then would seem lost
                    epochs = set(self._recording.unwritten_rows)
                    alive = await self._in_store(self._ledger.renew, epochs)
                self._flights.withdraw(epochs=epochs - alive, lost=True)
                self.tally.leases_lost += len(epochs - alive)
                for gone in epochs - alive:
                    del self._recording.unwritten_rows[gone]
                renew_at = now + self.lease_s / 3
            if self._called or not self._calls.listening or now >= look_at:
                self._called, look_at = False, now + LISTENING_S
                stopped = await self._in_store(self._ledger.stopped_jobs)
                self._flights.withdraw(jobs=stopped, lost=False)
            if self._ledger.recorder.behind:  # and no row may end, whose write would do it
                await self._in_store(self._ledger.recorder.compact)
            await self._notes.look()
            if self._sweeps.look(now):  # jobs may have ended early since, or under a harvester that died
                await self._in_store(self._ledger.recorder.recover)

    async def _write(self, outcomes: Outcomes) -> None:
        await self._in_store(self._ledger.write, outcomes)
        if any(decision.suspect for _, decision in outcomes.returned):
            self._suspects.look_soon()

    async def _in_store(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the store's thread; its `OSError` becomes a `StoreError`."""

        def call() -> T:
            with os_errors.explained(self.store.home):
                return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
