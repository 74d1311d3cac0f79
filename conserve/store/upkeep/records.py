"""Damaged records of jobs, mended from the record at submit that each job's folder keeps (`marks`)."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, update

from conserve.store.books import catalog, events, places, shards
from conserve.store.books.catalog import Source
from conserve.store.books.states import FailedBy, JobState
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.files import layout, marks, os_errors
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, below, source
from conserve.store.files.place import place_of

job = schema.job

MOVING = frozenset(
    {
        "seq",
        "state",
        "error",
        "started_at",
        "finished_at",
        "next_position",
        "succeeded",
        "failed",
        "retries",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "resumed_tokens",
        "model",
        "bound_by_run",
        "failed_by",
        "files",
        "priority",
        "deadline",
        "on_late",
    }
)
"""Columns that may change after submit."""


def mend(store: Store, job_id: str, *, now: float) -> str:
    """Mend a job's record from the one in its folder; returns the change in words.

    A record that cannot be mended is replaced: the job keeps its results and is cancelled.
    """
    at_first = at_submit(store, job_id)
    requests = num_requests(store.data, job_id)
    known: dict[int, int] = {}
    with store.read() as tx:
        last_in_shards(tx, store.data, job_id, known)  # reads the shards before anything is locked
    with store.write() as tx:
        catalog.lock_job(tx, job_id)
        values = catalog.record(tx, job_id)
        said = f"the record of job {job_id} was {'taken from its folder' if at_first else 'mended'}"
        last = last_in_shards(tx, store.data, job_id, known)
        right = at_first | numbers(tx, job_id, {**values, **at_first}, last, requests)
        if values["state"] not in tuple(JobState):
            right |= {"state": JobState.QUEUED.value, "failed_by": None}
        if values["failed_by"] not in (None, *FailedBy):
            right["failed_by"] = None
        if not catalog.is_readable({**values, **right}):
            said = f"the record of job {job_id} is lost; the results it has stay, and nothing of it is run any more"
            right |= {"state": JobState.CANCELLED.value, "error": said, "failed_by": None, "finished_at": now}
            right |= {
                "task": '{"kind":"prompt"}',
                "source": to_json(Source(path=None, format="unknown")),
                "files": "{}",
            }
        tx.execute(update(job).where(job.c.id == job_id).values(right))
        if "state" in right:
            events.of_jobs(tx, [job_id], now=now)
    return said


def at_submit(store: Store, job_id: str) -> dict[str, Any]:
    """Columns of the record in the job's folder that still hold; none if the folder has no mark."""
    mark = place_of(layout.job_folder(store.data, job_id)).readable_mark()
    record = mark.record if mark is not None else None
    kept = {"files", "priority"}  # they may have changed, but an old value is better than none
    return {
        name: value
        for name, value in (record or {}).items()
        if name in job.c and (name in kept or name not in MOVING)
    }


def differences(tx: Connection, job_id: str, mark: Mark) -> list[str]:
    """Columns of a job's record that differ from the record at submit in its folder."""
    now = catalog.record(tx, job_id)
    then = mark.record or {}
    return [name for name in now if name in then and name not in MOVING and now[name] != then[name]]


def mend_mark(store: Store, job_id: str) -> str:
    """Write a job's mark anew from its record; returns the change in words."""
    folder = layout.job_folder(store.data, job_id)
    with store.read() as tx:
        record = catalog.record(tx, job_id)
    with os_errors.explained(store.data):
        place_of(folder).make_with_parents()
        place_of(folder).set_mark(Mark(store_id=store.id, registered=True, record=record))
    return f"{below(folder / marks.MARK, store.data)} was written anew"


def num_requests(where: FilePath, job_id: str) -> int | None:
    """Number of a job's requests; None if they cannot be read."""
    try:
        with os_errors.damage_apart(path := layout.requests_file(where, job_id)):
            return int(pq.read_metadata(source(path)).num_rows)
    except (OSError, pa.ArrowException):
        return None


def last_in_shards(tx: Connection, where: FilePath, job_id: str, known: dict[int, int]) -> int:
    """Last position in the job's shards, -1 without any; those that are not `known` by id are read and added."""
    files = shards.files(tx, [job_id])
    for file in files:
        if file.id not in known:
            known[file.id] = int(places.content(where / file.file, file.seal).positions.max(initial=-1))
    return max((known[file.id] for file in files), default=-1)


def numbers(
    tx: Connection, job_id: str, values: Mapping[str, Any], last: int, requests: int | None
) -> dict[str, int]:
    """Number of rows as the requests have it, and what counters that are no numbers may be until they are counted.

    `last` is the last position in a shard. The cursor is behind the last row that is in a place at once, since a
    harvester leases rows from there on.
    """
    found = dict.fromkeys(("retries", *catalog.COUNTERS), 0)
    right = {name: zero for name, zero in found.items() if not isinstance(values[name], int)}
    said = values["num_rows"] if isinstance(values["num_rows"], int) else 0
    right["num_rows"] = max(1 + last, said) if requests is None else requests
    if not isinstance(values["next_position"], int):
        right["next_position"] = min(1 + max(last, places.last(tx, job_id)), right["num_rows"])
    return right


def to_json(source: Source) -> str:
    """Encode a source as the table `job` has it."""
    return msgspec.json.encode(source).decode()
