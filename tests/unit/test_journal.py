"""Commits: every row's result is written exactly once, and the counters are what a recount would give."""

import pytest

from conserve.store.books import catalog, journal, leases
from conserve.store.books.journal import Finished
from conserve.store.books.results import decode
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database.store import Store
from tests.store_rows import add_job, finish, job, leased, live, positions, put_back, result, select

TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens", "resumed_tokens")


def test_a_result_moves_from_the_queue_to_the_journal(store: Store) -> None:
    add_job(store, rows=3)
    lease = leased(store)
    committed = finish(store, lease, of=[1], failed=[1])
    assert [f.position for f in committed.written] == [1]
    assert (committed.late, committed.completed) == ([], [])
    assert live(store) == {0: lease.epoch, 2: lease.epoch}
    ((job_id, position, failed, payload),) = select(
        store, "select job_id, position, failed, payload from journal"
    )
    assert (job_id, position, failed) == ("job-1", 1, True)
    assert decode(payload) == result(1, failed=True)


def test_counters_are_what_a_recount_gives(store: Store) -> None:
    for name, rows in (("one", 6), ("other", 3)):
        add_job(store, name, rows=rows)
    for name in ("one", "other", "one"):
        lease = leased(store, only=[name], limit=3)
        counts = {counter: lease.epoch * 10 + n for n, counter in enumerate(TOKENS)}
        finish(store, lease, failed=positions(lease)[:1], **counts)
    for name in ("one", "other"):
        found = select(store, f"select payload from journal where job_id = '{name}'")
        results = [decode(payload) for (payload,) in found]
        stored = job(store, name)
        assert stored.failed == sum(r.failed for r in results) > 0
        assert stored.succeeded == sum(not r.failed for r in results) > 0
        for counter in TOKENS:
            assert getattr(stored, counter) == sum(getattr(r, counter) for r in results) > 0


def test_results_of_several_leases_and_jobs_go_together(store: Store) -> None:
    """In one transaction, results of a lost lease are left out and the others are written."""
    for name in ("one", "other"):
        add_job(store, name, rows=2)
    lost, kept, other = leased(store, limit=1), leased(store, limit=1), leased(store)
    with store.write() as tx:
        leases.end(tx, [lost.epoch])
        finished = [
            journal.Finished(lease.epoch, lease.job_id, p, result(p))
            for lease in (other, lost, kept)
            for p in positions(lease)
        ]
        committed = journal.commit(tx, finished, now=9.0)
    assert committed.written == [f for f in finished if f.epoch != lost.epoch]
    assert committed.late == [f for f in finished if f.epoch == lost.epoch]
    assert committed.completed == ["other"]
    assert select(store, "select job_id, position from journal order by 1, 2") == [
        ("one", 1),
        ("other", 0),
        ("other", 1),
    ]
    assert select(store, "select position, epoch from request") == [(0, None)]
    assert select(store, "select count(*) from lease") == [(0,)]


def test_an_answer_that_does_not_fit_is_written_and_counted_as_an_error(store: Store) -> None:
    add_job(store, rows=3)
    lease = leased(store)
    finish(store, lease, of=[0])
    committed = finish(store, lease, of=[1], text=["no text"], prompt_tokens=7)
    (written,) = committed.written
    assert (written.position, written.result.failed, written.result.prompt_tokens) == (1, True, 0)
    assert select(store, "select position, failed from journal order by 1") == [(0, False), (1, True)]
    found = job(store)
    assert (found.succeeded, found.failed, found.prompt_tokens) == (1, 1, 0)


def test_a_lease_lives_as_long_as_it_has_rows(store: Store) -> None:
    add_job(store, rows=2)
    lease = leased(store)
    finish(store, lease, of=[0])
    assert select(store, "select epoch from lease") == [(lease.epoch,)]
    finish(store, lease, of=[1])
    assert select(store, "select count(*) from lease") == [(0,)]


def test_a_job_is_complete_with_its_last_result(store: Store) -> None:
    add_job(store, rows=3)
    lease = leased(store)
    assert finish(store, lease, of=[0], now=1.0).completed == []
    assert finish(store, lease, of=[1], failed=[1], now=2.0).completed == []
    assert (job(store).state, job(store).finished_at) == (JobState.QUEUED, None)
    assert finish(store, lease, of=[2], now=3.0).completed == ["job-1"]
    assert (job(store).state, job(store).finished_at) == (JobState.COMPLETED, 3.0)


@pytest.mark.parametrize(
    ("verb", "state"),
    [("pause", JobState.COMPLETED), ("cancel", JobState.CANCELLED), (None, JobState.COMPLETED)],
)
def test_rows_in_flight_may_end_a_job_that_was_told_to_stop(
    store: Store, verb: str | None, state: JobState
) -> None:
    """Cancelled it stays; paused, or refused since its input changed, it has nothing left that could wait."""
    add_job(store, rows=1)
    lease = leased(store)
    with store.write() as tx:
        if verb is None:
            catalog.refuse(tx, "job-1", "its input changed", FailedBy.INPUT, now=1.0)
        else:
            catalog.move(tx, "job-1", verb, now=1.0)
    committed = finish(store, lease, now=2.0)
    assert len(committed.written) == 1
    assert committed.completed == (["job-1"] if state is JobState.COMPLETED else [])
    found = job(store)
    assert (found.state, found.succeeded, found.error, found.failed_by) == (state, 1, None, None)


def test_a_result_of_a_row_that_its_lease_does_not_hold_is_late(store: Store) -> None:
    """A database that fell back to an earlier state gives the epoch again, to a lease of other rows."""
    add_job(store, rows=3)
    first, second = leased(store, limit=1), leased(store, limit=1)
    put_back(store, first, 0)
    again = leased(store, limit=1)
    committed = finish(store, again, of=[0, 1, 2])
    assert [f.position for f in committed.written] == [0]
    assert [f.position for f in committed.late] == [1, 2]
    assert select(store, "select position from journal") == [(0,)]
    assert (job(store).succeeded, live(store)) == (1, {1: second.epoch})


def test_a_result_under_the_lease_of_another_owner_is_late(store: Store) -> None:
    add_job(store, rows=1)
    lease = leased(store, owner="ann")
    finished = [Finished(lease.epoch, "job-1", 0, result(0))]
    with store.write() as tx:
        assert journal.commit(tx, finished, now=0.0, owner="ben").late == finished
    assert live(store) == {0: lease.epoch}
    with store.write() as tx:
        assert journal.commit(tx, finished, now=0.0, owner="ann").written == finished


def test_many_results_go_in_one_transaction(store: Store) -> None:
    add_job(store, rows=1200)
    lease = leased(store, limit=1200)
    assert len(finish(store, lease).written) == 1200
    assert job(store).succeeded == 1200


def test_nothing_finished_is_nothing_written(store: Store) -> None:
    with store.write() as tx:
        assert journal.commit(tx, [], now=0.0) == ([], [], [], ())
