"""Rows that are lost with their harvesters: few become suspects, those given back in order never do."""

from collections.abc import Callable

import pytest
from sqlalchemy import Connection

from conserve.store.books import leases, queue
from conserve.store.books.losses import CANDIDATE, FEW
from conserve.store.books.queue import Returned
from conserve.store.database.store import Store
from tests.store_rows import add_job, claim, finish, job, leased, positions, put_back, select

End = Callable[[Connection], int]


def died(tx: Connection) -> int:
    return leases.abandon(tx, ["ann"])


def fell_silent(tx: Connection) -> int:
    return leases.end_silent(tx, leases.signs(tx), mine="ben")


def gave_back(tx: Connection) -> int:
    return leases.abandon(tx, ["ben"], mine="ann")


def never_learned_of_it(tx: Connection) -> int:
    """The answer to its claim was lost."""
    return leases.end_silent(tx, leases.signs(tx), mine="ann")


def was_told_to_stop(tx: Connection) -> int:
    return leases.end(tx, [sign.epoch for sign in leases.signs(tx)])


def lose(store: Store, times: int = 1, *, end: End = died, limit: int = 1000) -> None:
    """Lease rows, and end the lease, several times."""
    for _ in range(times):
        leased(store, limit=limit)
        with store.write() as tx:
            assert end(tx)


def suspects(store: Store) -> list[int]:
    return [row for (row,) in select(store, "select position from request where suspect order by 1")]


def test_ended_leases_are_counted_whoever_had_them(store: Store) -> None:
    add_job(store, rows=6)
    for owner in ("ann", "ben", "ben", "dan"):
        assert claim(store, owner=owner, limit=1) is not None
    with store.write() as tx:
        assert leases.abandon(tx, ["ann"], mine="ben") == 3
        assert leases.owners(tx) == {"dan"}


@pytest.mark.parametrize("end", [died, fell_silent])
def test_rows_that_are_lost_with_their_owner_for_the_third_time_are_suspects(store: Store, end: End) -> None:
    add_job(store, rows=3)
    lose(store, CANDIDATE - 1, end=end)
    assert suspects(store) == []
    assert positions(leased(store, limit=2)) == [0, 1]
    with store.write() as tx:
        end(tx)
    assert suspects(store) == [0, 1]
    assert positions(leased(store)) == [2], "suspects run after the others, and alone"
    assert positions(leased(store, suspect=True)) == [0]


@pytest.mark.parametrize("end", [gave_back, never_learned_of_it, was_told_to_stop])
def test_rows_that_go_back_otherwise_are_never_suspects(store: Store, end: End) -> None:
    """Such ends count nothing: a death after them is the first loss."""
    add_job(store, rows=2)
    lose(store, 2 * CANDIDATE, end=end)
    lose(store)
    assert suspects(store) == []
    assert select(store, "select attempts, losses, failures from request") == [(2 * CANDIDATE + 1, 1, 0)] * 2


def test_rows_that_waited_for_a_busy_endpoint_are_not_lost(store: Store) -> None:
    add_job(store, rows=1)
    for _ in range(2 * CANDIDATE):
        put_back(store, leased(store), 0)
    lose(store)
    assert suspects(store) == []


def test_of_many_rows_few_become_suspects_and_twice_as_many_with_each_loss(store: Store) -> None:
    """Those of the lowest positions, which were sent first."""
    add_job(store, rows=1000)
    for times, found in ((CANDIDATE, FEW), (1, 3 * FEW), (1, 7 * FEW), (1, 15 * FEW)):
        lose(store, times)
        assert suspects(store) == list(range(found))
    lose(store, 2)
    assert suspects(store) == list(range(63 * FEW))[:1000]
    assert claim(store) is None


def test_rows_that_were_lost_most_often_are_suspects_first(store: Store) -> None:
    add_job(store, "z-often", rows=2 * FEW, priority=1)
    lose(store, CANDIDATE, limit=2 * FEW)
    add_job(store, "a-rarely", rows=2 * FEW, priority=2)
    lose(store, CANDIDATE - 1, limit=2 * FEW)
    for job_id in ("a-rarely", "z-often"):
        leased(store, limit=2 * FEW, only=[job_id])
    with store.write() as tx:
        assert died(tx) == 2
    found = "select job_id, losses, count(*) from request where suspect group by 1, 2 order by 1, 2"
    assert select(store, found) == [
        ("a-rarely", CANDIDATE, FEW),
        ("z-often", CANDIDATE, FEW),
        ("z-often", CANDIDATE + 1, FEW),
    ]


def test_the_loss_of_a_suspect_is_a_death_with_it_alone(store: Store) -> None:
    add_job(store, rows=2)
    put_back(store, leased(store, limit=1), 0, failed=True)
    lose(store, CANDIDATE, limit=1)
    assert select(store, "select suspect, failures, deaths from request") == [(True, 1, 0)]
    for deaths in (1, 2):
        leased(store, suspect=True)
        with store.write() as tx:
            died(tx)
        (row,) = leased(store, suspect=True).rows
        assert (row.suspect, row.deaths, row.failures - row.deaths) == (True, deaths, 1)
        with store.write() as tx:
            gave_back(tx)
    assert job(store).retries == 1


def test_a_suspect_that_is_answered_is_done_like_any_row(store: Store) -> None:
    add_job(store, rows=1)
    lose(store, CANDIDATE)
    assert claim(store) is None
    finish(store, leased(store, suspect=True))
    assert (job(store).succeeded, job(store).failed) == (1, 0)


def lose_with_a_server(store: Store, times: int = 1, *, limit: int = 1000) -> None:
    """Lease rows, and put them back as a server that they were lost with leaves them."""
    for _ in range(times):
        lease = leased(store, limit=limit)
        rows = [
            Returned(epoch=lease.epoch, job_id=lease.job_id, position=row.position, lost=True)
            for row in lease.rows
        ]
        with store.write() as tx:
            queue.put_rows_back(tx, rows)
            leases.end_if_empty(tx, {lease.epoch})


def test_rows_that_are_lost_with_a_server_for_the_third_time_are_suspects(store: Store) -> None:
    add_job(store, rows=1000)
    lose_with_a_server(store, CANDIDATE - 1)
    assert suspects(store) == []
    lose_with_a_server(store)
    assert suspects(store) == list(range(FEW))
    lose_with_a_server(store)
    assert suspects(store) == list(range(3 * FEW))
    assert select(store, "select distinct losses, failures, deaths from request where not suspect") == [
        (CANDIDATE + 1, 0, 0)
    ]


def test_losses_with_servers_and_with_harvesters_add_up(store: Store) -> None:
    add_job(store, rows=1)
    lose(store)
    lose_with_a_server(store)
    assert suspects(store) == []
    lose(store)
    assert suspects(store) == [0]


def test_rows_that_are_lost_with_a_server_count_those_of_all_their_jobs(store: Store) -> None:
    for job_id, rows in (("one", 2 * FEW), ("two", 2 * FEW)):
        add_job(store, job_id, rows=rows)
    for _ in range(CANDIDATE):
        both = [leased(store, limit=2 * FEW, only=[job_id]) for job_id in ("one", "two")]
        rows = [
            Returned(epoch=lease.epoch, job_id=lease.job_id, position=row.position, lost=True)
            for lease in both
            for row in lease.rows
        ]
        with store.write() as tx:
            queue.put_rows_back(tx, rows)
    assert select(store, "select job_id, count(*) from request where suspect group by 1") == [("one", FEW)]


def test_a_row_that_is_under_another_lease_by_now_is_not_lost(store: Store) -> None:
    add_job(store, rows=1)
    lose_with_a_server(store, CANDIDATE - 1)
    before = leased(store)
    with store.write() as tx:
        gave_back(tx)
    now = leased(store)
    row = Returned(epoch=before.epoch, job_id=before.job_id, position=0, lost=True)
    with store.write() as tx:
        queue.put_rows_back(tx, [row])
    assert select(store, "select losses, suspect, epoch from request") == [(CANDIDATE - 1, False, now.epoch)]
