"""Any interleaving of claim, expire, complete, crash, compact, refuse and retry keeps every row in one place."""

import contextlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import create_engine, event

from conserve.config import load
from conserve.store.books import catalog, choice, journal, leases, queue, saved_tokens, shards
from conserve.store.books.catalog import Source
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.journal import Finished
from conserve.store.books.leases import Lease, Terms
from conserve.store.books.results import Result
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.files.folder_place import FolderPlace
from conserve.store.sql.query import views
from tests.postgres import Databases
from tests.reach import reached
from tests.store_rows import claim_in

LEASE_S = 10.0
OWNERS = ("ann", "ben")
JOB = "job-1"
MOST_ROWS = 12
POSITIONS = st.integers(0, MOST_ROWS - 1)
RARE = (
    "rows that came back are leased again",
    "failed rows are retried",
    "a slow compactor ends",
    "a late writer is refused",
)


class Crash(Exception):
    """The process ends here."""


class Queue(RuleBasedStateMachine):
    """A store, owners that may come back late, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        url = self.url()
        self.store = Store.open(load({"home": self.folder} | ({"store": url} if url else {}), environ={}))
        # What is asserted is read past the code under test.
        self.database = create_engine(self.store.engine.url, isolation_level="AUTOCOMMIT").connect()
        self.read: dict[str, Sequence[dict[str, Any]]] = {}  # answers, until the store changes
        event.listen(self.store.engine, "begin", lambda _: self.read.clear())
        event.listen(self.store.engine, "commit", lambda _: self.read.clear())
        self.now = 1000.0
        self.leases: list[Lease] = []  # also those that have ended: late writers try theirs
        self.expires: dict[int, float] = {}  # of leases that were renewed
        self.begun: list[tuple[bool, Sequence[Any]]] = []  # compactions that have read their rows and no more
        self.written: list[Finished] = []  # and not put back by `retry`
        self.serial = itertools.count()
        self.reached: Counter[str] = Counter()  # steps of this run that came to what they are about

    def url(self) -> str | None:
        """URL of an empty database; None for SQLite in the folder."""
        return None

    @initialize(rows=st.integers(1, MOST_ROWS))
    def submit(self, rows: int) -> None:
        self.num_rows = rows
        layout.job_folder(self.folder, JOB).mkdir(parents=True)
        with self.store.write() as tx:
            source = Source(path="gone.parquet", format="parquet")
            catalog.add(tx, JOB, JobTerms(), task="{}", source=source, num_rows=rows, now=self.now)

    @rule(owner=st.sampled_from(OWNERS), limit=st.integers(1, 8), suspect=st.booleans(), ends=st.booleans())
    def claim(self, owner: str, limit: int, suspect: bool, ends: bool) -> None:
        waiting, free = self.waiting(suspect), self.never_leased()
        terms: dict[str, Any] = {"owner": owner, "now": self.now, "lease_s": LEASE_S}
        with self.store.write() as tx:
            lease = claim_in(tx, **terms, limit=limit, suspect=suspect, ends=ends)
        limit = 1 if suspect else limit
        runnable = self.state is JobState.QUEUED
        expected = waiting if suspect else waiting | free
        assert len(lease.rows if lease else ()) == (min(limit, len(expected)) if runnable else 0)
        if lease is not None:
            assert {row.position for row in lease.rows} <= expected
            assert lease.epoch not in [old.epoch for old in self.leases], "an epoch is used once"
            self.leases.append(lease)

    @rule(owner=st.sampled_from(OWNERS), wanted=st.lists(POSITIONS, unique=True, min_size=1, max_size=4))
    def choose(self, owner: str, wanted: list[int]) -> None:
        """A window wants these rows; what others have had of them it does not get."""
        chosen = [(JOB, position) for position in wanted if position < self.num_rows]
        free, runnable = self.never_leased(), self.state is JobState.QUEUED
        with self.store.write() as tx:
            leases = choice.choose(tx, chosen, Terms(owner, self.now, LEASE_S))
        got = [row.position for lease in leases for row in lease.rows]
        assert got == [position for _, position in chosen if position in free and runnable]
        self.leases += leases

    @precondition(lambda self: self.waiting(suspect=False))
    @rule(owner=st.sampled_from(OWNERS), limit=st.integers(1, 8))
    def reclaim(self, owner: str, limit: int) -> None:
        before = self.never_leased()
        with self.store.write() as tx:
            terms = Terms(owner, self.now, LEASE_S)
            lease = choice.reclaim(tx, queue.runnable_jobs(tx, None, locked=False), 0, terms, limit=limit)
        assert self.never_leased() == before, "only what came back"
        if lease is not None:
            self.reached["rows that came back are leased again"] += 1
            self.leases.append(lease)

    @rule(start=POSITIONS, limit=st.integers(1, 8))
    def look_ahead(self, start: int, limit: int) -> None:
        free = self.never_leased()
        with self.store.read() as tx:
            found = choice.never_leased(tx, JOB, start=start, limit=limit)
            contenders = choice.contenders(tx, queue.runnable_jobs(tx, None, locked=False))
        assert bool(contenders) == bool(free and self.state is JobState.QUEUED)
        assert found == sorted(position for position in free if position >= start)[:limit]

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), failed=st.booleans(), whole=st.booleans(), ends=st.booleans())
    def complete(self, data: st.DataObject, failed: bool, whole: bool, ends: bool) -> None:
        """All rows that a lease still holds, or some."""
        lease = data.draw(st.sampled_from(self.alive()))
        chosen = sorted(self.held(lease))
        if not whole:
            chosen = data.draw(st.lists(st.sampled_from(chosen), unique=True, min_size=1))
        finished = [self.finished(lease.epoch, position, failed) for position in chosen]
        with self.store.write() as tx:
            committed = journal.commit(tx, finished, now=self.now, ends=ends)
        assert (committed.written, committed.late) == (finished, [])
        self.written += finished
        everything = len(self.results()) == self.num_rows
        assert committed.completed == ([JOB] if everything else [])

    @precondition(lambda self: self.never_leased() and self.state is JobState.QUEUED)
    @rule(owner=st.sampled_from(OWNERS), limit=st.integers(1, 4))
    def fail(self, owner: str, limit: int) -> None:
        """Rows fail as soon as they are leased."""
        with self.store.write() as tx:
            lease = claim_in(tx, owner=owner, now=self.now, lease_s=LEASE_S, limit=limit)
            if lease is None:
                return
            finished = [self.finished(lease.epoch, row.position, True) for row in lease.rows]
            assert journal.commit(tx, finished, now=self.now).written == finished
        self.leases.append(lease)
        self.written += finished

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), failed=st.booleans(), suspect=st.booleans())
    def put_back(self, data: st.DataObject, failed: bool, suspect: bool) -> None:
        lease = data.draw(st.sampled_from(self.alive()))
        position = data.draw(st.sampled_from(sorted(self.held(lease))))
        self.return_row(lease, position, failed=failed, suspect=suspect)
        row = self.requests()[position]
        assert (row["epoch"], bool(row["suspect"]), row["available_at"]) == (None, suspect, self.now + 1)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
    def save_tokens(self, data: st.DataObject, tokens: list[int]) -> None:
        lease = data.draw(st.sampled_from(self.alive()))
        position = data.draw(st.sampled_from(sorted(self.held(lease))))
        expected = self.requests()
        if position not in expected:
            expected[position] = self.first_record(lease.epoch, position)
        self.keep(lease, position, tokens)
        packed = saved_tokens.pack_tokens(tokens)
        checksum = saved_tokens.tokens_checksum(packed, "model")
        expected[position] |= {"tokens": packed, "tokens_by": "model", "checksum": checksum}
        assert self.requests() == expected

    @precondition(lambda self: self.late())
    @rule(data=st.data())
    def come_late(self, data: st.DataObject) -> None:
        """A writer whose lease has ended, or whose row was put back, changes nothing and is told so."""
        lease, position = data.draw(st.sampled_from(self.late()))
        self.reached["a late writer is refused"] += 1
        before = self.everything()
        self.return_row(lease, position, failed=False, suspect=True)
        self.keep(lease, position, [7])
        if not self.held(lease):
            finished = [self.finished(lease.epoch, position, False)]
            with self.store.write() as tx:
                assert journal.commit(tx, finished, now=self.now)[:3] == ([], finished, [])
                assert leases.renew(tx, [lease.epoch], now=self.now, lease_s=LEASE_S) == set()
        assert self.everything() == before

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.alive()))
        with self.store.write() as tx:
            assert leases.renew(tx, [lease.epoch], now=self.now, lease_s=LEASE_S) == {lease.epoch}
        self.expires[lease.epoch] = self.now + LEASE_S

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        alive = {lease.epoch: self.expires.get(lease.epoch, lease.expires_at) for lease in self.alive()}
        with self.store.write() as tx:
            over = [sign for sign in leases.signs(tx) if sign.expires_at <= self.now]
            assert leases.end_silent(tx, over) == sum(end <= self.now for end in alive.values())
        assert {lease.epoch for lease in self.alive()} == {e for e, end in alive.items() if end > self.now}

    @precondition(lambda self: self.alive())
    @rule(owner=st.sampled_from(OWNERS))
    def crash(self, owner: str) -> None:
        with self.store.write() as tx:
            leases.abandon(tx, [owner])
        assert not self.select(f"select 1 from lease where owner = '{owner}'")

    @precondition(lambda self: self.journalled())
    @rule(at=st.sampled_from(["never", "before rename", "before register"]))
    def compact(self, at: str) -> None:
        def crash(*_: Any, **__: Any) -> None:
            raise Crash

        with pytest.MonkeyPatch.context() as patch:
            if at == "before rename":
                patch.setattr(FolderPlace, "write", crash)
            if at == "before register":
                patch.setattr(shards, "register", crash)
            with contextlib.suppress(Crash):
                shards.compact(self.store, JOB, now=self.now)
        assert bool(self.journalled()) == (at != "never")

    @precondition(lambda self: self.journalled())
    @rule(failed=st.booleans())
    def begin_compaction(self, failed: bool) -> None:
        """A compactor that is slow: rows are retried, and others compact them, before it comes to write."""
        if rows := shards.oldest(self.store, JOB, failed=failed, at_least=1):
            self.begun.append((failed, rows))

    @precondition(lambda self: self.begun)
    @rule()
    def end_compaction(self) -> None:
        failed, rows = self.begun.pop()
        self.reached["a slow compactor ends"] += 1
        shards.write_shard(self.store, JOB, rows, failed=failed, now=self.now)

    @precondition(lambda self: self.job["failed"])
    @rule()
    def retry(self) -> None:
        failed = {position for position, failed in self.results() if failed}
        before = self.requests()
        assert shards.retry_failed(self.store, JOB, now=self.now) == len(failed)
        assert self.requests().keys() == before.keys() | failed
        self.reached["failed rows are retried"] += bool(failed)
        self.written = [f for f in self.written if f.position not in failed]

    @rule(how=st.sampled_from(["pause", "refuse"]))
    def stop_or_go_on(self, how: str) -> None:
        """Refused it is since its input file has changed. What is in flight may still come to an end."""
        state = self.state
        with self.store.write() as tx:
            if state in (JobState.PAUSED, JobState.FAILED):
                catalog.move(tx, JOB, "resume", now=self.now)
            elif state is JobState.QUEUED and how == "pause":
                catalog.move(tx, JOB, "pause", now=self.now)
            else:
                catalog.refuse(tx, JOB, "changed", FailedBy.INPUT, now=self.now)
        stopped = JobState.PAUSED if how == "pause" else JobState.FAILED
        expected = {JobState.QUEUED: stopped, JobState.COMPLETED: JobState.COMPLETED}
        assert self.state is expected.get(state, JobState.QUEUED)

    @invariant()
    def every_row_is_in_exactly_one_place(self) -> None:
        job, results = self.job, self.results()
        untouched = range(job["next_position"], self.num_rows)
        places = Counter(
            [*untouched, *self.in_spans(), *self.requests(), *(position for position, _ in results)]
        )
        assert places == Counter(range(self.num_rows))
        assert sorted(results) == sorted((f.position, f.result.failed) for f in self.written)
        assert job["failed"] == sum(failed for _, failed in results)
        assert job["succeeded"] == len(results) - job["failed"]
        assert (self.state is JobState.COMPLETED) == (len(results) == self.num_rows)

    @invariant()
    def a_lease_is_there_as_long_as_it_holds_rows(self) -> None:
        held = {epoch for epoch in self.epochs().values() if epoch is not None}
        assert {epoch for (epoch,) in self.select("select epoch from lease")} == held

    def teardown(self) -> None:
        try:
            if hasattr(self, "rows"):
                self.drain()
                for what in RARE:
                    reached(what, self.reached[what])
        finally:
            self.database.close()
            self.database.engine.dispose()
            self.store.close()
            shutil.rmtree(self.folder)

    def drain(self) -> None:
        """Whatever happened, the rest can be finished, and SQL sees every row once, as it was written last."""
        self.time_passes(1e6)
        if self.state in (JobState.PAUSED, JobState.FAILED):
            self.stop_or_go_on("pause")
        for suspect in (False, True):
            while True:
                with self.store.write() as tx:
                    lease = claim_in(tx, owner="zoe", now=self.now, lease_s=LEASE_S, limit=7, suspect=suspect)
                    if lease is None:
                        break
                    rows = [self.finished(lease.epoch, r.position, False) for r in lease.rows]
                    self.written += journal.commit(tx, rows, now=self.now).written
        assert self.state is JobState.COMPLETED
        with views(self.store, now=self.now) as opened:
            seen = opened.duck.execute("select row_index, text, error from results order by 1").fetchall()
        wanted = sorted((f.position, f.result) for f in self.written)
        assert seen == [(position, result.text, result.error) for position, result in wanted]

    def rows_of(self, query: str) -> list[dict[str, Any]]:
        """Rows of a query, by the driver alone: some fifty are made in each step."""
        if query not in self.read:
            driver: Any = self.database.connection.driver_connection
            found = driver.execute(query)
            names = [column[0] for column in found.description]
            self.read[query] = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        return [row.copy() for row in self.read[query]]

    def select(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in self.rows_of(query)]

    def everything(self) -> list[list[tuple[Any, ...]]]:
        tables = ("meta", "job", "lease", "span", "request", "journal", "shard")
        return [sorted(self.select(f"select * from {table}"), key=repr) for table in tables]

    @property
    def job(self) -> dict[str, Any]:
        (row,) = self.rows_of("select * from job")
        return row

    @property
    def state(self) -> JobState:
        return JobState(self.job["state"])

    def requests(self) -> dict[int, dict[str, Any]]:
        return {row["position"]: row for row in self.rows_of("select * from request")}

    def first_record(self, epoch: int, position: int) -> dict[str, Any]:
        """Record of a row that has just left its span."""
        ((claimed_at,),) = self.select(f"select claimed_at from lease where epoch = {epoch}")
        row = {"job_id": JOB, "position": position, "epoch": epoch, "attempts": 1, "started_at": claimed_at}
        return row | {"failures": 0, "available_at": 0.0, "suspect": False, "deaths": None, "losses": None}

    def in_spans(self) -> dict[int, int]:
        """Epoch of the lease of each position that has no record."""
        found: dict[int, int] = {}
        for row in self.rows_of("select * from span"):
            bits = f"{int.from_bytes(row['gone'], 'little'):b}"[::-1]
            there = [p for p in range(row["start"], row["stop"]) if bits[p - row["start"] :][:1] != "1"]
            assert len(there) == row["held"] > 0
            assert not found.keys() & set(there)
            found |= dict.fromkeys(there, row["epoch"])
        return found

    def epochs(self) -> dict[int, int | None]:
        """Epoch of the lease of each live position."""
        return self.in_spans() | dict(self.select("select position, epoch from request"))

    def held(self, lease: Lease) -> set[int]:
        """Positions that are still under this lease."""
        return {position for position, epoch in self.epochs().items() if epoch == lease.epoch}

    def alive(self) -> list[Lease]:
        """Leases that hold rows."""
        epochs = set(self.epochs().values())
        return [lease for lease in self.leases if lease.epoch in epochs]

    def late(self) -> list[tuple[Lease, int]]:
        """Leases and rows that were under them and are no more."""
        epochs = self.epochs()
        rows = [(lease, row.position) for lease in self.leases for row in lease.rows]
        return [(lease, position) for lease, position in rows if epochs.get(position) != lease.epoch]

    def waiting(self, suspect: bool) -> set[int]:
        """Positions that came back, or were passed over, and may be claimed now."""
        rows = self.requests().values()
        return {
            row["position"]
            for row in rows
            if row["epoch"] is None and row["suspect"] == suspect and row["available_at"] <= self.now
        }

    def never_leased(self) -> set[int]:
        rows = self.requests().values()
        passed_over = {
            row["position"] for row in rows if row["started_at"] is None and not row["available_at"]
        }
        return passed_over | set(range(self.job["next_position"], self.num_rows))

    def journalled(self) -> set[int]:
        return {position for (position,) in self.select("select position from journal")}

    def return_row(self, lease: Lease, position: int, *, failed: bool, suspect: bool) -> None:
        with self.store.write() as tx:
            row = {"epoch": lease.epoch, "job_id": JOB, "position": position}
            queue.put_rows_back(
                tx, [queue.Returned(**row, available_at=self.now + 1, failed=failed, suspect=suspect)]
            )
            leases.end_if_empty(tx, [lease.epoch])

    def keep(self, lease: Lease, position: int, tokens: list[int]) -> None:
        with self.store.write() as tx:
            saved = SavedTokens(lease.epoch, JOB, position, saved_tokens.pack_tokens(tokens), "model")
            saved_tokens.save_tokens(tx, [saved])

    def results(self) -> list[tuple[int, bool]]:
        """Position and whether it failed, of the journal and of all shards."""
        found = [
            (position, bool(failed))
            for position, failed in self.select("select position, failed from journal")
        ]
        for file, failed in self.select("select file, failed from shard"):
            found += [(p, bool(failed)) for p in pq.read_table(self.folder / file)["position"].to_pylist()]
        return found

    def finished(self, epoch: int, position: int, failed: bool) -> Finished:
        """The result of a row, which differs from every other one."""
        words = f"result {next(self.serial)}"
        result = Result(
            row_index=position,
            text=None if failed else words,
            error_type="scripted" if failed else None,
            error=words if failed else None,
            submitted_at=0.0,
            started_at=0.0,
            finished_at=self.now,
        )
        return Finished(epoch, JOB, position, result)


class QueueOnPostgreSQL(Queue):
    """The same on a server that the tests started."""

    databases: Databases

    def url(self) -> str:
        return self.databases.emptied()


@pytest.fixture(autouse=True)
def server(request: pytest.FixtureRequest) -> None:
    if request.cls is TestQueueOnPostgreSQL:
        QueueOnPostgreSQL.databases = request.getfixturevalue("databases")


TestQueueOnPostgreSQL = QueueOnPostgreSQL.TestCase
TestQueueOnPostgreSQL.settings = hypothesis_settings(max_examples=6, stateful_step_count=50)
TestQueue = Queue.TestCase
TestQueue.settings = hypothesis_settings(max_examples=30, stateful_step_count=50)
