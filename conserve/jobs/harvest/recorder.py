"""Makes outcomes durable: one transaction, which `journal.commit` ends."""

import logging
import time
from collections.abc import Callable

from conserve.errors import StoreError, StoreForbidden, StoreUnreachable
from conserve.jobs.deadlines.work import computed_tokens
from conserve.jobs.harvest.observer import Observer
from conserve.jobs.harvest.retry import RetryDecision
from conserve.jobs.harvest.workload import ReadyRow
from conserve.jobs.harvest.write_behind import Outcomes
from conserve.store.books import catalog, harvested, journal, leases, queue, saved_tokens, shards, spans
from conserve.store.books.journal import Committed, Counted
from conserve.store.books.queue import Returned
from conserve.store.database.store import Store, Transaction

log = logging.getLogger(__name__)
NOTE_S = 1.0  # between two notes of harvested tokens, which then cost a row nothing
AGAIN_S = 30.0  # between two attempts to reach a bucket, each of which holds up the thread
FORBIDDEN_S = 600.0  # between two attempts to write into the folder of a job that this user may not write


class Recorder:
    """Writes outcomes to the store; runs in the store's thread."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        observer: Observer | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        owner: str | None = None,
    ) -> None:
        self._owner = owner  # of the leases; None for any
        self._store, self._clock, self._observer = store, clock, observer or Observer()
        self._gathered: set[str] = set()  # jobs of which so many results have come that they may fill a shard
        self._bytes: dict[str, int] = {}  # of results of a job since they last may have filled a shard
        self._completed: set[str] = set()  # jobs whose last results are to reach a shard
        # Jobs whose folders may not be written, and when they are tried again.
        self._forbidden: dict[str, float] = {}
        self._monotonic, self._compact_at = monotonic, 0.0
        # On the monotonic clock, since a machine may be suspended, and its clock be set, while rows run.
        self._busy_since: float | None = None  # rows have run since then, or since the last note; None: never
        self._idle_since: float | None = None  # no row runs since; None: rows run
        self._tokens = 0  # computed since the last note
        self._unnoted = False  # the last note failed

    def begin(self) -> None:
        """Note that rows are in flight from now on."""
        if self._busy_since is None or self._idle_since is not None:
            self._busy_since, self._idle_since, self._tokens = self._monotonic(), None, 0

    def pause(self) -> None:
        """Note that no row is in flight from now on; what the last ones took may still be written."""
        if self._idle_since is None:
            self._idle_since = self._monotonic()

    def write(self, outcomes: Outcomes) -> Committed:
        """Write outcomes in one transaction; `compact` moves what has gathered by then."""
        now, at, since = self._clock(), self._monotonic(), time.perf_counter()
        with self._store.write() as tx:
            if outcomes.saved or outcomes.returned:
                self._lock(tx, outcomes)
            if outcomes.saved:
                saved_tokens.save_tokens(tx, list(outcomes.saved.values()), owner=self._owner)
            if outcomes.returned:
                rows = [returned(*row, now) for row in outcomes.returned]
                queue.put_rows_back(tx, rows, owner=self._owner)
                leases.end_if_empty(tx, {work.epoch for work, _ in outcomes.returned})
            committed = journal.commit(tx, outcomes.finished, now=now, ends=True, owner=self._owner)
        self._observer.committed(committed, begun=now, seconds=time.perf_counter() - since)
        self._tokens += computed(committed)
        self._note(now, at)
        self._gather(committed)
        return committed

    def _lock(self, tx: Transaction, outcomes: Outcomes) -> None:
        """Lock the leases of outcomes whose kinds would lock some each, then their jobs if retries are counted."""
        spans.locked(tx, {*outcomes.epochs, *(saved.epoch for saved in outcomes.saved.values())})
        if any(decision.is_failure for _, decision in outcomes.returned):
            ended = {finished.job_id for finished in outcomes.finished}
            catalog.lock_jobs(tx, ended | {work.job_id for work, _ in outcomes.returned})

    def _gather(self, committed: Committed) -> None:
        """Take up jobs that are complete, or whose results may fill a shard by their number or their bytes."""
        for job in committed.counted:
            size = self._bytes.pop(job.job_id, 0) + job.bytes
            if fills_a_shard(job) or size >= shards.SHARD_BYTES:
                self._gathered.add(job.job_id)
            elif job.job_id not in committed.completed:
                self._bytes[job.job_id] = size
        self._completed.update(committed.completed)

    def _note(self, now: float, at: float) -> None:
        """Write down the tokens since the last note, if it is time; never raises. `at`: `now`, monotonic.

        All harvesters write to the same row, so the transaction with the results does not.
        """
        since, until = self._busy_since, at if self._idle_since is None else min(at, self._idle_since)
        if since is None or until < since + NOTE_S:
            return
        ahead = now - at
        try:
            with self._store.write() as tx:
                harvested.note(tx, self._tokens, since=ahead + since, now=ahead + until)
        except StoreError as error:  # the results are safe
            if not self._unnoted:
                log.warning("forecasts miss what is harvested from now on: %s", error)
            self._unnoted = True
            return
        self._unnoted = False
        self._tokens, self._busy_since = 0, until

    def recover(self) -> None:
        """Take up the jobs that ended before their last results reached a shard, which `compact` then writes."""
        with self._store.read() as tx:
            self._completed.update(shards.left(tx))

    @property
    def behind(self) -> bool:
        """True if results may wait for a shard."""
        return bool(self._completed or self._gathered or self._forbidden)

    @property
    def ended(self) -> int:
        """Number of ended jobs whose results may wait for a shard."""
        return len(self._completed)

    def compact(self, wait: bool = False) -> bool:
        """Write one shard of a completed job, or of a job that can fill one; False if none can be written now.

        One at a time, since the store's thread renews leases too: after an outage many wait. So another process
        that is compacting a job is waited for only where no lease is held (`wait`).
        """
        # While a bucket is out of reach the results stay in the journal, from which all commands read them too.
        if self._monotonic() < self._compact_at:
            return False
        now = self._monotonic()
        self._completed.update(job_id for job_id, again_at in self._forbidden.items() if now >= again_at)
        try:
            jobs = [*self._completed, *self._gathered - self._completed]
            return any(self._moved(job_id, wait=wait) for job_id in jobs)
        except StoreUnreachable as error:
            self._compact_at = self._monotonic() + AGAIN_S
            log.warning("results stay in the database for now: %s", error)
            return False

    def _moved(self, job_id: str, *, wait: bool) -> bool:
        """Move results of a job to one shard; the job is left alone from then on if there are none to be moved."""
        if job_id in self._completed and self._goes_on(job_id):
            self._completed.remove(job_id)
            self._gathered.add(job_id)
        try:
            moved = self._move(job_id, whole=job_id in self._completed, wait=wait)
            self._forbidden.pop(job_id, None)
        except StoreForbidden as error:
            moved = 0
            if job_id not in self._forbidden:
                log.warning("results of job %s stay in the database: %s", job_id, error)
            self._forbidden[job_id] = self._monotonic() + FORBIDDEN_S
        if moved == 0:  # None: another process is at it, and it is tried again
            self._completed.discard(job_id)
            self._gathered.discard(job_id)
        return bool(moved)

    def _goes_on(self, job_id: str) -> bool:
        """True if a job that was complete has rows to do again, of which few make no shard."""
        with self._store.read() as tx:
            state = catalog.states(tx, [job_id]).get(job_id)
        return state is not None and not state.final

    def _move(self, job_id: str, *, whole: bool, wait: bool) -> int | None:
        """Move a job's results to one shard, if they fill it or `whole`; None if another process is at it."""
        now, since = self._clock(), time.perf_counter()
        positions: list[int] = []
        moved = (
            shards.compact(self._store, job_id, now=now, positions=positions, most=1, wait=wait)
            if whole
            else shards.compact_full(self._store, job_id, now=now, positions=positions)
        )
        if positions:
            self._observer.moved(job_id, positions, begun=now, seconds=time.perf_counter() - since)
        return moved


def fills_a_shard(counted: Counted) -> bool:
    """True of one transaction for each shard of a job, so that harvesters of one job share the work."""
    return counted.done // shards.SHARD_ROWS > (counted.done - counted.new) // shards.SHARD_ROWS


def returned(work: ReadyRow, decision: RetryDecision, now: float) -> Returned:
    """A row that goes back to the queue, as a decision says."""
    return Returned(
        epoch=work.epoch,
        job_id=work.job_id,
        position=work.row.position,
        available_at=now + decision.after_s if decision.after_s else 0.0,
        failed=decision.is_failure,
        suspect=decision.suspect,
        lost=decision.lost,
    )


def computed(committed: Committed) -> int:
    """Tokens that the answers of a transaction took: one each at least, since a server need not say them.

    Predicted work takes one each at least too.
    """
    results = (finished.result for finished in committed.written)
    return sum(max(1, computed_tokens(result)) for result in results if not result.failed)
