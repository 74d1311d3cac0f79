"""Leases of rows that a window has chosen: each row is in one place still, whichever window chose it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, text

from conserve.store.books import catalog, choice, queue
from conserve.store.books.leases import Lease, Terms
from conserve.store.database import bulk, schema
from conserve.store.database.store import Store
from conserve.store.database.versions import LATEST
from tests.store_rows import LEASE_S, add_job, claim, finish, job, leased, live, positions, put_back, select

TERMS = Terms("ann", 5.0, LEASE_S)


def choose(store: Store, *chosen: tuple[str, int], terms: Terms = TERMS) -> list[Lease]:
    with store.write() as tx:
        return choice.choose(tx, chosen, terms)


def reclaim(store: Store, priority: int = 0, limit: int = 8, now: float = 5.0) -> Lease | None:
    with store.write() as tx:
        return choice.reclaim(
            tx, queue.runnable_jobs(tx, None), priority, Terms("ann", now, LEASE_S), limit=limit
        )


def contenders(store: Store) -> list[str]:
    with store.read() as tx:
        return [found.id for found in choice.contenders(tx, queue.runnable_jobs(tx, None, locked=False))]


def never_leased(store: Store, job_id: str = "job-1", **named: Any) -> list[int]:
    with store.read() as tx:
        return choice.never_leased(tx, job_id, **{"start": 0, "limit": 100} | named)


def passed_over(store: Store, job_id: str = "job-1", **named: Any) -> list[int]:
    with store.read() as tx:
        return list(choice.passed_over(tx, job_id, **named))


def test_chosen_rows_are_leased_and_those_in_front_wait(store: Store) -> None:
    add_job(store, rows=8)
    (lease,) = choose(store, ("job-1", 5), ("job-1", 2))
    assert [(row.position, row.attempts, row.failures, row.started_at) for row in lease.rows] == [
        (5, 1, 0, 5.0),
        (2, 1, 0, 5.0),
    ]
    assert (lease.job_id, lease.expires_at) == ("job-1", 5.0 + LEASE_S)
    assert select(store, "select epoch, owner, claimed_at, expires_at from lease") == [
        (lease.epoch, "ann", 5.0, 15.0)
    ]
    assert select(store, "select position, epoch, attempts, started_at from request order by 1") == [
        (position, None, 0, None) for position in (0, 1, 3, 4)
    ]
    assert live(store) == {0: None, 1: None, 2: lease.epoch, 3: None, 4: None, 5: lease.epoch}
    assert job(store).next_position == 6
    assert passed_over(store) == [0, 1, 3, 4]
    assert never_leased(store) == [0, 1, 3, 4, 6, 7]
    assert never_leased(store, "removed") == []


def test_rows_that_were_passed_over_can_be_chosen_later(store: Store) -> None:
    add_job(store, rows=4)
    choose(store, ("job-1", 2))
    (lease,) = choose(store, ("job-1", 3), ("job-1", 1), terms=TERMS._replace(now=7.0))
    assert positions(lease) == [3, 1]
    assert select(
        store, f"select position, attempts, started_at from request where epoch = {lease.epoch} order by 1"
    ) == [(1, 1, 7.0)]
    assert select(store, f"select start, held, claimed_at from span where epoch = {lease.epoch}") == [
        (3, 1, 7.0)
    ]
    assert passed_over(store) == [0]
    (lease,) = choose(store, ("job-1", 0))
    assert positions(lease) == [0]
    assert never_leased(store) == []


def test_rows_that_were_passed_over_are_claimed_before_those_behind_the_cursor(store: Store) -> None:
    add_job(store, rows=6)
    choose(store, ("job-1", 1), ("job-1", 3))
    lease = leased(store, now=7.0, limit=3)
    assert [(row.position, row.attempts, row.started_at) for row in lease.rows] == [
        (0, 1, 7.0),
        (2, 1, 7.0),
        (4, 1, 7.0),
    ]
    assert select(
        store, f"select position, attempts, started_at from request where epoch = {lease.epoch} order by 1"
    ) == [(0, 1, 7.0), (2, 1, 7.0)]
    assert len(finish(store, lease).written) == 3


@pytest.mark.parametrize("passed_over", [False, True])
def test_chosen_rows_bind_their_job_to_a_model(store: Store, passed_over: bool) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=4)
        choose(store, (name, 1))
    choose(store, ("one", 0 if passed_over else 2), terms=TERMS._replace(now=9.0, model="ours"))
    assert [(job(store, name).model, job(store, name).started_at) for name in ("one", "other")] == [
        ("ours", 5.0),
        (None, 5.0),
    ]
    theirs = TERMS._replace(model="theirs")
    assert choose(store, ("one", 3), terms=theirs) == []
    with store.write() as tx:
        assert choice.reclaim(tx, queue.runnable_jobs(tx, None), 0, theirs, limit=8) is None


def test_what_came_back_binds_its_job_to_a_model_that_may_answer_it(store: Store) -> None:
    for name, model in (("one", "ours"), ("other", None)):
        add_job(store, name, rows=1)
        put_back(store, leased(store, only=[name], model=model), 0)
    theirs = TERMS._replace(model="theirs")
    with pytest.raises(queue.JobEmptied), store.write() as tx:
        choice.reclaim(tx, queue.runnable_jobs(tx, None), 0, theirs, limit=8)
    with store.write() as tx:
        lease = choice.reclaim(tx, queue.runnable_jobs(tx, None, "theirs"), 0, theirs, limit=8)
    assert lease is not None
    assert lease.job_id == "other"
    assert (job(store, "one").model, job(store, "other").model) == ("ours", "theirs")


def test_rows_that_others_have_are_left_out(store: Store) -> None:
    add_job(store, rows=3)
    theirs = leased(store, limit=2)
    (lease,) = choose(store, ("job-1", 0), ("job-1", 2), ("job-1", 1))
    assert positions(lease) == [2]
    assert choose(store, ("job-1", 0), ("job-1", 2)) == []
    assert finish(store, theirs).late == []
    assert select(store, "select count(*) from lease") == [(1,)]


def test_each_job_gets_a_lease_of_its_own_and_one_that_stopped_none(store: Store) -> None:
    for name in ("one", "other", "paused"):
        add_job(store, name, rows=2)
    with store.write() as tx:
        catalog.move(tx, "paused", "pause", now=0.0)
    leases = choose(store, ("other", 0), ("paused", 0), ("one", 1), ("other", 1))
    assert {lease.job_id: positions(lease) for lease in leases} == {"one": [1], "other": [0, 1]}


def test_a_job_that_is_not_chosen_from_is_left_alone(store: Store) -> None:
    for name in ("one", "other"):
        add_job(store, name, rows=2)
    choose(store, ("one", 1))
    assert (job(store, "one").next_position, job(store, "other").next_position) == (2, 0)
    assert never_leased(store, "other") == [0, 1]


def test_looking_ahead_begins_where_it_is_told_and_ends_with_the_limit(store: Store) -> None:
    add_job(store, rows=9)
    choose(store, ("job-1", 2), ("job-1", 5))
    assert passed_over(store, start=1) == [1, 3, 4]
    assert passed_over(store, start=1, limit=2) == [1, 3]
    assert never_leased(store, start=3, limit=3) == [3, 4, 6]
    assert never_leased(store, start=4, limit=3) == [4, 6, 7]
    assert never_leased(store, start=8, limit=3) == [8]
    assert never_leased(store, start=9, limit=3) == []
    assert never_leased(store, limit=2) == [0, 1]


def test_rows_that_a_retry_put_back_were_leased_before(store: Store) -> None:
    from conserve.store.books import shards

    add_job(store, rows=2)
    finish(store, leased(store), failed=[0])
    shards.retry_failed(store, "job-1", now=3.0)
    assert passed_over(store) == []
    assert contenders(store) == []
    assert positions(reclaim(store)) == [0]


def test_a_claim_reads_no_row_that_a_retry_put_back(store: Store) -> None:
    """Of the many rows that wait behind the end of a cursor, it looks in the index for those passed over."""
    add_job(store, rows=2_000)
    leased(store, limit=2_000)
    with store.write() as tx:
        tx.execute(text("delete from span"))
        back = [queue.waiting_row("job-1", position, 3.0) for position in range(2_000)]
        bulk.insert_rows(tx, schema.request, back)
    looks = (lambda: contenders(store), lambda: passed_over(store, start=7, limit=9))
    for look in looks:
        assert plans(store, look) == ["request_passed_over"]
    with store.write() as tx:
        tx.execute(text("analyze"))
    for look in looks:
        assert plans(store, look) == ["request_passed_over"]


def statements(store: Store, look: Callable[[], object]) -> list[Any]:
    """Statements of a look that finds nothing, with their values."""
    said: list[Any] = []

    def note(*told: Any) -> None:
        said.append(told[2:4])

    event.listen(store.engine, "before_cursor_execute", note)
    try:
        assert not look()
    finally:
        event.remove(store.engine, "before_cursor_execute", note)
    return said


def plans(store: Store, look: Callable[[], object]) -> list[str]:
    """Indexes in the plans of the queries on `request` that a look makes."""
    said = statements(store, look)
    plan = "explain query plan" if store.engine.dialect.name == "sqlite" else "explain"
    with store.read() as tx:
        told = [
            str(tx.exec_driver_sql(f"{plan} {statement}", values).all())
            for statement, values in said
            if "FROM request" in statement
        ]
    assert all("Sort" not in each and "B-TREE" not in each for each in told), told
    used = r"request_\w+|request USING PRIMARY KEY|(?:Seq Scan on|SCAN) request"
    return [" ".join(re.findall(used, each)) for each in told]


def test_a_claim_makes_no_more_statements_for_more_jobs(store: Store) -> None:
    """Thousands of small jobs have a row each that waits for its next attempt, and none for the first."""
    looks = (
        lambda: contenders(store),
        lambda: reclaim(store),
        lambda: claim(store, now=5.0),
        lambda: claim(store, now=5.0, suspect=True),
    )
    made: list[list[int]] = []
    for jobs in (range(5), range(5, 50)):
        for number in jobs:
            name = add_job(store, f"job-{number}", rows=1)
            put_back(store, leased(store, only=[name]), 0, available_at=9.0)
        made.append([len(statements(store, look)) for look in looks])
    assert made[0] == made[1]


def test_only_jobs_of_the_highest_priority_that_have_rows_contend(store: Store) -> None:
    for name, priority in (("low", 0), ("high", 1), ("higher", 2), ("high2", 1)):
        add_job(store, name, rows=2, priority=priority)
    assert contenders(store) == ["higher"]
    leased(store, only=["higher"])
    assert contenders(store) == ["high", "high2"]
    choose(store, ("high", 1))
    assert contenders(store) == ["high", "high2"], "of which a row was passed over"
    leased(store, only=["high"])
    leased(store, only=["high2"])
    assert contenders(store) == ["low"]
    leased(store)
    assert contenders(store) == []


def test_what_came_back_is_leased_before_anything_is_chosen(store: Store) -> None:
    """Suspects, what was passed over, what is in backoff and rows of a lower priority are not."""
    for name, priority in (("low", 0), ("first", 1), ("second", 1)):
        add_job(store, name, rows=6, priority=priority)
    (held,) = choose(store, *(("first", position) for position in (1, 2, 3, 4)))
    put_back(store, held, 1, suspect=True)
    put_back(store, held, 2, available_at=6.0)
    assert reclaim(store, priority=1) is None
    lease = reclaim(store, priority=1, now=6.0)
    assert lease is not None
    assert (lease.job_id, positions(lease), lease.expires_at) == ("first", [2], 16.0)
    (row,) = lease.rows
    assert (row.attempts, row.started_at) == (2, 5.0)
    assert select(store, "select attempts from request where position = 2") == [(2,)]
    (low,) = choose(store, ("low", 0))
    put_back(store, low, 0)
    assert reclaim(store, priority=1) is None
    assert positions(reclaim(store, priority=0)) == [0]


def test_so_many_come_back_as_there_is_room_for(store: Store) -> None:
    add_job(store, rows=4)
    held = leased(store)
    for position in (3, 1, 2):
        put_back(store, held, position)
    assert positions(reclaim(store, limit=2)) == [1, 2]


def test_a_place_is_remembered_until_the_next(store: Store) -> None:
    with store.write() as tx:
        assert choice.remembered(tx) is None
        choice.remember(tx, "1 a 2")
        assert choice.remembered(tx) == "1 a 2"
        choice.remember(tx, "2 b 3")
        assert choice.remembered(tx) == "2 b 3"
    assert select(store, "select value from meta where key = 'version'") == [(str(LATEST),)]
