"""The view `requests`: body, prompt and state of each row's request."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import duckdb
import pyarrow as pa

from conserve.store.books.states import ENDED_EARLY
from conserve.store.files import layout
from conserve.store.files.objects import FilePath
from conserve.store.sql.input_columns import with_columns
from conserve.store.sql.quoting import parquet
from conserve.store.sql.readable import CHECK, LeftOut
from conserve.store.sql.snapshot import Snapshot
from conserve.store.sql.views import Fault
from conserve.store.upkeep.damage import StorePart


class Wording(Protocol):
    """Makes body and prompt of a request from its job and its rendered payload."""

    def body(self, job_id: str, payload: str) -> str | None:
        """JSON of the request's body; None where the job's task makes none."""

    def prompt(self, job_id: str, payload: str) -> str | None:
        """Text of the prompt; None where it has none."""


def add_requests(
    duck: duckdb.DuckDBPyConnection, taken: Snapshot, wording: Wording | None, fault: Fault
) -> tuple[list[FilePath], list[LeftOut]]:
    """Create the view; returns the files that it reads, and the jobs whose file cannot be read."""
    files, left_out = readable_requests(taken, fault)
    body, prompt = (function(duck, name, wording) for name in ("body", "prompt"))
    add_marks(duck, taken)
    view = VIEW.format(asked="{asked}", body=body, prompt=prompt)
    try:
        duck.execute(f"create view requests as {view.format(asked=scan(files))}")
    except duckdb.Error:  # a file is not one of requests: find out which
        files, others = with_columns(duck, files, {"row_index", "custom_id", "payload", "error"})
        left_out += [gap(path.parent.name, f"{path.name} {reason}") for path, reason in others.items()]
        duck.execute(f"create view requests as {view.format(asked=scan(files))}")
    return files, left_out


def scan(files: Sequence[FilePath]) -> str:
    """SELECT of all requests.

    The folder of a request file is named by its job's id. So one scan serves all jobs, and DuckDB skips the files
    of jobs that a query does not ask for.
    """
    if not files:
        return (
            "select null::varchar as job_id, null::bigint as position, null::bigint as row_index, "
            "null::varchar as custom_id, null::varchar as payload, null::varchar as error where false"
        )
    return (
        "select string_split(filename, '/')[-2] as job_id, file_row_number as position, row_index, custom_id, "
        f"payload, error from {parquet(files, 'filename = true', 'file_row_number = true')}"
    )


VIEW = """
    select q.job_id, q.position, q.row_index, q.custom_id,
           {body}::json as body, {prompt} as prompt,
           case when r.row_index is not null and r.error_type is null then 'succeeded'
                when r.row_index is not null then 'failed'
                when m.cancelled then 'cancelled'
                when l.leased then 'running'
                when l.position is null and q.position < m.next_position then 'unreadable'
                else 'waiting' end as state,
           coalesce(r.attempts, l.attempts, 0) as attempts,
           coalesce(r.error, q.error) as error
    from ({asked}) q
    join store.marks m on m.job_id = q.job_id
    left join store.live l on l.job_id = q.job_id and l.position = q.position
    left join (select job_id, row_index, attempts, error_type, error from results) r
           on r.job_id = q.job_id and r.row_index = q.row_index
"""
"""A row without a result waits if it was never leased or came back. A row that was leased, is not live and has no
result must have its result in a file that cannot be read."""


def readable_requests(taken: Snapshot, fault: Fault) -> tuple[list[FilePath], list[LeftOut]]:
    """Request files that can be opened, and the jobs whose file cannot."""
    files: list[FilePath] = []
    left_out: list[LeftOut] = []
    damaged = {taken.data / each.file: each.what for each in taken.damages if each.part is StorePart.REQUESTS}
    for job in taken.catalog:
        path = layout.requests_file(taken.data, job.id)
        if reason := damaged.get(path) or fault(path):
            left_out.append(gap(job.id, f"{path.name} {reason}"))
        else:
            files.append(path)
    return files, left_out


def gap(job_id: str, reason: str) -> LeftOut:
    """A job whose requests cannot be read."""
    return LeftOut(view="requests", job_id=job_id, reason=reason, fix=CHECK)


def function(duck: duckdb.DuckDBPyConnection, name: str, wording: Wording | None) -> str:
    """SQL expression for a request's body or prompt, computed only where a query asks for the column."""
    if wording is None:
        return "null::varchar"
    say = partial(each, getattr(wording, name))
    duck.create_function(f"request_{name}", say, ["VARCHAR", "VARCHAR"], "VARCHAR", type="arrow")
    return f"request_{name}(q.job_id, q.payload)"


def each(say: Callable[[str, str], str | None], job_ids: pa.Array, payloads: pa.Array) -> pa.Array:
    """Body or prompt of each request; null where rendering failed."""
    pairs = zip(job_ids.to_pylist(), payloads.to_pylist(), strict=True)
    return pa.array(
        [None if payload is None else say(job_id, payload) for job_id, payload in pairs], pa.string()
    )


def add_marks(duck: duckdb.DuckDBPyConnection, taken: Snapshot) -> None:
    """Create the tables `store.live` (rows of the queue) and `store.marks` (how far each job was leased)."""
    marks = pa.table(
        {
            "job_id": pa.array([job.id for job in taken.catalog], pa.string()),
            "next_position": pa.array([job.next_position for job in taken.catalog], pa.int64()),
            "cancelled": pa.array([job.state in ENDED_EARLY for job in taken.catalog], pa.bool_()),
        }
    )
    for name, table in (("live", taken.live_rows), ("marks", marks)):
        duck.register("arriving", table)
        duck.execute(f"create or replace table store.{name} as select * from arriving")
        duck.unregister("arriving")
