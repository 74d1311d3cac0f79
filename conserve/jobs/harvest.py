"""The harvester: leases rows, keeps an endpoint busy with them, and makes every answer durable once.

    feed ──> work (one task a row) ──> outbox ──> record (a transaction a batch) ──> shards
                      ^
             watch: renew leases, notice pause and cancel, take back what the dead left behind

Everything that touches the store runs in one thread of its own, so that an fsync never holds up the tokens.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from conserve.endpoints.protocol import Endpoint
from conserve.errors import ConserveError, EndpointError, EndpointFault, EndpointUnusable
from conserve.jobs import owner as owners
from conserve.jobs.outcome import failure, success
from conserve.jobs.recorder import Outbox, Recorder
from conserve.jobs.retry import LONGEST_BACKOFF_S, RetryDecision, decide
from conserve.jobs.workload import Work, Workload
from conserve.store import catalog, queue, shards
from conserve.store.journal import Committed, Finished
from conserve.store.queue import SavedTokens
from conserve.store.results import Result
from conserve.store.states import JobState
from conserve.store.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

SAVE_EVERY_TOKENS = 64  # of one row
FLUSH_ROWS = 512  # results that make a transaction without waiting for more
FLUSH_S = 0.25  # how long a result may wait for company; a crash costs at most that much work
WATCH_S = 0.5  # how soon pause and cancel are noticed
IDLE_S = 0.2  # how soon new rows are noticed


@dataclass(slots=True)
class Tally:
    """What this harvester has done so far."""

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    late: int = 0  # answers thrown away because the lease had gone
    prompt_tokens: int = 0
    completion_tokens: int = 0
    resumed_tokens: int = 0
    in_flight: int = 0
    waiting_for: str | None = None  # why nothing runs just now
    jobs: list[str] = field(default_factory=list)  # those it took rows of
    cancelled: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # job id -> reason

    @property
    def done(self) -> int:
        """Rows that have a result because of this harvester."""
        return self.succeeded + self.failed

    def count(self, committed: Committed) -> None:
        """Add what a transaction has made durable."""
        self.late += len(committed.late)
        for result in (finished.result for finished in committed.written):
            self.failed += result.failed
            self.succeeded += not result.failed
            self.prompt_tokens += result.prompt_tokens
            self.completion_tokens += result.completion_tokens
            self.resumed_tokens += result.resumed_tokens


@dataclass(slots=True, eq=False)
class Flight:
    """One row on its way through the endpoint."""

    work: Work
    tokens: Sequence[int]  # generated so far
    saved: int  # how many of them the store has, or is about to have
    alone: bool = True  # nothing else was in the endpoint's hands meanwhile
    lost: bool = False  # its lease has gone: drop it without a word
    task: "asyncio.Task[None] | None" = None


class Harvester:
    """Drains the queue of a store into an endpoint."""

    def __init__(
        self,
        store: Store,
        endpoint: Endpoint,
        *,
        lease_s: float = 60.0,
        max_attempts: int = 5,
        only: Collection[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.endpoint = store, endpoint
        self.lease_s, self.max_attempts, self.only, self.clock = lease_s, max_attempts, only, clock
        self.owner = owners.this_process()
        self.tally = Tally()
        self.ready_at: float | None = None  # when the endpoint was ready, on the monotonic clock
        self.ended_at: float | None = None  # when the last row was durable, before the endpoint closed
        self._workload = Workload(store)
        self._recorder = Recorder(store, clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._flights: set[Flight] = set()
        self._outbox = Outbox()
        self._held: Counter[int] = Counter()  # epoch -> rows whose outcome the store has not seen
        self._landed = asyncio.Event()  # some row left the endpoint
        self._outbox_full = asyncio.Event()
        self._claim_at = 0.0  # no sooner while rows are in flight, since the last claim found nothing
        self._hold_s = 0.0
        self._hold_until = 0.0
        self._broken: EndpointUnusable | None = None

    async def run(self, stop: asyncio.Event) -> Tally:
        """Work until the queue is empty or `stop` is set; then what is in flight goes back with its tokens."""
        failed: BaseException | None = None
        try:
            await self.endpoint.start()
            self.ready_at = time.monotonic()
            await self._in_store(self._recover)
            await self._until_drained(stop)
        except BaseException as error:
            failed = error
            raise
        finally:
            await self._put_down(failed)
        return self.tally

    async def _until_drained(self, stop: asyncio.Event) -> None:
        """Run the loops until there is nothing left to feed; a loop that breaks ends them all."""
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
        """Withdraw what is in flight, save its tokens, give its rows back, and close everything."""
        await cancelled([flight.task for flight in self._flights if flight.task is not None])
        try:
            await self._flush()
            await self._in_store(self._give_back)
        except ConserveError:
            if failed is None:
                raise
            log.debug("the store could not be told about rows in flight; their leases will expire")
        finally:
            self.ended_at = time.monotonic()
            await self.endpoint.close()
            self._workload.close()
            self._thread.shutdown()

    # Feed: keep the endpoint full.

    async def _feed(self) -> None:
        """Claim rows whenever a quarter of the endpoint is free; return once the queue is empty."""
        while True:
            await self._hold()
            free = self.endpoint.capacity - len(self._flights)
            works: list[Work] = []
            due = not self._flights or self.clock() >= self._claim_at
            if due and free >= max(1, self.endpoint.capacity // 4) and not self._suspect_in_flight():
                works = await self._in_store(self._claim, free, False)
                self._claim_at = 0.0 if works else self.clock() + IDLE_S
            if not works and not self._flights:
                await self._flush()
                works = await self._in_store(self._claim, 1, True)
                if not works and await self._in_store(self._nothing_left):
                    return
            for work in works:
                self._launch(work)
            if not works:
                await self._wait_for_landing()

    def _suspect_in_flight(self) -> bool:
        return any(flight.work.row.suspect for flight in self._flights)

    async def _hold(self) -> None:
        """Wait while the endpoint has asked for quiet; raise if it has broken for good."""
        while (left := self._hold_until - self.clock()) > 0 and self._broken is None:
            await asyncio.sleep(min(left, IDLE_S))
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

    def _claim(self, limit: int, suspect: bool) -> list[Work]:
        """Lease rows and load their requests (store thread)."""
        while True:
            now = self.clock()
            with self.store.write() as tx:
                lease = queue.claim(
                    tx,
                    owner=self.owner,
                    now=now,
                    lease_s=self.lease_s,
                    limit=limit,
                    only=self.only,
                    suspect=suspect,
                )
            if lease is None:
                return []
            reason = self._workload.refusal(lease.job_id)
            if reason is None:
                return self._workload.load(lease, self.endpoint.identity)
            with self.store.write() as tx:
                queue.end(tx, [lease.epoch])
                catalog.refuse(tx, lease.job_id, reason, now=now)
            self.tally.refused[lease.job_id] = reason

    def _nothing_left(self) -> bool:
        """Whether the queue is drained; says what it waits for if not (store thread)."""
        now = self.clock()
        with self.store.write() as tx:
            queue.abandon(tx, owners.dead(queue.owners(tx)))
            queue.expire(tx, now=now)
            left = queue.backlog(tx, only=self.only)
        if left.waiting and left.next_at is not None and left.next_at > now:
            self.tally.waiting_for = f"{left.waiting} rows wait for their next attempt"
        elif left.leased:
            self.tally.waiting_for = f"{left.leased} rows are with another conserve run"
        else:
            self.tally.waiting_for = None
        return not left.leased and not left.waiting

    # Work: one row.

    def _launch(self, work: Work) -> None:
        """Start a row's task, or finish it at once if it could not be rendered."""
        self._held[work.epoch] += 1
        if work.call is None:
            request = work.request
            self._finish(work, failure(work, request.error_type or "template", request.error or "", now=self.clock()))
            return
        resumed = work.call.resume_from
        flight = Flight(work, resumed, len(resumed), alone=not self._flights)
        for other in self._flights if len(self._flights) == 1 else ():
            other.alone = False
        self._flights.add(flight)
        flight.task = asyncio.create_task(self._work(flight))
        self.tally.in_flight = len(self._flights)

    async def _work(self, flight: Flight) -> None:
        """Send one row and pass on what becomes of it."""
        work = flight.work
        assert work.call is not None
        on_tokens = self._token_saver(flight) if work.can_resume else None
        try:
            completion = await self.endpoint.complete(work.call, on_tokens)
        except asyncio.CancelledError:
            if not flight.lost:
                self._save_tokens(flight)
                self._put_back(work, RetryDecision())
            raise
        except EndpointUnusable as error:
            self._broken = error
            self._put_back(work, RetryDecision())
        except EndpointError as error:
            self._judge(flight, error)
        except Exception as error:  # a bug of the endpoint's must not leave the row in the air
            log.exception("row %d of %s", work.row.position, work.job_id)
            self._judge(flight, EndpointFault(f"{type(error).__name__}: {error}"))
        else:
            self._hold_s = 0.0
            self._finish(work, success(work, completion, now=self.clock()))
        finally:
            self._flights.discard(flight)
            self.tally.in_flight = len(self._flights)
            self._landed.set()

    def _token_saver(self, flight: Flight) -> Callable[[Sequence[int]], None]:
        """Takes the tokens as they come and has every sixty-fourth saved."""

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
        self._outbox.saved[work.key] = SavedTokens(
            work.epoch, *work.key, queue.pack_tokens(flight.tokens), self.endpoint.identity
        )

    def _judge(self, flight: Flight, error: EndpointError) -> None:
        """Fail the row or put it back, as the retry policy says."""
        work = flight.work
        decision = decide(
            error, failures=work.row.failures, max_attempts=self.max_attempts, alone=flight.alone
        )
        if decision.error_type is not None:
            self._finish(work, failure(work, decision.error_type, str(error), now=self.clock()))
            return
        self.tally.retried += 1
        self._save_tokens(flight)
        self._put_back(work, decision)
        if decision.hold_s and self.clock() >= self._hold_until:
            self._hold_s = min(max(decision.hold_s, self._hold_s * 2), LONGEST_BACKOFF_S)
            self._hold_until = self.clock() + self._hold_s
            self.tally.waiting_for = f"{error}; trying again in {self._hold_s:.0f} s"

    def _finish(self, work: Work, result: Result) -> None:
        self._outbox.saved.pop(work.key, None)
        self._outbox.finished.append(Finished(work.epoch, *work.key, result))
        if len(self._outbox.finished) >= FLUSH_ROWS:
            self._outbox_full.set()

    def _put_back(self, work: Work, decision: RetryDecision) -> None:
        self._outbox.returned.append((work, decision))

    # Record: make outcomes durable.

    async def _record(self) -> None:
        """Write the outbox whenever it is full, or every tenth of a second."""
        while True:
            try:
                await asyncio.wait_for(self._outbox_full.wait(), FLUSH_S)
            except TimeoutError:
                pass
            self._outbox_full.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Write the outbox; rows that were in it are out of our hands afterwards."""
        outbox, self._outbox = self._outbox, Outbox()
        if not outbox:
            return
        await self._in_store(self._write, outbox)
        self._held.subtract(outbox.epochs)
        self._held += Counter()  # drops those that have come to zero

    def _write(self, outbox: Outbox) -> None:
        """Make the outbox durable and count it, even if nobody waits any more (store thread)."""
        self.tally.count(self._recorder.write(outbox))

    # Watch: leases, and what other processes did to our jobs.

    async def _watch(self) -> None:
        """Renew leases in time; withdraw rows whose lease has gone or whose job is not to run."""
        renew_at = self.clock() + self.lease_s / 3
        while True:
            await asyncio.sleep(WATCH_S)
            now = self.clock()
            if now >= renew_at and self._held:
                epochs = set(self._held)
                alive = await self._in_store(self._renew, epochs)
                self._withdraw(epochs=epochs - alive, lost=True)
                for gone in epochs - alive:
                    del self._held[gone]
                renew_at = now + self.lease_s / 3
            stopped = await self._in_store(self._stopped_jobs)
            self._withdraw(jobs=stopped, lost=False)

    def _renew(self, epochs: set[int]) -> set[int]:
        """Renew our leases and end those of others that have run out (store thread)."""
        now = self.clock()
        with self.store.write() as tx:
            alive = queue.renew(tx, epochs, now=now, lease_s=self.lease_s)
            queue.expire(tx, now=now)
        return alive

    def _stopped_jobs(self) -> set[str]:
        """Jobs of ours that were paused or cancelled (store thread)."""
        with self.store.read() as tx:
            states = catalog.states(tx, self._workload.seen())
        self.tally.jobs = list(states)
        self.tally.cancelled = [job_id for job_id, state in states.items() if state is JobState.CANCELLED]
        return {job_id for job_id, state in states.items() if state in (JobState.CANCELLED, JobState.PAUSED)}

    def _withdraw(
        self, *, epochs: Collection[int] = (), jobs: Collection[str] = (), lost: bool
    ) -> None:
        """Cancel the rows in flight that are under these leases or of these jobs."""
        for flight in list(self._flights):
            if flight.work.epoch not in epochs and flight.work.job_id not in jobs:
                continue
            flight.lost = lost
            if flight.task is not None:
                flight.task.cancel()

    # The store's thread.

    def _recover(self) -> None:
        """Take back what dead processes held, and finish what they left half done (store thread)."""
        now = self.clock()
        with self.store.write() as tx:
            queue.abandon(tx, owners.dead(queue.owners(tx)))
            queue.expire(tx, now=now)
        shards.compact_finished(self.store, now=now)
        shards.sweep(self.store, now=now)

    def _give_back(self) -> None:
        """End our leases; rows that are still under them wait for the next run (store thread)."""
        with self.store.write() as tx:
            queue.abandon(tx, [self.owner])
        self._stopped_jobs()

    async def _in_store(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


async def cancelled(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
