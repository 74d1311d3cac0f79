"""Leases: each row is with one owner at most, comes back when it must, and late writers are told so."""

import pytest
from sqlalchemy import Connection, text

from conserve.store.books import catalog, leases, queue, saved_tokens, spans
from conserve.store.books.queue import UnclaimableRows
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.database.connection import chunks
from conserve.store.database.store import Store
from tests.store_rows import LEASE_S, add_job, claim, finish, job, leased, live, positions, put_back, select


def expire(store: Store, now: float) -> int:
    with store.write() as tx:
        return leases.end_silent(tx, [sign for sign in leases.signs(tx, but="") if sign.expires_at <= now])


def alive(tx: Connection, epochs: set[int]) -> set[int]:
    return set(spans.locked(tx, epochs))


def backlog(store: Store, only: list[str] | None = None) -> UnclaimableRows:
    with store.read() as tx:
        return queue.backlog(tx, only=only)


def test_claims_walk_through_a_job_and_no_row_is_given_out_twice(store: Store) -> None:
    add_job(store, rows=5)
    first, second = leased(store, limit=3), leased(store, limit=3)
    assert (positions(first), positions(second)) == ([0, 1, 2], [3, 4])
    assert first.epoch != second.epoch
    assert claim(store) is None


def test_the_highest_priority_goes_first_then_the_oldest_job(store: Store) -> None:
    for name, priority in (("old", 0), ("new", 0), ("urgent", 1)):
        add_job(store, name, rows=1, priority=priority)
    assert [leased(store).job_id for _ in range(3)] == ["urgent", "old", "new"]


def test_only_the_wanted_jobs_are_claimed(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=1)
    assert leased(store, only=["other"]).job_id == "other"
    assert claim(store, only=["other"]) is None


def test_rows_are_claimed_of_the_jobs_at_hand_where_there_are_some(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=1)
    with store.read() as tx:
        one, other = queue.runnable_jobs(tx, None, locked=False)
    assert claim(store, jobs=[]) is None
    assert leased(store, jobs=[other, one]).job_id == "other"


def test_a_lease_names_its_rows_its_end_and_the_attempt(store: Store) -> None:
    add_job(store, rows=1)
    lease = leased(store, now=100.0)
    (row,) = lease.rows
    assert (lease.job_id, lease.expires_at) == ("job-1", 100.0 + LEASE_S)
    assert (row.attempts, row.failures, row.started_at, row.suspect) == (1, 0, 100.0, False)
    assert (row.tokens, row.tokens_by) == (None, None)
    assert select(store, "select epoch, job_id, owner, claimed_at, expires_at from lease") == [
        (lease.epoch, "job-1", "ann", 100.0, 110.0)
    ]
    assert select(store, "select epoch, start, stop, held, claimed_at from span") == [
        (lease.epoch, 0, 1, 1, 100.0)
    ]
    assert select(store, "select count(*) from request") == [(0,)]


def test_a_job_starts_once(store: Store) -> None:
    add_job(store)
    leased(store, now=5.0, limit=1)
    leased(store, now=7.0, limit=1)
    assert job(store).started_at == 5.0


def test_an_expired_lease_is_claimed_once(store: Store) -> None:
    """At its last instant a lease is over; before, it is not."""
    add_job(store, rows=2)
    lost = leased(store, now=1.0)
    assert expire(store, 0.999 + LEASE_S) == 0
    assert expire(store, 1.0 + LEASE_S) == 1
    assert expire(store, 1.0 + LEASE_S) == 0
    again = leased(store, now=20.0, owner="ben")
    assert positions(again) == [0, 1]
    assert [(row.attempts, row.started_at) for row in again.rows] == [(2, 1.0)] * 2
    assert select(store, "select attempts, started_at from request") == [(2, 1.0)] * 2
    assert claim(store, now=20.0) is None
    assert finish(store, lost).written == []
    assert len(finish(store, again).written) == 2


def test_rows_that_came_back_go_before_rows_never_leased(store: Store) -> None:
    add_job(store, rows=6)
    lost = leased(store, limit=2)
    kept = leased(store, limit=1)
    put_back(store, lost, 1)
    assert positions(leased(store, limit=3)) == [1, 3, 4]
    assert positions(kept) == [2]


def test_a_row_in_backoff_waits_for_its_time(store: Store) -> None:
    add_job(store, rows=1)
    put_back(store, leased(store), 0, available_at=30.0, failed=True)
    assert claim(store, now=29.9) is None
    assert backlog(store) == UnclaimableRows(0, 1, 30.0)
    (row,) = leased(store, now=30.0).rows
    assert (row.attempts, row.failures) == (2, 1)
    assert job(store).retries == 1


def test_a_row_put_back_because_we_stop_costs_it_nothing(store: Store) -> None:
    add_job(store, rows=1)
    put_back(store, leased(store), 0)
    (row,) = leased(store).rows
    assert (row.attempts, row.failures, row.suspect) == (2, 0, False)
    assert job(store).retries == 0


def test_suspects_run_alone_and_only_where_they_are_asked_for(store: Store) -> None:
    add_job(store, rows=4)
    lease = leased(store, limit=3)
    for position in (0, 1):
        put_back(store, lease, position, suspect=True)
    assert positions(leased(store)) == [3]
    assert claim(store) is None
    alone = leased(store, suspect=True, limit=8)
    assert positions(alone) == [0]
    assert alone.rows[0].suspect
    assert positions(leased(store, suspect=True)) == [1]
    assert claim(store, suspect=True) is None


def test_a_row_that_is_no_longer_a_suspect_runs_with_others_again(store: Store) -> None:
    add_job(store, rows=2)
    put_back(store, leased(store, limit=1), 0, suspect=True)
    put_back(store, leased(store, suspect=True), 0)
    assert positions(leased(store)) == [0, 1]


def test_a_late_put_back_changes_nothing(store: Store) -> None:
    add_job(store, rows=2)
    lost = leased(store)
    expire(store, LEASE_S)
    leased(store, owner="ben")
    before = live(store)
    put_back(store, lost, 0, available_at=99.0, suspect=True)
    assert live(store) == before == {0: 2, 1: 2}


def test_renewed_leases_live_on_and_those_that_are_gone_are_told(store: Store) -> None:
    add_job(store, rows=3)
    renewed, left, gone = (leased(store, limit=1) for _ in range(3))
    with store.write() as tx:
        assert leases.end(tx, [gone.epoch]) == 1
        assert leases.renew(tx, {renewed.epoch, gone.epoch}, now=8.0, lease_s=LEASE_S) == {renewed.epoch}
    assert expire(store, LEASE_S) == 1
    with store.write() as tx:
        assert alive(tx, {renewed.epoch, left.epoch, gone.epoch}) == {renewed.epoch}
    assert expire(store, 18.0) == 1


def test_a_lease_that_was_renewed_since_its_sign_was_read_lives_on(store: Store) -> None:
    add_job(store, rows=2)
    renewed, silent = leased(store, limit=1), leased(store, limit=1)
    with store.read() as tx:
        signs = leases.signs(tx, but="nobody")
        assert leases.signs(tx, but="ann") == []
    with store.write() as tx:
        leases.renew(tx, {renewed.epoch}, now=5.0, lease_s=LEASE_S)
        assert leases.end_silent(tx, signs) == 1
        assert alive(tx, {renewed.epoch, silent.epoch}) == {renewed.epoch}


def test_abandoned_owners_lose_their_rows_and_others_keep_theirs(store: Store) -> None:
    add_job(store, rows=4)
    leased(store, owner="dead", limit=1)
    leased(store, owner="dead", limit=1)
    alive = leased(store, owner="alive", limit=1)
    with store.write() as tx:
        assert leases.owners(tx) == {"dead", "alive"}
        assert leases.abandon(tx, ["dead", "unknown"]) == 2
        assert leases.owners(tx) == {"alive"}
    assert positions(leased(store)) == [0, 1, 3]
    assert finish(store, alive).late == []


def test_leases_end_with_their_last_row(store: Store) -> None:
    add_job(store, rows=2)
    held, empty = leased(store, limit=1), leased(store, limit=1)
    put_back(store, empty, 1)
    with store.write() as tx:
        leases.end_if_empty(tx, [held.epoch, empty.epoch])
        assert alive(tx, {held.epoch, empty.epoch}) == {held.epoch}


def test_hundreds_of_leases_end_together(store: Store) -> None:
    """More than one list of parameters takes."""
    add_job(store, rows=1101)
    epochs = [leased(store, limit=1).epoch for _ in range(2)]
    first = leased(store, limit=1099)
    with store.write() as tx:
        assert leases.end(tx, [*range(-600, 0), *epochs, first.epoch]) == 603
    assert positions(leased(store, limit=2000)) == list(range(1101))
    assert select(store, "select count(*) from lease") == [(1,)]


@pytest.mark.parametrize("count", [0, 1, 500, 501, 1000, 1001])
def test_chunks_hold_every_value_once(count: int) -> None:
    found = list(chunks(range(count)))
    assert [value for chunk in found for value in chunk] == list(range(count))
    assert all(0 < len(chunk) <= 500 for chunk in found)


def test_tokens_are_kept_for_the_next_attempt_and_late_ones_are_not(store: Store) -> None:
    add_job(store, rows=3)
    lease = leased(store, limit=2)
    other = leased(store, limit=1)
    packed = saved_tokens.pack_tokens([7, 8])

    def save(epoch: int, position: int, job_id: str = "job-1") -> None:
        with store.write() as tx:
            saved_tokens.save_tokens(tx, [SavedTokens(epoch, job_id, position, packed, "model")])

    save(lease.epoch, 1)
    save(lease.epoch, 2)  # which is under the other lease
    save(lease.epoch, 0, "another job")
    assert select(store, "select position, tokens, tokens_by from request") == [(1, packed, "model")]
    put_back(store, lease, 1)
    (again,) = leased(store).rows
    assert (again.tokens, again.tokens_by) == (packed, "model")
    assert positions(other) == [2]


@pytest.mark.parametrize(
    "change", [{"tokens": saved_tokens.pack_tokens([7, 9])}, {"tokens_by": "modem"}, {"tokens": None}]
)
def test_saved_tokens_that_are_not_what_was_written_are_computed_again(
    store: Store, change: dict[str, object]
) -> None:
    add_job(store, rows=1)
    lease = leased(store)
    with store.write() as tx:
        saved_tokens.save_tokens(
            tx, [SavedTokens(lease.epoch, "job-1", 0, saved_tokens.pack_tokens([7, 8]), "model")]
        )
        (name,) = change
        tx.execute(text(f"update request set {name} = :{name}"), change)
    put_back(store, lease, 0)
    (again,) = leased(store).rows
    assert (again.tokens, again.tokens_by) == (None, None)


def test_tokens_that_an_earlier_version_saved_are_taken_as_they_are(store: Store) -> None:
    add_job(store, rows=1)
    lease = leased(store)
    with store.write() as tx:
        saved_tokens.save_tokens(
            tx, [SavedTokens(lease.epoch, "job-1", 0, saved_tokens.pack_tokens([7]), "model")]
        )
        tx.exec_driver_sql("update request set checksum = null")
    put_back(store, lease, 0)
    assert leased(store).rows[0].tokens == saved_tokens.pack_tokens([7])


def test_tokens_are_four_bytes_little_endian() -> None:
    assert saved_tokens.pack_tokens([1, 256, 2**31 - 1]) == bytes.fromhex("01000000 00010000 ffffff7f")
    assert saved_tokens.unpack_tokens(saved_tokens.pack_tokens([1, 256, 2**31 - 1])) == [1, 256, 2**31 - 1]


def test_tokens_are_little_endian_on_a_big_endian_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a machine the bytes of an array are swapped on their way out and back."""
    monkeypatch.setattr("sys.byteorder", "big")
    assert saved_tokens.pack_tokens([1]) == bytes.fromhex("00000001")
    assert saved_tokens.unpack_tokens(bytes.fromhex("00000001")) == [1]


def test_the_backlog_is_what_is_leased_and_what_waits_of_queued_jobs(store: Store) -> None:
    assert backlog(store) == UnclaimableRows(0, 0, None)
    for name in ("one", "other", "paused"):
        add_job(store, name, rows=4)
        lease = leased(store, limit=4, only=[name])
        put_back(store, lease, 0, available_at=50.0 if name == "one" else 40.0)
    with store.write() as tx:
        catalog.move(tx, "paused", "pause", now=0.0)
    assert backlog(store) == UnclaimableRows(6, 2, 40.0)
    assert backlog(store, only=["one"]) == UnclaimableRows(3, 1, 50.0)
    assert backlog(store, only=["paused"]) == UnclaimableRows(0, 0, None)
