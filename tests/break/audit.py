"""Contents of a store, read past the code under test: the database through `sqlite3`, shards through pyarrow.

The files of the database are copied first, so that the next command, and not the audit, takes up what a kill has
left in the write-ahead log. So no process may write meanwhile.
"""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq

DATABASE = ("conserve.db", "conserve.db-wal")
OF_A_HOME = frozenset({*DATABASE, "conserve.db-shm", "jobs", "trash", "verified.json", "stores.json"})
OF_A_JOB = frozenset({"requests.parquet", "inputs.parquet", "inputs", "job.json", "results"})
COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "resumed_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A job as the database and its files have it."""

    id: str
    state: str
    rows: int
    results: Mapping[int, Mapping[str, Any]]  # by position
    places: Counter[int]  # how often each position is in one of the four places

    @property
    def lost(self) -> int:
        """Positions that are nowhere."""
        return sum(position not in self.places for position in range(self.rows))

    @property
    def doubled(self) -> int:
        """Times that a position is somewhere once too often, or that the job has no such position."""
        return sum(max(0, number - (0 <= at < self.rows)) for at, number in self.places.items())

    @property
    def failed(self) -> int:
        """Rows that ended in an error."""
        return sum(result["error_type"] is not None for result in self.results.values())

    def by_row(self) -> dict[int, tuple[str | None, str | None]]:
        """Text and type of error of each row that has a result."""
        rows = {found["row_index"]: (found["text"], found["error_type"]) for found in self.results.values()}
        assert len(rows) == len(self.results), f"{self.id}: two results are of one row"
        return rows


def audit(home: Path) -> dict[str, Audited]:
    """Every job of a store on which no process works; fails where its books are not in order.

    Rows that are lost or doubled are not judged here: the caller counts them.
    """
    with copied(home) as database:
        assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
        assert not database.execute("pragma foreign_key_check").fetchall()
        if not database.execute("select 1 from sqlite_master where name = 'job'").fetchall():
            return {}  # killed before its tables were made
        check_leases(database)
        return {job["id"]: audited(database, home, job) for job in rows(database, "select * from job")}


@contextmanager
def copied(home: Path) -> Iterator[sqlite3.Connection]:
    """A copy of the store's database as it is on disk."""
    with TemporaryDirectory() as folder:
        for name in DATABASE:
            if (home / name).exists():
                shutil.copyfile(home / name, Path(folder, name))
        with closing(sqlite3.connect(Path(folder, DATABASE[0]))) as database:
            yield database


def rows(database: sqlite3.Connection, query: str, *values: Any) -> list[dict[str, Any]]:
    """Rows that a query finds, by the names of its columns."""
    found = database.execute(query, values)
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]


def check_leases(database: sqlite3.Connection) -> None:
    """Every row that is under a lease has one of its job, and no lease is without rows."""
    under = "select request.epoch, request.job_id from request where epoch is not null"
    held = {(row["epoch"], row["job_id"]) for row in rows(database, under)}
    held |= {(epoch, job_id) for job_id, epoch, _ in in_spans(database)}
    leases = {(row["epoch"], row["job_id"]) for row in rows(database, "select epoch, job_id from lease")}
    assert held <= leases, f"rows under leases that are gone: {held - leases}"
    assert leases <= held, f"leases without rows: {leases - held}"


def in_spans(database: sqlite3.Connection) -> Iterator[tuple[str, int, int]]:
    """Job, epoch and position of each row in a span; none in a store of an earlier version."""
    if not database.execute("select 1 from sqlite_master where name = 'span'").fetchall():
        return
    for row in rows(database, "select * from span"):
        gone = int.from_bytes(row["gone"], "little")
        there = [p for p in range(row["start"], row["stop"]) if not gone >> (p - row["start"]) & 1]
        assert len(there) == row["held"] > 0, f"a span that counts {row['held']} rows has {there}"
        yield from ((row["job_id"], row["epoch"], position) for position in there)


def audited(database: sqlite3.Connection, home: Path, job: Mapping[str, Any]) -> Audited:
    """One job: its folder is whole, its counters are the sums over its results, and its state follows from them."""
    job_id, num_rows = job["id"], job["num_rows"]
    requests = read(home / "jobs" / job_id / "requests.parquet")
    assert sorted(row["row_index"] for row in requests) == list(range(num_rows)), f"{job_id} is half a job"
    check_inputs(home / "jobs" / job_id, json.loads(job["source"]), num_rows)
    found = [*journalled(database, job_id), *sharded(database, home, job_id)]
    waiting = rows(database, "select position from request where job_id = ?", job_id)
    places = Counter(position for position, _ in found)
    places.update(row["position"] for row in waiting)
    places.update(position for of_job, _, position in in_spans(database) if of_job == job_id)
    places.update(range(job["next_position"], num_rows))
    is_now = Audited(id=job_id, state=job["state"], rows=num_rows, results=dict(found), places=places)
    if not is_now.doubled:
        check_counters(job, is_now)
    return is_now


def check_inputs(folder: Path, source: Mapping[str, Any], num_rows: int) -> None:
    """The input rows that a job keeps are all there."""
    if source.get("copied"):
        assert len(read(folder / "inputs.parquet")) == num_rows, f"inputs of {folder.name} are missing"
    kept = [part["kept"] for part in source.get("parts", ()) if part.get("kept")]
    if kept:
        assert sum(len(read(folder / name)) for name in kept) == num_rows, (
            f"inputs of {folder.name} are missing"
        )


def journalled(database: sqlite3.Connection, job_id: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The results of a job in the journal, by position."""
    for row in rows(database, "select * from journal where job_id = ?", job_id):
        result = json.loads(row["payload"])
        result.setdefault("error_type", None)
        assert row["failed"] == (result["error_type"] is not None)
        yield row["position"], result


def sharded(database: sqlite3.Connection, home: Path, job_id: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The results of a job in registered shards, by position."""
    for shard in rows(database, "select * from shard where job_id = ?", job_id):
        found = read(home / shard["file"])
        assert len(found) == shard["num_rows"], f"{shard['file']} has {len(found)} rows"
        for result in found:
            assert (result["job_id"], result["error_type"] is not None) == (job_id, bool(shard["failed"]))
            yield result["position"], result


def read(path: Path) -> Sequence[Mapping[str, Any]]:
    """The rows of a Parquet file; of one that has not changed since, as they were read before."""
    stat = path.stat()
    return read_once(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def read_once(path: Path, *_: int) -> Sequence[Mapping[str, Any]]:
    """The rows of a Parquet file."""
    return pq.read_table(path).to_pylist()


def check_counters(job: Mapping[str, Any], found: Audited) -> None:
    """The counters of a job say what its results come to."""
    failed = found.failed
    assert (job["succeeded"], job["failed"]) == (len(found.results) - failed, failed), found.id
    for name in COUNTED:
        assert job[name] == sum(result.get(name) or 0 for result in found.results.values()), (found.id, name)
    if found.state != "cancelled":
        assert (found.state == "completed") == (len(found.results) == found.rows), (found.id, found.state)


def left_behind(home: Path) -> list[str]:
    """Files and folders of a home that are of no job and no shard; what is in the trash has been swept."""
    with copied(home) as database:
        jobs = {row["id"] for row in rows(database, "select id from job")}
        shards = {row["file"] for row in rows(database, "select file from shard")}
    found = [path for path in home.iterdir() if path.name not in OF_A_HOME]
    found += [path for path in (home / "jobs").iterdir() if path.name not in jobs]
    for folder in (home / "jobs" / job_id for job_id in jobs):
        found += [path for path in folder.iterdir() if path.name not in OF_A_JOB]
        found += [path for path in folder.glob("results/*") if str(path.relative_to(home)) not in shards]
    return sorted(str(path.relative_to(home)) for path in found)
