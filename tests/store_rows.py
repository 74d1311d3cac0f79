"""Rows on their way through a store, without a harvester: what most tests of the store begin with."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
from sqlalchemy import Connection, text

from conserve import owners
from conserve.store.books import catalog, journal, queue, spans
from conserve.store.books.catalog import Source
from conserve.store.books.job_terms import JobTerms
from conserve.store.books.journal import Committed, Finished
from conserve.store.books.leases import Lease, Terms
from conserve.store.books.queue import Returned
from conserve.store.books.results import Result
from conserve.store.database import guard
from conserve.store.database.moves import MoveMark, MoveState
from conserve.store.database.store import Store
from conserve.store.files import layout

LEASE_S = 10.0


def terms_in(named: dict[str, Any]) -> JobTerms:
    """Terms of a job among these arguments, which are taken out of them."""
    return JobTerms(
        **{field.name: named.pop(field.name) for field in fields(JobTerms) if field.name in named}
    )


def add_job(store: Store, job_id: str = "job-1", rows: int = 4, **named: Any) -> str:
    """A queued job of so many rows, with its folder."""
    layout.job_folder(store.home, job_id).mkdir(parents=True)
    terms = terms_in(named)
    values = {"task": '{"kind":"prompt"}', "now": 0.0} | named
    with store.write() as tx:
        source = Source(path="input.parquet", format="parquet")
        catalog.add(tx, job_id, terms, source=source, num_rows=rows, **values)
    return job_id


def claim(store: Store, *, now: float = 0.0, **named: Any) -> Lease | None:
    """The next lease of up to eight rows for Ann, if there is one."""
    values = {"owner": "ann", "lease_s": LEASE_S, "limit": 8} | named
    with store.write() as tx:
        return claim_in(tx, now=now, **values)


def claim_in(
    tx: Connection,
    *,
    owner: str,
    now: float,
    lease_s: float,
    limit: int,
    only: Collection[str] | None = None,
    suspect: bool = False,
    model: str | None = None,
    jobs: Sequence[Any] | None = None,
    ends: bool = False,
) -> Lease | None:
    """The next lease of all queued jobs, of some `only`, or of `jobs` as they were read before."""
    runnable = queue.runnable_jobs(tx, only, model, locked=False) if jobs is None else jobs
    return queue.claim(
        tx, Terms(owner, now, lease_s, model), runnable, limit=limit, suspect=suspect, ends=ends
    )


def leased(store: Store, *, now: float = 0.0, **named: Any) -> Lease:
    """The next lease, which there must be."""
    lease = claim(store, now=now, **named)
    assert lease is not None
    return lease


def of_another_boot() -> str:
    """Name of a process that may be of this machine before a reboot, or of another with the same host name."""
    host, pid, started, nonce = owners.this_process().rsplit(":", 3)
    return f"{host}:{pid}:{started}:ffffffff.{nonce.rpartition('.')[2]}"


def positions(lease: Lease | None) -> list[int]:
    """The rows of a lease."""
    return [row.position for row in lease.rows] if lease else []


def result(position: int, *, failed: bool = False, **values: Any) -> Result:
    """An answer, or an error."""
    found = {"error_type": "scripted", "error": "no"} if failed else {"text": "yes"}
    times = {"submitted_at": 0.0, "started_at": 1.0, "finished_at": 2.0}
    return Result(**{"row_index": position, **found, **times, **values})


def finish(
    store: Store,
    lease: Lease,
    *,
    of: Collection[int] | None = None,
    failed: Collection[int] = (),
    now: float = 0.0,
    **values: Any,
) -> Committed:
    """Commit results of the rows of a lease, or of some of them; some `failed`."""
    finished = [
        Finished(lease.epoch, lease.job_id, p, result(p, failed=p in failed, **values))
        for p in (positions(lease) if of is None else of)
    ]
    with store.write() as tx:
        return journal.commit(tx, finished, now=now)


def put_back(store: Store, lease: Lease, position: int, **named: Any) -> None:
    """Return one row of a lease to the queue."""
    with store.write() as tx:
        row = Returned(epoch=lease.epoch, job_id=lease.job_id, position=position, **named)
        queue.put_rows_back(tx, [row])


def job(store: Store, job_id: str = "job-1") -> catalog.JobRecord:
    """A job as it stands."""
    with store.read() as tx:
        return catalog.get(tx, job_id)


def select(store: Store, query: str) -> list[tuple[Any, ...]]:
    """Rows of a query on the database."""
    with store.read() as tx:
        return [tuple(row) for row in tx.execute(text(query))]


def live(store: Store, job_id: str = "job-1") -> dict[int, int | None]:
    """Epoch of the lease of each live row, None of a waiting one; of rows with a record and without."""
    with store.read() as tx:
        held = {p: span.epoch for span in spans.of_jobs(tx, [job_id]) for p in span.positions}
        records = tx.execute(
            text("select position, epoch from request where job_id = :job_id"), {"job_id": job_id}
        )
        return held | {row.position: row.epoch for row in records}


def while_writing(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> list[Any]:
    """First arguments of calls to these functions in a transaction that may write, for whose end others wait."""
    begun: list[Connection] = []
    found: list[Any] = []
    write = Store.write

    @contextmanager
    def noted(store: Store) -> Iterator[Connection]:
        with write(store) as tx:
            begun.append(tx)
            try:
                yield tx
            finally:
                begun.pop()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *others: Any, **named: Any) -> Any:
            found.extend([first] * bool(begun))
            return function(first, *others, **named)

        return call

    monkeypatch.setattr(Store, "write", noted)
    for module, name in functions:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return found


def add_mark(store: Store, state: MoveState | None) -> None:
    """Let the database have part in a move, as `conserve store move` does; None ends that."""
    mark = None if state is None else MoveMark(id="m", state=state, other="there", store_id=store.id)
    with store.write() as tx, guard.lifted(tx):
        guard.put_mark(tx, mark)
