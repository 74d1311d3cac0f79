"""Leases: each row is with one owner at most, comes back when it must, and late writers are told so."""

import pytest
from sqlalchemy import Connection, text

from conserve.store.books import catalog, leases, queue, saved_tokens, spans, suspects
from conserve.store.books.queue import Returned, UnclaimableRows
from conserve.store.books.queue_statements import looks
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.books.states import FailedBy
from conserve.store.database.connection import chunks
from conserve.store.database.store import Store
from tests.store_rows import LEASE_S, add_job, claim, finish, job, leased, live, positions, put_back, select


def expire(store: Store, now: float) -> int:
    with store.write() as tx:
        return leases.end_silent(tx, [sign for sign in leases.signs(tx) if sign.expires_at <= now])


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


def test_statements_of_a_claim_are_made_once_whatever_their_values() -> None:
    assert looks(["one"], "small")[0] is looks(["other", "third"], "large")[0]
    assert len({id(looks(only, model)[0]) for only in (None, []) for model in (None, "")}) == 4
    wanted = queue.returned()
    assert queue.returned() is wanted
    assert queue.returned(True) is not wanted
    assert queue.jobs_with(wanted) is queue.jobs_with(queue.returned())


def test_one_job_is_looked_up_if_it_may_run(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name)
    with store.write() as tx:
        one, other = queue.runnable_jobs(tx, None)
        assert queue.runnable_jobs(tx, None, seq=other.seq, locked=False) == [other]
        assert queue.runnable_jobs(tx, [one.id], seq=other.seq, locked=False) == []
        catalog.refuse(tx, other.id, "as it is", FailedBy.INPUT, now=0.0)
        assert queue.runnable_jobs(tx, None, seq=other.seq, locked=False) == []


def test_the_highest_priority_goes_first_then_the_oldest_job(store: Store) -> None:
    for name, priority in (("old", 0), ("new", 0), ("urgent", 1)):
        add_job(store, name, rows=1, priority=priority)
    assert [leased(store).job_id for _ in range(3)] == ["urgent", "old", "new"]


@pytest.mark.parametrize("locked", [False, True])
def test_runnable_jobs_are_ordered_whether_they_are_locked_or_not(store: Store, locked: bool) -> None:
    for name, priority in (("b", 0), ("c", 1), ("a", 0), ("d", 2)):
        add_job(store, name, priority=priority)
    with store.write() as tx:
        found = queue.runnable_jobs(tx, None, locked=locked)
        assert [candidate.id for candidate in found] == ["d", "c", "b", "a"]


def test_a_claim_that_names_no_model_takes_rows_of_any_models_job(store: Store) -> None:
    add_job(store, rows=4)
    put_back(store, leased(store, limit=2, model="ours"), 1)
    assert positions(leased(store)) == [1, 2, 3]
    assert job(store).model == "ours"


def test_only_the_wanted_jobs_are_claimed(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=1)
    assert leased(store, only=["other"]).job_id == "other"
    assert claim(store, only=["other"]) is None


def test_rows_left_are_those_of_queued_jobs_without_a_result(store: Store) -> None:
    for name, rows in (("one", 5), ("other", 3), ("paused", 9)):
        add_job(store, name, rows=rows)
    finish(store, leased(store, limit=3), of=[0, 1], failed=[1])
    with store.write() as tx:
        catalog.move(tx, "paused", "pause", now=0.0)
        asked = (None, ["other", "paused"], ["paused"], [])
        assert [queue.rows_left(tx, only) for only in asked] == [6, 3, 0, 0]
        catalog.rebind(tx, ["one"], "model-a")
        assert [queue.rows_left(tx, None, model) for model in ("model-a", "model-b")] == [6, 3]


def test_rows_are_claimed_of_the_jobs_at_hand_where_there_are_some(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=1)
    with store.read() as tx:
        one, other = queue.runnable_jobs(tx, None, locked=False)
    assert claim(store, jobs=[]) is None
    assert leased(store, jobs=[other, one]).job_id == "other"


def test_rows_are_taken_from_where_the_cursor_is_now(store: Store) -> None:
    """Other harvesters have moved it since the job was read."""
    add_job(store, rows=10)
    with store.read() as tx:
        jobs = queue.runnable_jobs(tx, None, locked=False)
    leased(store, limit=3)
    assert positions(leased(store, jobs=jobs, limit=4)) == [3, 4, 5, 6]
    assert positions(leased(store, jobs=jobs, limit=4)) == [7, 8, 9]
    with pytest.raises(queue.JobEmptied):
        claim(store, jobs=jobs, limit=4)
    assert select(store, "select next_position from job") == [(10,)]
    assert select(store, "select start, stop from span order by epoch") == [(0, 3), (3, 7), (7, 10)]


@pytest.mark.parametrize("change", ["model = 'other'", "state = 'paused'"])
@pytest.mark.parametrize("limit", [2, 8])
@pytest.mark.parametrize("came_back", [False, True])
def test_a_job_that_changed_since_it_was_read_gives_no_row(
    store: Store, change: str, limit: int, came_back: bool
) -> None:
    add_job(store, rows=4)
    if came_back:
        put_back(store, leased(store, limit=4), 1)
    with store.read() as tx:
        jobs = queue.runnable_jobs(tx, None, "ours", locked=False)
    with store.write() as tx:
        tx.execute(text(f"update job set {change}"))
    with pytest.raises(queue.JobEmptied):
        claim(store, jobs=jobs, limit=limit, model="ours")
    assert job(store).next_position == (4 if came_back else 0)


def test_rows_that_came_back_bind_a_job_of_no_model_and_no_other(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=2)
    put_back(store, leased(store, now=3.0), 1)
    assert leased(store, now=9.0, model="ours").job_id == "one"
    assert [(job(store, name).model, job(store, name).started_at) for name in ("one", "other")] == [
        ("ours", 3.0),
        (None, None),
    ]


@pytest.mark.parametrize("limit", [1, 8])
def test_the_first_lease_binds_a_job_and_the_next_leaves_it_bound(store: Store, limit: int) -> None:
    add_job(store, rows=3)
    leased(store, limit=limit, model="ours")
    assert job(store).model == "ours"
    with store.write() as tx:
        leases.begin_job(tx, "job-1", 7.0, "theirs")
    assert (job(store).model, job(store).started_at) == ("ours", 0.0)


@pytest.mark.parametrize("limit", [1, 8])
def test_a_lease_names_its_rows_its_end_and_the_attempt(store: Store, limit: int) -> None:
    add_job(store, rows=1)
    lease = leased(store, now=100.0, limit=limit)
    (row,) = lease.rows
    assert (lease.job_id, lease.expires_at) == ("job-1", 100.0 + LEASE_S)
    assert (row.attempts, row.failures, row.deaths, row.started_at) == (1, 0, 0, 100.0)
    assert not row.suspect
    assert (row.tokens, row.tokens_by) == (None, None)
    assert select(store, "select epoch, job_id, owner, claimed_at, expires_at, lease_s from lease") == [
        (lease.epoch, "job-1", "ann", 100.0, 110.0, 10.0)
    ]
    assert select(store, "select epoch, job_id, start, stop, held, gone, claimed_at from span") == [
        (lease.epoch, "job-1", 0, 1, 1, b"\0", 100.0)
    ]
    assert select(store, "select count(*) from request") == [(0,)]


def test_a_job_starts_once(store: Store) -> None:
    add_job(store)
    leased(store, now=5.0, limit=1)
    leased(store, now=7.0, limit=1)
    assert job(store).started_at == 5.0


def test_an_expired_lease_is_claimed_once(store: Store) -> None:
    """A lease is over at its last instant, and not before."""
    add_job(store, rows=2)
    lost = leased(store, now=1.0)
    assert expire(store, 0.999 + LEASE_S) == 0
    assert expire(store, 1.0 + LEASE_S) == 1
    assert expire(store, 1.0 + LEASE_S) == 0
    again = leased(store, now=20.0, owner="ben")
    assert positions(again) == [0, 1]
    assert [(row.attempts, row.started_at, row.deaths) for row in again.rows] == [(2, 1.0, 0)] * 2
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


def test_a_row_that_is_returned_without_more_is_as_before(store: Store) -> None:
    add_job(store, rows=1)
    lease = leased(store)
    with store.write() as tx:
        queue.put_rows_back(tx, [Returned(epoch=lease.epoch, job_id="job-1", position=0)])
    (row,) = leased(store, now=0.0).rows
    assert (row.failures, row.deaths, row.suspect) == (0, 0, False)
    assert job(store).retries == 0


@pytest.mark.parametrize(("available_at", "waits"), [(300.0, True), (300.5, False)])
def test_a_backoff_longer_than_any_is_over(store: Store, available_at: float, waits: bool) -> None:
    """The clock was set back since; the longest backoff is five minutes."""
    add_job(store, rows=1)
    put_back(store, leased(store), 0, available_at=available_at)
    assert (claim(store, now=0.0) is None) is waits


def test_rows_of_several_jobs_go_back_together_and_each_job_counts_its_own(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=3)
    one, other = leased(store, only=["one"]), leased(store, only=["other"])
    with store.write() as tx:
        queue.put_rows_back(
            tx,
            [
                Returned(epoch=lease.epoch, job_id=lease.job_id, position=p, available_at=at, failed=failed)
                for lease, p, at, failed in (
                    (one, 0, 4.0, True),
                    (other, 2, 5.0, True),
                    (one, 2, 6.0, True),
                    (other, 1, 7.0, False),
                )
            ],
        )
    columns = "job_id, position, available_at, failures"
    assert select(store, f"select {columns} from request order by available_at") == [
        ("one", 0, 4.0, 1),
        ("other", 2, 5.0, 1),
        ("one", 2, 6.0, 1),
        ("other", 1, 7.0, 0),
    ]
    assert (job(store, "one").retries, job(store, "other").retries) == (2, 1)


@pytest.mark.parametrize("with_record", [False, True])
def test_retries_are_counted_of_rows_that_are_under_their_leases_still(
    store: Store, with_record: bool
) -> None:
    """A lease may have ended meanwhile, or a row may have left one that goes on."""
    add_job(store, rows=6)
    if with_record:
        first = leased(store, limit=6)
        for position in range(6):
            put_back(store, first, position)
    ended, alive = leased(store, limit=3), leased(store, limit=3)
    finish(store, alive, of=[3])
    with store.write() as tx:
        leases.end(tx, [ended.epoch])
    back = [(ended, 0), (ended, 1), (alive, 3), (alive, 4), (alive, 0)]
    with store.write() as tx:
        rows = [Returned(epoch=lease.epoch, job_id="job-1", position=p, failed=True) for lease, p in back]
        queue.put_rows_back(tx, rows)
    assert select(store, "select position from request where failures > 0") == [(4,)]
    assert job(store).retries == 1


@pytest.mark.parametrize("with_record", [False, True])
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("suspect", [False, True])
def test_a_death_is_an_error_of_a_suspect(
    store: Store, with_record: bool, failed: bool, suspect: bool
) -> None:
    add_job(store, rows=1)
    lease = leased(store)
    if with_record:
        put_back(store, lease, 0)
        lease = leased(store)
    put_back(store, lease, 0, available_at=4.0, failed=failed, suspect=suspect)
    assert claim(store, now=3.9, suspect=suspect) is None
    (row,) = leased(store, now=4.0, suspect=suspect).rows
    assert (row.failures, row.deaths, row.suspect) == (int(failed), int(failed and suspect), suspect)


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


def test_suspects_go_ahead_where_their_job_goes_before_those_with_other_rows(store: Store) -> None:
    def ahead(now: float = 5.0) -> bool | None:
        with store.read() as tx:
            return suspects.go_ahead(tx, now=now)

    add_job(store, rows=1, priority=1)
    assert ahead() is None, "there is none"
    put_back(store, leased(store, limit=1), 0, suspect=True, available_at=4.0)
    assert ahead(now=3.0) is None, "its backoff is not over"
    assert ahead()
    add_job(store, "job-2", rows=3)
    assert ahead(), "priority 1 goes before 0"
    add_job(store, "job-3", rows=3, priority=2)
    assert ahead() is False


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
        signs = leases.signs(tx)
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


def test_rows_come_back_with_their_tokens_when_their_lease_ends(store: Store) -> None:
    add_job(store, rows=4)
    ended, other = leased(store, limit=3), leased(store, limit=1)
    packed = saved_tokens.pack_tokens([7])
    with store.write() as tx:
        for lease, position in ((ended, 1), (other, 3)):
            saved_tokens.save_tokens(tx, [SavedTokens(lease.epoch, "job-1", position, packed, "model")])
    with store.write() as tx:
        leases.end(tx, [ended.epoch])
    assert live(store) == {0: None, 1: None, 2: None, 3: other.epoch}
    again = leased(store, owner="ben")
    assert [(row.position, row.attempts, row.tokens) for row in again.rows] == [
        (0, 2, None),
        (1, 2, packed),
        (2, 2, None),
    ]
    assert len(finish(store, again).written) == 3


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
    """Bytes of an array are swapped on such a machine, on their way out and back."""
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


def test_the_backlog_of_a_model_is_that_of_jobs_which_it_may_answer(store: Store) -> None:
    for name, model in (("one", "ours"), ("other", "theirs"), ("third", None)):
        add_job(store, name, rows=3)
        put_back(store, leased(store, only=[name], model=model), 0)
    with store.read() as tx:
        assert queue.backlog(tx, model="ours") == UnclaimableRows(4, 2, 0.0)
        assert queue.backlog(tx, model="missing") == UnclaimableRows(2, 1, 0.0)


def test_rows_under_leases_are_not_waited_for(store: Store) -> None:
    """One that came back and was leased again has its old time still."""
    add_job(store, rows=2)
    lease = leased(store)
    put_back(store, lease, 0, available_at=5.0)
    put_back(store, lease, 1, available_at=40.0)
    leased(store, now=6.0)
    assert backlog(store) == UnclaimableRows(1, 1, 40.0)


def test_jobs_at_work_are_those_with_a_lease_that_is_not_over(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=2)
    epochs = [leased(store, only=["one"], limit=1).epoch for _ in range(2)]
    leased(store, only=["other"], now=5.0)
    with store.read() as tx:
        assert leases.jobs(tx, now=LEASE_S - 0.1) == {"one", "other"}
        assert leases.jobs(tx, now=LEASE_S) == {"other"}
        assert sorted(leases.of_job(tx, "one")) == epochs
