"""Any interleaving of claim, expire, complete, crash, compact and retry keeps every row in one place."""

import contextlib
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import select

from conserve.config import load
from conserve.store import catalog, choice, home, journal, queue, schema, shards
from conserve.store.catalog import Source
from conserve.store.choice import Terms
from conserve.store.journal import Finished
from conserve.store.query import views
from conserve.store.queue import Lease, SavedTokens
from conserve.store.results import Result
from conserve.store.states import JobState
from conserve.store.store import Store
from tests.conftest import examples
from tests.reach import reached

LEASE_S = 10.0
OWNERS = ("ann", "ben")
JOB = "job-1"


class Crash(Exception):
    """The process ends here."""


class Queue(RuleBasedStateMachine):
    """A store, owners that may come back late, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store.open(load({"home": self.folder}, environ={}))
        self.now = 1000.0
        self.leases: list[Lease] = []  # also those that have ended: late writers try theirs
        self.answered: Counter[int] = Counter()

    @initialize(rows=st.integers(1, 25))
    def submit(self, rows: int) -> None:
        self.rows = rows
        home.job_folder(self.folder, JOB).mkdir(parents=True)
        with self.store.write() as tx:
            source = Source(path="gone.parquet", format="parquet")
            catalog.add(tx, job_id=JOB, task="{}", source=source, num_rows=rows, priority=0, now=self.now)

    @rule(owner=st.sampled_from(OWNERS), limit=st.integers(1, 8), suspect=st.booleans())
    def claim(self, owner: str, limit: int, suspect: bool) -> None:
        with self.store.write() as tx:
            lease = queue.claim(tx, owner=owner, now=self.now, lease_s=LEASE_S, limit=limit, suspect=suspect)
        if reached("rows are claimed", lease is not None):
            assert lease is not None
            assert 1 <= len(lease.rows) <= limit
            assert lease.epoch not in [old.epoch for old in self.leases], "an epoch is used once"
            self.leases.append(lease)

    @rule(owner=st.sampled_from(OWNERS), wanted=st.lists(st.integers(0, 24), unique=True, min_size=1))
    def choose(self, owner: str, wanted: list[int]) -> None:
        """A window wants these rows; what others have had of them it does not get."""
        chosen = [(JOB, position) for position in wanted if position < self.rows]
        reading = self.reading()
        with self.store.write() as tx:
            free = set(choice.passed_over(tx, JOB)) | set(range(reading.next_position, self.rows))
            leases = choice.choose(tx, chosen, Terms(owner, self.now, LEASE_S))
        got = [row.position for lease in leases for row in lease.rows]
        runnable = reading.state is JobState.QUEUED
        reached("rows are chosen", got)
        assert got == [position for _, position in chosen if position in free and runnable]
        self.leases += leases

    @rule(owner=st.sampled_from(OWNERS), limit=st.integers(1, 8))
    def reclaim(self, owner: str, limit: int) -> None:
        with self.store.write() as tx:
            before = set(choice.passed_over(tx, JOB))
            lease = choice.reclaim(
                tx, queue.runnable_jobs(tx, None), 0, Terms(owner, self.now, LEASE_S), limit=limit
            )
            assert set(choice.passed_over(tx, JOB)) == before, "only what came back"
        if reached("rows come back", lease is not None):
            assert lease is not None
            self.leases.append(lease)

    @rule(start=st.integers(0, 24), limit=st.integers(1, 8))
    def look_ahead(self, start: int, limit: int) -> None:
        with self.store.read() as tx:
            found = choice.never_leased(tx, JOB, start=start, limit=limit)
            free = {*choice.passed_over(tx, JOB), *range(self.reading().next_position, self.rows)}
            assert bool(choice.contenders(tx, queue.runnable_jobs(tx, None))) == bool(
                free and self.reading().state is JobState.QUEUED
            )
        reached("rows are ahead", found)
        assert found == sorted(position for position in free if position >= start)[:limit]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), failed=st.booleans())
    def complete(self, data: st.DataObject, failed: bool) -> None:
        """Some rows of some lease, which may have ended long ago."""
        lease = data.draw(st.sampled_from(self.leases))
        live = self.live_positions(lease.epoch)
        reached("a live lease completes", live)
        reached("a late one completes", not live)
        wanted = (
            [row.position for row in lease.rows if row.position in live]
            if live
            else [row.position for row in lease.rows]
        )
        chosen = data.draw(st.lists(st.sampled_from(wanted), unique=True, min_size=1))
        finished = [
            Finished(lease.epoch, JOB, position, self.result(position, failed)) for position in chosen
        ]
        with self.store.write() as tx:
            committed = journal.commit(tx, finished, now=self.now)
        assert len(committed.written) == (len(chosen) if live else 0), "only a live lease may write"
        assert len(committed.written) + len(committed.late) == len(chosen)
        self.answered.update(f.position for f in committed.written if not failed)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), failed=st.booleans(), suspect=st.booleans())
    def put_back(self, data: st.DataObject, failed: bool, suspect: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        row = data.draw(st.sampled_from(lease.rows))
        with self.store.write() as tx:
            queue.put_back(
                tx,
                epoch=lease.epoch,
                job_id=JOB,
                position=row.position,
                available_at=self.now + 1,
                failed=failed,
                suspect=suspect,
            )
            queue.end_if_empty(tx, [lease.epoch])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
    def save_tokens(self, data: st.DataObject, tokens: list[int]) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        row = data.draw(st.sampled_from(lease.rows))
        live = row.position in self.live_positions(lease.epoch)
        before = self.request(row.position)
        with self.store.write() as tx:
            saved = SavedTokens(lease.epoch, JOB, row.position, queue.pack_tokens(tokens), "model")
            queue.save_tokens(tx, [saved])
        after = self.request(row.position)
        if reached("a live lease saves tokens", live):
            assert queue.unpack_tokens(after.tokens) == tokens
        else:
            assert after == before, "a late writer changes nothing"

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        epochs = data.draw(st.sets(st.sampled_from([lease.epoch for lease in self.leases]), min_size=1))
        with self.store.write() as tx:
            alive = queue.renew(tx, epochs, now=self.now, lease_s=LEASE_S)
        reached("leases are renewed", alive)
        reached("leases are gone", epochs - alive)
        assert alive == {epoch for epoch in epochs if self.live_positions(epoch)}

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        with self.store.write() as tx:
            queue.expire(tx, now=self.now)

    @rule(owner=st.sampled_from(OWNERS))
    def crash(self, owner: str) -> None:
        with self.store.write() as tx:
            queue.abandon(tx, [owner])

    @rule(at=st.sampled_from(["never", "before rename", "before register"]))
    def compact(self, at: str) -> None:
        def crash(*_: Any, **__: Any) -> None:
            raise Crash

        with pytest.MonkeyPatch.context() as patch:
            if at == "before rename":
                patch.setattr(home, "write_durably", crash)
            if at == "before register":
                patch.setattr(shards, "register", crash)
            with contextlib.suppress(Crash):
                shards.compact(self.store, JOB, now=self.now)
        if at == "never":
            with self.store.read() as tx:
                assert journal.size(tx, JOB) == 0

    @rule()
    def retry(self) -> None:
        failed = self.reading().failed
        reached("rows are retried", failed)
        assert shards.retry_failed(self.store, JOB, now=self.now) == failed
        assert self.reading().failed == 0

    @rule(verb=st.sampled_from(["pause", "resume"]))
    def tell(self, verb: str) -> None:
        if self.reading().state is not JobState.COMPLETED:
            with self.store.write() as tx:
                catalog.move(tx, JOB, verb, now=self.now)

    @invariant()
    def every_row_is_in_exactly_one_place(self) -> None:
        job = self.reading()
        with self.store.read() as tx:
            live = list(tx.scalars(select(schema.request.c.position)))
            journalled = tx.execute(select(schema.journal.c.position, schema.journal.c.failed)).all()
            files = tx.execute(select(schema.shard.c.file, schema.shard.c.failed)).all()
        sharded = [
            (position, file.failed)
            for file in files
            for position in pq.read_table(self.folder / file.file)["position"].to_pylist()
        ]
        results = [tuple(row) for row in journalled] + sharded
        untouched = range(job.next_position, self.rows)
        places = Counter([*untouched, *live, *(position for position, _ in results)])
        assert places == Counter(range(self.rows))
        assert job.failed == sum(failed for _, failed in results)
        assert job.succeeded == len(results) - job.failed
        assert max(self.answered.values(), default=0) <= 1, "no row is answered twice"
        assert (job.state is JobState.COMPLETED) == (len(results) == self.rows)

    def teardown(self) -> None:
        try:
            if hasattr(self, "rows"):
                self.drain()
        finally:
            self.store.close()
            shutil.rmtree(self.folder)

    def drain(self) -> None:
        """Whatever happened, the rest can be finished, and SQL sees every row once."""
        self.time_passes(1e6)
        if self.reading().state is JobState.PAUSED:
            self.tell("resume")
        for suspect in (False, True):
            while True:
                with self.store.write() as tx:
                    lease = queue.claim(
                        tx, owner="zoe", now=self.now, lease_s=LEASE_S, limit=7, suspect=suspect
                    )
                    if lease is None:
                        break
                    rows = [
                        Finished(lease.epoch, JOB, r.position, self.result(r.position, False))
                        for r in lease.rows
                    ]
                    journal.commit(tx, rows, now=self.now)
        assert self.reading().state is JobState.COMPLETED
        with views(self.store, now=self.now) as opened:
            seen = opened.duck.execute("select row_index from results order by 1").fetchall()
        assert seen == [(index,) for index in range(self.rows)]

    def reading(self) -> catalog.Job:
        with self.store.read() as tx:
            return catalog.get(tx, JOB)

    def request(self, position: int) -> Any:
        with self.store.read() as tx:
            return tx.execute(
                select(schema.request).where(schema.request.c.position == position)
            ).one_or_none()

    def live_positions(self, epoch: int) -> set[int]:
        with self.store.read() as tx:
            return set(tx.scalars(select(schema.request.c.position).where(schema.request.c.epoch == epoch)))

    def result(self, position: int, failed: bool) -> Result:
        return Result(
            row_index=position,
            text=None if failed else "yes",
            error_type="scripted" if failed else None,
            error="no" if failed else None,
            submitted_at=0.0,
            started_at=0.0,
            finished_at=self.now,
        )


TestQueue = Queue.TestCase
TestQueue.settings = hypothesis_settings(max_examples=examples(100), stateful_step_count=40)
