"""Concurrent steps of several owners on PostgreSQL are as good as the same steps one after the other.

Each owner is a thread with connections of its own. It records what every step was told. Afterwards a model without
SQL replays the steps in the order in which their transactions committed, and refuses a row that was lost, doubled
or resurrected. That order is the right one: a step that depends on another waits for a lock, which the other holds
until its commit.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from conserve.config import load
from conserve.errors import JobRefused
from conserve.store.books import (
    catalog,
    choice,
    journal,
    leases,
    losses,
    places,
    queue,
    saved_tokens,
    shards,
    spans,
)
from conserve.store.books.journal import Finished
from conserve.store.books.leases import Lease, LeasedRow, Terms
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from tests.postgres import Databases
from tests.store_rows import add_job, claim_in, result

JOBS = ("job-b", "job-a")  # in the order of claims; commits lock them by their ids
ROWS = 60  # of each job
OWNERS = ("ann", "ben", "cat", "dan")
NOW = 1000.0
LEASE_S = 10.0

Row = tuple[str, int]  # job id and position


@dataclass(slots=True)
class Step:
    """One committed transaction: what was asked, and what the store told."""

    xid: int
    owner: str
    kind: str
    told: Any


@dataclass(slots=True)
class Model:
    """The queue as the steps so far leave it."""

    leased: dict[Row, int] = field(default_factory=dict)  # by epoch
    done: dict[Row, tuple[bool, str]] = field(default_factory=dict)  # failed, and the words of the result
    attempts: dict[Row, int] = field(default_factory=lambda: defaultdict(int))
    tokens: dict[Row, bytes] = field(default_factory=dict)
    losses: dict[Row, int] = field(default_factory=lambda: defaultdict(int))
    suspects: set[Row] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)  # paused jobs
    used: set[int] = field(default_factory=set)  # epochs

    def replay(self, step: Step) -> None:
        """Make the step; fails if what it was told cannot be."""
        getattr(self, step.kind)(*step.told)

    def claim(self, given: Sequence[Lease]) -> None:
        for lease in given:
            assert lease.job_id not in self.stopped, "rows of a paused job"
            assert lease.epoch not in self.used, "an epoch is used once"
            self.used.add(lease.epoch)
            for row in lease.rows:
                self.lease_row((lease.job_id, row.position), lease.epoch, row)

    def lease_row(self, at: Row, epoch: int, row: LeasedRow) -> None:
        assert at not in self.leased, f"{at} is leased twice"
        assert at not in self.done, f"{at} is resurrected"
        self.attempts[at] += 1
        assert (row.attempts, row.suspect) == (self.attempts[at], at in self.suspects)
        assert row.tokens == self.tokens.get(at)
        self.leased[at] = epoch

    def commit(self, finished: Sequence[Finished], told: journal.Committed) -> None:
        alive = set(self.leased.values())
        assert told.late == [f for f in finished if f.epoch not in alive]
        assert told.written == [f for f in finished if f.epoch in alive]
        for f in told.written:
            at = f.job_id, f.position
            assert self.leased.pop(at) == f.epoch, f"{at} is under another lease"
            self.done[at] = f.result.failed, f.result.text or f.result.error or ""
            self.tokens.pop(at, None)
            self.suspects.discard(at)
        ended = {f.job_id for f in told.written if self.finished(f.job_id)}
        assert set(told.completed) == ended
        self.stopped -= ended

    def finished(self, job_id: str) -> bool:
        return sum(job == job_id for job, _ in self.done) == ROWS

    def put_back(self, epoch: int, at: Row, suspect: bool) -> None:
        if self.leased.get(at) == epoch:
            del self.leased[at]
            (self.suspects.add if suspect else self.suspects.discard)(at)

    def save(self, epoch: int, at: Row, tokens: bytes) -> None:
        if self.leased.get(at) == epoch:
            self.tokens[at] = tokens

    def end(self, epochs: Sequence[int], lost: bool) -> None:
        ended = [at for at, epoch in self.leased.items() if epoch in epochs]
        if lost:
            self.lose(ended)
        self.leased = {at: epoch for at, epoch in self.leased.items() if epoch not in epochs}

    def lose(self, ended: Sequence[Row]) -> None:
        for at in ended:
            self.losses[at] += 1
        often = [at for at in ended if at not in self.suspects and self.losses[at] >= losses.CANDIDATE]
        often.sort(key=lambda at: (-self.losses[at], at))
        self.suspects.update(often[: losses.most(self.losses[often[0]])] if often else [])

    def renew(self, epochs: set[int], alive: set[int]) -> None:
        assert alive == epochs & set(self.leased.values())

    def retry(self, job_id: str, count: int) -> None:
        again = [at for at, (failed, _) in self.done.items() if failed and at[0] == job_id]
        assert len(again) == count
        for at in again:
            del self.done[at]
            self.attempts[at] = self.losses[at] = 0

    def move(self, job_id: str, verb: str) -> None:
        (self.stopped.add if verb == "pause" else self.stopped.discard)(job_id)


class Recorded:
    """A store that notes the transaction of each step."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.xid = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def write(self) -> Iterator[Any]:
        with self._store.write() as tx:
            # Asked first: the last statement of a step may commit, and what follows is another transaction.
            self.xid = int(tx.scalar(text("select pg_current_xact_id()::text")))
            yield tx

    def go_on(self, tx: Any) -> None:
        """Note the transaction that a claim went on in behind a first statement that committed and took nothing."""
        self.xid = int(tx.scalar(text("select pg_current_xact_id_if_assigned()::text")) or self.xid)


class Owner:
    """One thread: makes steps at random, and keeps the leases it was given, ended ones too."""

    def __init__(self, name: str, url: str, home: Path, seed: int) -> None:
        self.name, self.random = name, random.Random(f"{name} {seed}")
        self.store = Recorded(Store.open(load({"home": home, "store": url}, environ={})))
        self.given: list[Lease] = []
        self.held: list[tuple[int, Row]] = []  # under leases that may have ended
        self.history: list[Step] = []
        self.serial = 0
        self.failure: BaseException | None = None

    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                weights = {step: weight for step, weight in self.steps().items() if weight}
                self.random.choices(list(weights), list(weights.values()))[0]()
        except BaseException as error:
            self.failure = error
        finally:
            self.store.close()

    def steps(self) -> dict[Callable[[], None], int]:
        held = bool(self.held)
        return {
            self.claim: 20,
            self.choose: 6,
            self.commit: 25 * held,
            self.put_back: 8 * held,
            self.save: 8 * held,
            self.renew: 3 * bool(self.given),
            self.end_others: 3,
            self.take_away: 2,
            self.retry: 3,
            self.compact: 2,
            self.stop_or_go_on: 2,
        }

    def note(self, kind: str, *told: Any) -> None:
        self.history.append(Step(self.store.xid, self.name, kind, told))

    def keep(self, given: Sequence[Lease]) -> None:
        self.given += given
        self.held += [(lease.epoch, (lease.job_id, row.position)) for lease in given for row in lease.rows]
        self.note("claim", given)

    def claim(self) -> None:
        suspect, limit = self.random.random() < 0.2, self.random.randint(1, 9)
        only = self.random.choice([None, [JOBS[0]], [JOBS[1]]])
        terms: dict[str, Any] = {"owner": self.name, "now": NOW, "lease_s": LEASE_S}
        try:
            with self.store.write() as tx:
                lease = claim_in(tx, **terms, limit=limit, only=only, suspect=suspect, ends=True)
                self.store.go_on(tx)
        except queue.JobEmptied:
            return
        self.keep([lease] if lease else [])

    def choose(self) -> None:
        wanted = [
            (job, p) for job in JOBS for p in self.random.sample(range(ROWS), self.random.randint(1, 3))
        ]
        with self.store.write() as tx:
            given = choice.choose(tx, wanted, Terms(self.name, NOW, LEASE_S))
        self.keep(given)

    def some(self, most: int) -> list[tuple[int, Row]]:
        """Rows to do something with, which this owner then forgets."""
        chosen = self.random.sample(self.held, min(len(self.held), self.random.randint(1, most)))
        self.held = [row for row in self.held if row not in chosen]
        return chosen

    def commit(self) -> None:
        finished = []
        for epoch, (job_id, position) in self.some(8):
            self.serial += 1
            failed = self.random.random() < 0.15
            words = (
                {"error": f"{self.name} {self.serial}"} if failed else {"text": f"{self.name} {self.serial}"}
            )
            finished.append(Finished(epoch, job_id, position, result(position, failed=failed, **words)))
        with self.store.write() as tx:
            told = journal.commit(tx, finished, now=NOW, ends=True)
        self.note("commit", finished, told)

    def put_back(self) -> None:
        ((epoch, at),) = self.some(1)
        suspect = self.random.random() < 0.3
        with self.store.write() as tx:
            queue.put_rows_back(
                tx, [queue.Returned(epoch=epoch, job_id=at[0], position=at[1], suspect=suspect)]
            )
            leases.end_if_empty(tx, [epoch])
        self.note("put_back", epoch, at, suspect)

    def save(self) -> None:
        epoch, at = self.random.choice(self.held)
        tokens = saved_tokens.pack_tokens([self.random.randrange(1000)])
        with self.store.write() as tx:
            saved_tokens.save_tokens(tx, [SavedTokens(epoch, *at, tokens, "model")])
        self.note("save", epoch, at, tokens)

    def renew(self) -> None:
        epochs = {lease.epoch for lease in self.given[-5:]}
        with self.store.write() as tx:
            alive = leases.renew(tx, sorted(epochs), now=NOW, lease_s=LEASE_S)
        self.note("renew", epochs, alive)

    def end_others(self) -> None:
        """Whichever leases others have: this owner takes them for silent."""
        mine = {epoch for epoch, _ in self.held}
        with self.store.read() as tx:
            over = [sign for sign in leases.signs(tx) if sign.epoch not in mine]
        over = self.random.sample(over, min(2, len(over)))
        with self.store.write() as tx:
            leases.end_silent(tx, over)
            self.ended(tx, [sign.epoch for sign in over], lost=True)

    def take_away(self) -> None:
        """All leases of one owner, as if they were given back."""
        other = {"owner": self.random.choice(OWNERS)}
        with self.store.write() as tx:
            theirs = spans.locked(
                tx, tx.scalars(text("select epoch from lease where owner = :owner"), other).all()
            )
            leases.end(tx, list(theirs))
            self.ended(tx, list(theirs), lost=False)

    def ended(self, tx: Any, epochs: Sequence[int], *, lost: bool) -> None:
        left = set(tx.scalars(text("select epoch from lease")))
        self.store.xid = int(tx.scalar(text("select pg_current_xact_id()::text")))
        self.note("end", [epoch for epoch in epochs if epoch not in left], lost)

    def retry(self) -> None:
        job_id = self.random.choice(JOBS)
        count = shards.retry_failed(self.store, job_id, now=NOW)  # type: ignore[arg-type]
        self.note("retry", job_id, count)

    def compact(self) -> None:
        shards.compact(self.store, self.random.choice(JOBS), now=NOW)  # type: ignore[arg-type]

    def stop_or_go_on(self) -> None:
        job_id, verb = self.random.choice(JOBS), self.random.choice(["pause", "resume", "resume"])
        try:
            with self.store.write() as tx:
                catalog.move(tx, job_id, verb, now=NOW)
        except JobRefused:  # it is completed
            return
        self.note("move", job_id, verb)


@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_history_of_concurrent_steps_is_that_of_a_queue(
    databases: Databases, tmp_path: Path, steps: int
) -> None:
    url = databases.emptied()
    with closing(Store.open(load({"home": tmp_path / "home", "store": url}, environ={}))) as store:
        for job_id in JOBS:
            add_job(store, job_id, rows=ROWS)
        owners = [Owner(name, url, tmp_path / "home", steps) for name in OWNERS]
        make(owners, steps)
        model = Model()
        for step in in_order(store, [step for owner in owners for step in owner.history]):
            model.replay(step)
        judge(store, model)
        drain(store, model)
        judge(store, model)
        assert all(model.finished(job_id) for job_id in JOBS)


def make(owners: Sequence[Owner], steps: int) -> None:
    """Let the owners make this many steps between them, all at the same time."""
    threads = [threading.Thread(target=owner.run, args=[steps // len(owners)]) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for owner in owners:
        if owner.failure is not None:
            raise owner.failure


def in_order(store: Store, steps: Sequence[Step]) -> list[Step]:
    """The steps in the order of their commits."""
    committed = text("select pg_xact_commit_timestamp(cast(cast(:xid as text) as xid))")
    with store.read() as tx:
        moments = {step.xid: tx.scalar(committed, {"xid": str(step.xid)}) for step in steps}
    return sorted(steps, key=lambda step: moments[step.xid])


def judge(store: Store, model: Model) -> None:
    """Every row is in one place, and has the result that the model has."""
    with store.read() as tx:
        for job_id in JOBS:
            found = catalog.get(tx, job_id)
            files = shards.files(tx, [job_id])
            read = [places.content(store.home / file.file, file.seal).positions for file in files]
            times = places.times_found(tx, found, read)
            assert list(times) == [1] * found.next_position
            failed = sum(failed for (job, _), (failed, _) in model.done.items() if job == job_id)
            done = sum(job == job_id for job, _ in model.done)
            assert (found.succeeded, found.failed) == (done - failed, failed)
            assert (found.state is JobState.COMPLETED) == model.finished(job_id)
    from conserve.store.sql.query import views

    with views(store, now=NOW) as opened:
        seen = opened.duck.execute("select job_id, row_index, coalesce(text, error) from results").fetchall()
    assert sorted(seen) == sorted((*at, words) for at, (_, words) in model.done.items())


def drain(store: Store, model: Model) -> None:
    """Finish the rest alone, whatever is left of leases."""
    with store.write() as tx:
        leases.abandon(tx, OWNERS)
        model.end(list(set(model.leased.values())), lost=True)
        for job_id in model.stopped:
            catalog.move(tx, job_id, "resume", now=NOW)
    model.stopped.clear()
    for suspect in (False, True):
        while True:
            with store.write() as tx:
                lease = claim_in(tx, owner="zoe", now=NOW, lease_s=LEASE_S, limit=7, suspect=suspect)
                if lease is None:
                    break
                model.claim([lease])
                finished = [
                    Finished(lease.epoch, lease.job_id, row.position, result(row.position, text="drained"))
                    for row in lease.rows
                ]
                model.commit(finished, journal.commit(tx, finished, now=NOW))
