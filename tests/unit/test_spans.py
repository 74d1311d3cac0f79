"""Rows of a lease without records: what a claim costs, and when a row gets a record of its own."""

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import event, text

from conserve.errors import StoreError
from conserve.store.books import leases, saved_tokens, spans
from conserve.store.books.choice import choose
from conserve.store.books.leases import Terms
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.books.spans import Span
from conserve.store.books.standing import standing
from conserve.store.database.store import Store
from tests.store_rows import LEASE_S, add_job, finish, job, leased, live, positions, put_back, select

MANY = 100_000


def span_of(*at: int) -> Span:
    return Span.of("job-1", at, 5.0)


def test_a_span_holds_its_positions_until_they_leave() -> None:
    span = span_of(3, 4, 9, 21)
    assert (span.start, span.stop, span.held, len(span.gone)) == (3, 22, 4, 3)
    assert span.positions == [3, 4, 9, 21]
    assert not span.take("job-1", 5), "it was never in it"
    assert not span.take("job-2", 4)
    assert not span.take("job-1", 22)
    assert not span.take("job-1", 2)
    assert span.take("job-1", 9)
    assert not span.take("job-1", 9), "a row leaves once"
    assert (span.positions, span.held) == ([3, 4, 21], 3)


def test_a_span_of_neighbours_has_nothing_gone() -> None:
    span = span_of(*range(7, 24))
    assert (bytes(span.gone), span.held, span.changed) == (b"\0\0\0", 17, False)


def test_a_span_takes_a_bit_a_position() -> None:
    assert [len(spans.nothing_gone(positions)) for positions in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]


def test_many_rows_are_one_span(store: Store) -> None:
    add_job(store, rows=MANY)
    lease = leased(store, limit=MANY)
    assert len(lease.rows) == MANY
    assert select(store, "select start, stop, held from span") == [(0, MANY, MANY)]
    assert select(store, "select count(*) from request") == [(0,)]
    finish(store, lease, of=[MANY - 1, 0])
    ((gone, held),) = select(store, "select gone, held from span")
    assert (gone[0], gone[-1], held) == (1, 128, MANY - 2)


def test_rows_that_end_in_any_order_leave_no_records(store: Store) -> None:
    add_job(store, rows=20)
    lease = leased(store, limit=20)
    for of in ([19, 3], [0, 1, 2], range(4, 19)):
        finish(store, lease, of=of)
        assert select(store, "select count(*) from request") == [(0,)]
    assert select(store, "select (select count(*) from span), (select count(*) from lease)") == [(0, 0)]
    assert job(store).succeeded == 20


def test_a_row_gets_a_record_when_it_saves_tokens_or_comes_back(store: Store) -> None:
    add_job(store, rows=4)
    lease = leased(store, now=7.0)
    with store.write() as tx:
        saved_tokens.save_tokens(tx, [SavedTokens(lease.epoch, "job-1", 2, b"1234", "model")])
    put_back(store, lease, 1, available_at=9.0, failed=True, suspect=True)
    columns = (
        "position, epoch, attempts, failures, available_at, suspect, started_at, tokens, tokens_by, deaths"
    )
    assert select(store, f"select {columns} from request order by 1") == [
        (1, None, 1, 1, 9.0, True, 7.0, None, None, 1),
        (2, lease.epoch, 1, 0, 0.0, False, 7.0, b"1234", "model", None),
    ]
    assert live(store) == {0: lease.epoch, 1: None, 2: lease.epoch, 3: lease.epoch}
    assert job(store).retries == 1


def test_rows_of_a_lease_that_ends_wait_with_one_attempt_behind_them(store: Store) -> None:
    add_job(store, rows=40)
    lease = leased(store, now=7.0, limit=40)
    finish(store, lease, of=range(0, 40, 2))
    with store.write() as tx:
        leases.end(tx, [lease.epoch])
    assert select(store, "select distinct epoch, attempts, failures, started_at from request") == [
        (None, 1, 0, 7.0)
    ]
    again = leased(store, now=20.0, limit=40)
    assert positions(again) == list(range(1, 40, 2))
    assert {(row.attempts, row.started_at) for row in again.rows} == {(2, 7.0)}


def test_a_lease_may_hold_rows_with_records_and_without(store: Store) -> None:
    add_job(store, rows=6)
    put_back(store, leased(store, limit=2), 1)
    lease = leased(store, limit=4)
    assert positions(lease) == [1, 2, 3, 4]
    finish(store, lease, of=[2, 3, 4])
    assert live(store)[1] == lease.epoch
    finish(store, lease, of=[1])
    assert select(store, "select epoch from lease where job_id = 'job-1'") == [(lease.epoch - 1,)]


def test_chosen_rows_need_no_records_either(store: Store) -> None:
    add_job(store, rows=30)
    with store.write() as tx:
        (lease,) = choose(tx, [("job-1", p) for p in (20, 4, 11)], Terms("ann", 5.0, LEASE_S))
    assert select(store, "select start, stop, held from span") == [(4, 21, 3)]
    assert {p for p, epoch in live(store).items() if epoch == lease.epoch} == {4, 11, 20}
    assert finish(store, lease).late == []


def test_a_lease_with_a_span_is_not_ended_by_a_version_that_knows_none(store: Store) -> None:
    """An older version would leave the rows in no place."""
    add_job(store, rows=2)
    lease = leased(store)
    with pytest.raises(StoreError), store.write() as tx:
        tx.execute(text("delete from lease"))
    assert live(store) == {0: lease.epoch, 1: lease.epoch}


def test_the_standing_of_a_row_without_a_record_names_its_owner(store: Store) -> None:
    add_job(store, rows=3)
    leased(store, limit=2)
    found = [standing(store, job(store), position) for position in (1, 2)]
    assert [(row.state, row.where, row.attempts) for row in found] == [
        ("running", "leased by ann", 1),
        ("waiting", "not taken yet; it is the next of its job", 0),
    ]


def test_a_batch_takes_as_many_statements_whatever_its_rows(store: Store) -> None:
    """One transaction claims, and one commits."""
    add_job(store, rows=5000)

    def statements(rows: int) -> tuple[int, int]:
        said: list[str] = []
        listen = lambda conn, cursor, statement, *_: said.append(statement)  # noqa: E731
        event.listen(store.engine, "before_cursor_execute", listen)
        lease = leased(store, limit=rows)
        claimed = len(said)
        finish(store, lease)
        event.remove(store.engine, "before_cursor_execute", listen)
        return claimed, len(said) - claimed

    assert statements(20) == statements(2000)
    assert sum(statements(400)) <= 14


@pytest.mark.sqlite
def test_spans_whose_leases_are_gone_are_dropped(store: Store) -> None:
    """Of one job; only damage leaves some, since the database refuses to end such a lease."""
    for name in ("job-1", "job-2"):
        add_job(store, name, rows=4)
    lost, kept, other = (leased(store, limit=2, only=[name]) for name in ("job-1", "job-1", "job-2"))
    with closing(sqlite3.connect(store.home / "conserve.db")) as database, database:
        database.execute("delete from lease where epoch in (?, ?)", (lost.epoch, other.epoch))
    with store.write() as tx:
        spans.drop_unleased(tx, "job-1")
    assert live(store) == dict.fromkeys((2, 3), kept.epoch)
    assert live(store, "job-2") == dict.fromkeys((0, 1), other.epoch)


def test_the_span_of_a_row_is_found_from_its_first_to_its_last(store: Store) -> None:
    for name in ("job-1", "job-2"):
        add_job(store, name, rows=12)
    first, second, _ = (leased(store, limit=3, only=[name]) for name in ("job-1", "job-1", "job-2"))
    finish(store, second, of=[4])
    with store.read() as tx:
        found = [spans.at(tx, "job-1", position) for position in range(7)]
    epochs = [each.epoch if each is not None else None for each in found]
    assert epochs == [*[first.epoch] * 3, second.epoch, None, second.epoch, None]
