"""The journal: where a row's result first becomes durable, in the transaction that ends its live row."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select, update

from conserve.store.books import events, spans
from conserve.store.books.results import TOKEN_COUNTS, Result, checked, counts, decode, encode, is_object
from conserve.store.books.spans import Span
from conserve.store.books.states import COMPLETABLE, JobState, stored
from conserve.store.database import schema
from conserve.store.database.bulk import afresh, finish, insert_rows, matching
from conserve.store.database.wakeup import wake

job, request, journal = schema.job, schema.request, schema.journal


class Finished(NamedTuple):
    """One row's result and the lease it was computed under."""

    epoch: int
    job_id: str
    position: int
    result: Result


class Counted(NamedTuple):
    """A job of which results were counted."""

    job_id: str
    new: int  # results that this transaction wrote
    done: int  # all results of the job by then, of all writers
    num_rows: int
    bytes: int  # of the results that this transaction wrote


class Committed(NamedTuple):
    """Outcome of `commit`: results written, results refused as their lease was gone, ids of jobs now complete."""

    written: list[Finished]
    late: list[Finished]
    completed: list[str]
    counted: Sequence[Counted] = ()


def commit(
    tx: Connection, finished: Sequence[Finished], *, now: float, ends: bool = False, owner: str | None = None
) -> Committed:
    """Move rows from under their leases to `journal`, count them, and complete jobs that have all their results.

    A result of a row that is not under its lease any more, of the `owner` if one is given, is left out and reported
    as late: another owner has that row. A result that does not fit the columns is written as an error of its row;
    the other results are not affected. With `ends` the transaction may be committed with the last statement, so
    nothing must follow in it.
    """
    if not finished:
        return Committed([], [], [])
    alive = spans.locked(tx, {f.epoch for f in finished}, owner)
    there = taken(tx, finished, alive)
    entries = [entry(f) for f, is_there in zip(finished, there, strict=True) if is_there]
    written = [f for f, _ in entries]
    late = [f for f, is_there in zip(finished, there, strict=True) if not is_there]
    spans.write(tx, alive.values())
    insert_rows(tx, journal, [to_row(f, payload) for f, payload in entries])
    spans.end_empty_leases(tx, alive)
    # Last, since other writers of the same jobs wait from here on.
    unfinished = {rest.job_id for rest in alive.values() if rest is not None and rest.held}
    counted = count(tx, entries, ends=ends and all(f.job_id in unfinished for f in written))
    done = [each.job_id for each in counted if each.done == each.num_rows]
    return Committed(written, late, [job_id for job_id in done if complete(tx, job_id, now)], counted)


def taken(tx: Connection, finished: Sequence[Finished], alive: Mapping[int, Span | None]) -> list[bool]:
    """Take these rows from under their leases; True for each that was there."""
    with_records: dict[tuple[int, str], list[int]] = defaultdict(list)
    there = []
    for f in finished:
        rest = alive.get(f.epoch)
        there.append(rest is not None and rest.take(f.job_id, f.position))
        if f.epoch in alive and not there[-1]:
            with_records[f.epoch, f.job_id].append(f.position)
    ended = {
        (*held, position)
        for held, positions in with_records.items()
        for position in end_requests(tx, *held, positions)
    }
    rows = zip(finished, there, strict=True)
    return [in_span or (f.epoch, f.job_id, f.position) in ended for f, in_span in rows]


def entry(finished: Finished) -> tuple[Finished, bytes]:
    """The row's result as it is written, and its payload."""
    result, payload = checked(finished.result)
    return finished if result is finished.result else finished._replace(result=result), payload


def to_row(finished: Finished, payload: bytes) -> dict[str, Any]:
    """A result as a row of the journal."""
    job_id, position, failed = finished.job_id, finished.position, finished.result.failed
    return {
        "job_id": job_id,
        "position": position,
        "failed": failed,
        "payload": payload,
        "checksum": checksum(job_id, position, failed, payload),
    }


def checksum(job_id: str, position: int, failed: bool, payload: bytes) -> int:
    """CRC-32 of a row of the journal."""
    return zlib.crc32(payload, zlib.crc32(f"{job_id}/{position}/{int(failed)}".encode()))


def is_whole(row: Any) -> bool:
    """True if a row of the journal is what was written; one of an earlier version must at least be an object."""
    if row.checksum is None:
        return is_object(row.payload)
    return bool(row.checksum == checksum(row.job_id, row.position, row.failed, row.payload))


def end_requests(tx: Connection, epoch: int, job_id: str, positions: Sequence[int]) -> list[int]:
    """Delete the live requests of these positions that are under this lease; returns their positions."""
    held = request.c.job_id == job_id, request.c.epoch == epoch
    ended: list[int] = []
    for at in matching(tx, [request.c.position], [(position,) for position in positions]):
        ended += afresh(tx, delete(request).where(*held, *at).returning(request.c.position)).scalars()
    return ended


def count(tx: Connection, entries: Sequence[tuple[Finished, bytes]], *, ends: bool = False) -> list[Counted]:
    """Add the rows to their jobs' counters; if that `ends` the transaction, commit with the last of them."""
    by_job: dict[str, list[Result]] = defaultdict(list)
    size = Counter[str]()
    for f, payload in entries:
        by_job[f.job_id].append(f.result)
        size[f.job_id] += len(payload)
    counted = []
    last = max(by_job, default=None) if ends else None
    for job_id, results in sorted(by_job.items()):  # one order for all writers, so that none deadlock
        failed = sum(r.failed for r in results)
        added = (
            update(job)
            .where(job.c.id == job_id)
            .values(
                succeeded=job.c.succeeded + len(results) - failed,
                failed=job.c.failed + failed,
                prompt_tokens=job.c.prompt_tokens + sum(r.prompt_tokens for r in results),
                completion_tokens=job.c.completion_tokens + sum(r.completion_tokens for r in results),
                cached_tokens=job.c.cached_tokens + sum(r.cached_tokens for r in results),
                resumed_tokens=job.c.resumed_tokens + sum(r.resumed_tokens for r in results),
            )
            .returning((job.c.succeeded + job.c.failed).label("done"), job.c.num_rows)
        )
        (after,) = finish(tx, added, ends=job_id == last)
        counted.append(Counted(job_id, len(results), after.done, after.num_rows, size[job_id]))
    return counted


def complete(tx: Connection, job_id: str, now: float) -> bool:
    """Complete the job, unless it was cancelled, if every row has its result; returns True if it does so.

    An expired one too: its last rows were in flight at its deadline. Once a batch's files name them as expired, no
    result comes any more (`batches.fence`).
    """
    done = tx.execute(
        update(job)
        .where(
            job.c.id == job_id,
            job.c.state.in_(stored(COMPLETABLE)),
            job.c.succeeded + job.c.failed == job.c.num_rows,
        )
        .values(state=JobState.COMPLETED.value, finished_at=now, error=None, failed_by=None)
    )
    if done.rowcount:
        events.of_jobs(tx, [job_id], now=now)
        wake(tx)  # harvesters that wait for the rows of others may end
    return done.rowcount == 1


class Misfit(NamedTuple):
    """A journal row that was written as an answer and does not fit the columns of results."""

    position: int
    payload: bytes
    error: Result  # to be written in its place


def answers(tx: Connection, job_id: str) -> Sequence[Any]:
    """The job's journal rows that were written as answers."""
    as_answers = journal.c.job_id == job_id, journal.c.failed == False  # noqa: E712
    return tx.execute(select(journal.c.position, journal.c.payload).where(*as_answers)).all()


def misfits(rows: Sequence[Any]) -> list[Misfit]:
    """Journalled answers that do not fit the columns of results; earlier versions did not check them."""
    read = ((row.position, row.payload, decode(row.payload)) for row in rows)
    return [Misfit(*row) for row in read if row[2].failed]


def fail_misfits(tx: Connection, job_id: str, found: Sequence[Misfit]) -> int:
    """Turn misfits into failed rows, which `retry` finds; returns how many were still there to be turned."""
    failed = 0
    taken_off = dict.fromkeys(TOKEN_COUNTS, 0)
    for misfit in found:
        as_read = journal.c.payload == misfit.payload, journal.c.failed == False  # noqa: E712
        written = encode(misfit.error)
        changed = tx.execute(
            update(journal)
            .where(journal.c.job_id == job_id, journal.c.position == misfit.position, *as_read)
            .values(failed=True, payload=written, checksum=checksum(job_id, misfit.position, True, written))
        ).rowcount
        failed += changed
        for name, n in counts(misfit.payload).items() if changed else ():
            taken_off[name] += n
    if failed:
        counters = {name: job.c[name] - n for name, n in taken_off.items()}
        tx.execute(
            update(job)
            .where(job.c.id == job_id)
            .values(succeeded=job.c.succeeded - failed, failed=job.c.failed + failed, **counters)
        )
    return failed
