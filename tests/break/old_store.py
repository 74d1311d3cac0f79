"""Stores of the first version: its tables, frozen here as it wrote them, with what a store of today holds."""

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from .audit import in_spans, rows

FIRST_TABLES = """
create table meta ("key" text not null, value text not null, primary key ("key"));
create table job (
    seq integer not null, id text not null, state text not null, error text, priority integer not null,
    submitted_at float not null, started_at float, finished_at float, task text not null, source text not null,
    num_rows bigint not null, next_position bigint not null, succeeded bigint not null, failed bigint not null,
    retries bigint not null, prompt_tokens bigint not null, completion_tokens bigint not null,
    cached_tokens bigint not null, resumed_tokens bigint not null, primary key (seq), unique (id)
);
create table lease (
    epoch integer not null primary key autoincrement, job_id text not null, owner text not null,
    claimed_at float not null, expires_at float not null, foreign key(job_id) references job (id)
);
create index lease_by_job on lease (job_id);
create table request (
    job_id text not null, position bigint not null, epoch bigint, attempts integer not null,
    failures integer not null, available_at float not null, suspect boolean not null, started_at float,
    tokens blob, tokens_by text, primary key (job_id, position), foreign key(job_id) references job (id)
) without rowid;
create index request_by_epoch on request (epoch, job_id, position);
create table journal (
    job_id text not null, position bigint not null, failed boolean not null, payload blob not null,
    primary key (job_id, position), foreign key(job_id) references job (id)
) without rowid;
create table shard (
    id integer not null, job_id text not null, file text not null, failed boolean not null,
    num_rows bigint not null, created_at float not null, primary key (id),
    foreign key(job_id) references job (id), unique (file)
);
create index shard_by_job on shard (job_id);
"""
TABLES = ("job", "lease", "request", "journal", "shard")


def make_old(home: Path) -> None:
    """Turn a store, on which no process works, into one of the first version."""
    now, old = home / "conserve.db", home / "old.db"
    with closing(sqlite3.connect(now)) as source, closing(sqlite3.connect(old)) as target, target:
        target.execute("pragma journal_mode = wal")
        target.executescript(FIRST_TABLES)
        target.execute("insert into meta values ('version', '1')")
        for table in TABLES:
            copy(source, target, table)
        target.executemany(
            "insert into request values (?, ?, ?, 1, 0, 0.0, 0, null, null, null)",
            [(job_id, position, epoch) for job_id, epoch, position in in_spans(source)],
        )
    for path in home.glob("conserve.db*"):
        path.unlink()
    old.rename(now)
    forget((home / "verified.json", home / "trash", *home.glob("jobs/*/job.json")))


def copy(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> None:
    """Copy a table, as far as the first version has its columns."""
    names = [column["name"] for column in rows(target, f"pragma table_info({table})")]
    values = source.execute(f"select {', '.join(names)} from {table}").fetchall()
    target.executemany(f"insert into {table} values ({', '.join('?' * len(names))})", values)


def forget(paths: Iterable[Path]) -> None:
    """Remove files and folders that the first version did not have."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def version(home: Path) -> str:
    """The version of a store."""
    with closing(sqlite3.connect(home / "conserve.db")) as database:
        return str(database.execute("select value from meta where key = 'version'").fetchone()[0])
