"""The ledger: all work of a harvester on the store, which runs in the store's one thread."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from conserve import owners
from conserve.endpoints.protocol import KvCache
from conserve.errors import JobNotFound, StoreDamaged, StoreError, StoreForbidden
from conserve.jobs.deadlines.work import QueuedJob
from conserve.jobs.harvest.bound import BoundElsewhere
from conserve.jobs.harvest.comparing import StillCompared
from conserve.jobs.harvest.expiry import Expiry
from conserve.jobs.harvest.observer import Observer
from conserve.jobs.harvest.recorder import Recorder
from conserve.jobs.harvest.sharing import claim_by_shares, settle
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.harvest.turned_away import TurnedAway
from conserve.jobs.harvest.turns import Turns
from conserve.jobs.harvest.workload import ReadyRow, Workload
from conserve.jobs.harvest.write_behind import Outcomes
from conserve.jobs.window.group_window import GroupWindow
from conserve.jobs.window.lookahead import Lookahead
from conserve.jobs.window.shares import Group, Shares, Weights
from conserve.store.books import catalog, choice, leases, queue, servers
from conserve.store.books.leases import Lease, Terms
from conserve.store.books.shapes import RunnableRow
from conserve.store.books.states import ENDED_EARLY, JobState
from conserve.store.database import guard
from conserve.store.database.connection import reserve_space
from conserve.store.database.store import Store, Transaction
from conserve.store.database.store_file import StoreFile
from conserve.store.upkeep.sweep import sweep
from conserve.units import count

RECOVER_S = 1.0  # between two looks for dead owners while nothing can be claimed


class Ledger:
    """Claims rows, records outcomes, renews leases, and notices jobs that were paused, cancelled or removed."""

    def __init__(
        self,
        store: Store,
        tally: Tally,
        *,
        lease_s: float,
        only: Collection[str] | None,
        utility: float,
        share: str | None,
        rebind: bool,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.owner = owners.this_process()
        self._store, self._tally, self._lease_s, self._only, self._clock = store, tally, lease_s, only, clock
        self.kv_cache = KvCache()  # of the endpoint
        self.model: str | None = None  # that answers
        self._rebind = rebind  # bind jobs of other models to this one, at the first claim
        self._elsewhere = BoundElsewhere(store, tally, self.owner)
        self._utility = utility
        self._shares = Shares(Weights.of(share)) if share is not None else None
        self._windows: dict[Group | None, GroupWindow] = {}
        self._turns = Turns(store, clock)
        self._workload = Workload(store, clock)
        self._turned_away = TurnedAway(
            store, tally, self._workload, owner=self.owner, clock=clock, monotonic=monotonic
        )
        self._observer = observer
        self.recorder = Recorder(store, clock, observer, monotonic, owner=self.owner)
        self._file: StoreFile | None = None
        self._last_claim_found_nothing = False
        # A look, which only reads, told that the last claim would find nothing again.
        self.skipped_claim = False
        self._next_at: float | None = None  # when the first row in backoff may run
        self._recover_at = 0.0
        self._monotonic, self._expiry = monotonic, Expiry(lease_s, monotonic)
        self._ended: set[str] = set()  # jobs that had ended when last looked at

    def reopen(self) -> None:
        """Open new connections, and check that the store exists and can be written."""
        self._close_windows()
        self._workload.close_files()
        self.recorder.pause()
        self._file = StoreFile.of(self._store)
        self._store.close()
        with self._store.write() as tx:
            reserve_space(tx)

    def recover(self) -> None:
        """Take back rows of dead owners and of this owner's last session; take up ended jobs; sweep."""
        now = self._clock()
        if self._shares is not None:  # no row is in flight, and what has ended is written
            self._shares.lost()
        with self._store.write() as tx:
            leases.abandon(tx, leases.dead_owners(tx), mine=self.owner)
            self._end_silent(tx)
            catalog.unbind(tx)
            if not self._rebind:
                self._elsewhere.look(tx, self.model, self._only)
        self.recorder.recover()
        sweep(self._store, now=now)

    def give_back(self) -> None:
        """End this owner's leases; rows that are still under them wait for the next run."""
        with self._store.write() as tx:
            leases.abandon(tx, [], mine=self.owner)
            servers.forget(tx, self.owner)
        with suppress(StoreError), self._store.write() as tx:  # on which nothing that was given back depends
            catalog.unbind(tx)
        self.stopped_jobs()

    def claim(self, limit: int, suspect: bool, identity: str) -> list[ReadyRow]:
        """Lease up to `limit` rows and load their requests; refuses a job whose requests cannot be read."""
        begun, since = self._clock(), self._monotonic()
        works = self._claim_any(limit, suspect, identity)
        if works:
            self._observer.claimed(works, begun=begun, seconds=self._monotonic() - since)
        return works

    def _claim_any(self, limit: int, suspect: bool, identity: str) -> list[ReadyRow]:
        if self._rebind:
            self._bind_all()
        self._elsewhere.free(self.model)
        self.skipped_claim = self._last_claim_found_nothing and not self.claimable()
        if self.skipped_claim:
            works: list[ReadyRow] = []
        elif self._shares is None or suspect:
            works = self._claim_unless_refused(None, limit, suspect, identity)
        else:
            works = self._claim_shared(self._shares, limit, identity)
        self._note_busy(bool(works))
        return works

    def _note_busy(self, claimed: bool) -> None:
        """Note for the rate of harvested tokens whether rows run."""
        if claimed:
            self.recorder.begin()
        elif not self._tally.in_flight:
            self.recorder.pause()

    def _claim_shared(self, shares: Shares, limit: int, identity: str) -> list[ReadyRow]:
        """Lease rows of several groups by their weights."""
        with self._store.read() as tx:
            runnable = self._runnable(tx)
            back = queue.having(tx, runnable, queue.returned(), self._clock())
            groups = shares.groups(job for job in runnable if queue.has_fresh(job) or job.seq in back)
        for gone in self._windows.keys() - set(groups):
            self._windows.pop(gone).close()

        def claim_of(group: Group, rows: int) -> list[ReadyRow]:
            return self._claim_unless_refused(group, rows, suspect=False, identity=identity)

        works = claim_by_shares(shares, groups, limit, claim_of)
        self._last_claim_found_nothing = not works
        return works

    def _claim_unless_refused(
        self, group: Group | None, limit: int, suspect: bool, identity: str
    ) -> list[ReadyRow]:
        """Lease rows of a group; a job whose requests cannot be read is refused, and the others are tried."""
        window = self._windows.setdefault(group, GroupWindow(group))
        while True:
            try:
                return self._claim(window, limit, suspect, identity)
            except JobNotFound:  # removed since its rows were leased
                continue
            except (StoreDamaged, StoreForbidden) as error:
                if error.job_id is None:
                    raise
                self._turned_away.add(error.job_id, error)

    def _claim(self, window: GroupWindow, limit: int, suspect: bool, identity: str) -> list[ReadyRow]:
        """Lease and load rows of the window's group, once late jobs are ended and deadlines foreseen."""
        emptied: set[int] = set()
        while True:
            now = self._clock()
            try:
                with self._store.write() as tx:
                    late = catalog.late(tx, now=now)
                    listed = self._runnable(tx, window.group)
                    waiting = [job for job in listed if job.seq not in emptied] if emptied else listed
                    due = late or self._turns.is_to_foresee(waiting, now)
                    found = None if due else self._lease(tx, window, waiting, limit, suspect, now)
            except queue.JobEmptied as error:  # the transaction has let its lock go
                emptied.add(error.seq)
                continue
            if late:
                self._expire(late)
                continue
            if found is None:
                with self._store.read() as tx:
                    everything = self._runnable(tx)
                self._turns.foresee(everything, now)
                continue
            lease, jobs, windowed = found
            if lease is None and windowed:
                turned_away = self._turned_away.times
                works = self._claim_chosen(window, jobs, limit, identity)
                nothing = works is None and turned_away == self._turned_away.times
                self._last_claim_found_nothing = nothing
                if works or nothing:
                    return works or []
                continue  # a job was turned away
            self._last_claim_found_nothing = lease is None
            if lease is None:
                return []
            if window.lookahead is not None and not windowed:
                window.lookahead.forget(lease.job_id)
            if works := self._load(lease, identity):
                return works

    def _lease(
        self,
        tx: Transaction,
        window: GroupWindow,
        waiting: Sequence[RunnableRow],
        limit: int,
        suspect: bool,
        now: float,
    ) -> tuple[Lease | None, Sequence[QueuedJob], bool]:
        """Lease rows of one of the waiting jobs; also the jobs that contend for more, and if the window chooses."""
        terms = Terms(self.owner, now, self._lease_s, self.model)
        runnable = self._turns.ordered(waiting, now=now, group=window.group)
        jobs = [] if suspect else choice.contenders(tx, runnable)
        if windowed := window.is_to_choose(tx, jobs):
            back = self._turns.before(runnable, jobs[0])
            return choice.reclaim(tx, back, jobs[0].priority, terms, limit=limit), jobs, windowed
        return queue.claim(tx, terms, runnable, limit=limit, suspect=suspect, ends=True), jobs, windowed

    def _runnable(self, tx: Transaction, group: Group | None = None) -> Sequence[RunnableRow]:
        """Jobs that this harvester may take rows of: all, or those of a group."""
        one = None if group is None else group.job
        listed = queue.runnable_jobs(tx, self._only, self.model, seq=one, locked=False)
        found = self._turned_away.others(listed, all_listed=one is None)
        if self._shares is None or group is None:
            return found
        return [job for job in found if self._shares.weights.group_of(job) == group]

    def _claim_chosen(
        self, window: GroupWindow, jobs: Sequence[QueuedJob], limit: int, identity: str
    ) -> list[ReadyRow] | None:
        """Lease the rows that the window gives out, in its order; None if all of them were leased by others."""
        lookahead = window.lookahead or Lookahead(self._store, utility=self._utility, cache=self.kv_cache)
        window.lookahead = None
        leases: list[Lease] = []
        try:
            lookahead.follow(jobs, self._turned_away.looked_at, self._turns.order(jobs))
            while not leases and (chosen := lookahead.take(limit)):
                terms = Terms(self.owner, self._clock(), self._lease_s, self.model)
                with self._store.write() as tx:
                    leases = choice.choose(tx, chosen, terms)
                    choice.remember(tx, lookahead.place)
        finally:
            if leases:
                window.lookahead = lookahead
            else:  # interrupted, the window may have given out rows that were never leased
                lookahead.close()
        works: dict[tuple[str, int], ReadyRow] = {}
        for lease in leases:
            works |= {work.key: work for work in self._load(lease, identity)}
        return [works[row] for row in chosen if row in works] if leases else None

    def _load(self, lease: Lease, identity: str) -> list[ReadyRow]:
        """Load the rows of a lease with their requests; none of a job that must not run."""
        if self._turned_away.looked_at(lease.job_id, lease.epoch):
            return []
        self._tally.begin(lease.job_id)
        try:
            pushes = lease.job_id in self._turns.pushing
            return self._workload.load(lease, identity, model=self.model, pushes=pushes)
        except (StoreDamaged, StoreForbidden, StillCompared) as error:
            self._turned_away.add(lease.job_id, error, lease.epoch)
            return []

    def claimable(self) -> bool:
        """True if a claim may find rows; it only reads, so that an idle harvester holds up no writer."""
        with self._store.read() as tx:
            runnable = self._runnable(tx)
            if any(map(queue.has_fresh, runnable)):
                return True
            left = self._backlog(tx)
        return left.next_at is not None and not 0 < left.next_at - self._clock() <= queue.LONGEST_WAIT_S

    def wait_s(self, most_s: float) -> float:
        """Seconds until a row in backoff may run, `most_s` at most; 0 while files of jobs are compared."""
        if self._turned_away.compared:
            return 0.0
        return most_s if self._next_at is None else min(most_s, self._next_at - self._clock())

    def nothing_left(self) -> bool:
        """True if the queue is drained; notes in the tally what it waits for if not."""
        now = self._clock()
        with self._store.read() as tx:
            left, holders = self._backlog(tx), leases.owners(tx)
            unleased = any(map(queue.has_fresh, self._runnable(tx)))
            self._elsewhere.look(tx, self.model, self._only)
        if holders and self._monotonic() >= self._recover_at:
            self._recover_at = self._monotonic() + RECOVER_S
            with self._store.write() as tx:
                leases.abandon(tx, leases.dead_owners(tx))
                self._end_silent(tx)
                left = self._backlog(tx)
        if compared := self._turned_away.compared:
            self._tally.waiting_for = (
                f"the files of {count(len(compared), 'job')} are compared with their digests"
            )
        elif left.waiting and left.next_at is not None and left.next_at > now:
            rows = count(left.waiting, "row waits for its", "rows wait for their")
            self._tally.waiting_for = f"{rows} next attempt"
        elif left.leased:
            rows = count(left.leased, "row is", "rows are")
            self._tally.waiting_for = f"{rows} with another conserve run"
        else:
            self._tally.waiting_for = "no server takes rows" if unleased else None
        return not (left.leased or left.waiting or unleased or compared)

    def _backlog(self, tx: Transaction) -> queue.UnclaimableRows:
        but = self._turned_away.waiting
        left = queue.backlog(tx, only=self._only, but=but, model=self.model)
        self._next_at = left.next_at
        return left

    def _bind_all(self) -> None:
        """Bind all jobs of this run to its model, whatever they were bound to."""
        assert self.model is not None
        with self._store.write() as tx:
            catalog.rebind(tx, list(catalog.of_other_models(tx, self.model, self._only)), self.model)
        self._rebind = False

    def write(self, outcomes: Outcomes) -> None:
        """Make outcomes durable and count them, even if the flush that asked for it was cancelled.

        Then move results to one shard where enough have gathered: if that fails, the outcomes are counted.
        """
        committed = self.recorder.write(outcomes)
        # Of a repetition the late ones may be those that were durable before.
        self._tally.count(committed._replace(late=[]) if outcomes.repeated else committed)
        if self._shares is not None:
            settle(self._shares, outcomes)
        self.recorder.compact()

    def renew(self, epochs: set[int]) -> set[int]:
        """Renew these leases, then end the leases that are over; returns the epochs that still exist."""
        now = self._clock()
        with self._store.write() as tx:
            alive = leases.renew(tx, epochs, now=now, lease_s=self._lease_s, owner=self.owner)
            self._end_silent(tx)
        if self._shares is not None:
            self._shares.lost(epochs - alive)
        return alive

    def _end_silent(self, tx: Transaction) -> None:
        """End leases that are renewed no more; one of our own is that of a claim whose answer was lost."""
        leases.end_silent(tx, self._expiry.over(leases.signs(tx)), mine=self.owner)

    def stopped_jobs(self) -> set[str]:
        """Open jobs that were paused, cancelled, removed or expired; closes the files of jobs that have ended."""
        if self._file is not None:
            self._file.check()
        with self._store.read() as tx:
            guard.require_here(tx)
            late = catalog.late(tx, now=self._clock())
            states = catalog.states(tx, self._workload.seen())
        states |= dict.fromkeys(states.keys() & self._expire(late), JobState.EXPIRED)
        removed = set(self._workload.seen()) - states.keys()
        ended = {job_id for job_id, state in states.items() if state.final} | removed
        self._workload.close(ended & self._ended)  # rows claimed just before have been withdrawn by now
        stopped = {id_ for id_, state in states.items() if state.stopped} | removed
        self._workload.close_files(stopped)
        self._ended = ended
        early = [id_ for id_, state in states.items() if state in ENDED_EARLY]
        self._tally.cancelled |= dict.fromkeys(early)
        return stopped

    def _expire(self, late: Sequence[str]) -> Sequence[str]:
        """End late jobs in a transaction of its own (jobs are locked after leases); count those of this run."""
        if not late:
            return late
        with self._store.write() as tx:
            expired = catalog.expire(tx, now=self._clock())
        ours = expired if self._only is None else [job_id for job_id in expired if job_id in self._only]
        self._tally.cancelled |= dict.fromkeys(ours)
        return expired

    def close(self) -> None:
        """Close the windows and the request files."""
        self._close_windows()
        self._workload.close()

    def _close_windows(self) -> None:
        for window in self._windows.values():
            window.close()
        self._windows.clear()
