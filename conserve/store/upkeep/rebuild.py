"""Rebuilding: a new database from the readable rows of a damaged one and from the jobs' folders.

Each folder has its job's record, its requests and its results. The rest is in the database alone, and lost where
it cannot be read: results that were in no shard yet, that a job was paused or cancelled, keys, hooks, which servers
are drained, and what was harvested when.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, Table, insert, update
from sqlalchemy.exc import SQLAlchemyError

from conserve.config import Settings
from conserve.errors import StoreError, StoreForbidden, StoreInUse
from conserve.store.books import catalog, shards
from conserve.store.books.journal import is_whole
from conserve.store.books.mounted import require_folders
from conserve.store.books.shards import ShardFile
from conserve.store.database import counters, data, half_made, lineage, schema
from conserve.store.database.migrations import STORE_ID, add_missing_batches, add_missing_causes
from conserve.store.database.store import Store
from conserve.store.files import digests, job_folders, layout, os_errors
from conserve.store.files.locks import unopened
from conserve.store.files.marks import Mark
from conserve.store.files.objects import FilePath, below, source
from conserve.store.files.place import place_of
from conserve.store.upkeep import checking, mending
from conserve.units import count
from conserve.whole import write_whole

job, request, journal, shard, meta = (
    schema.job,
    schema.request,
    schema.journal,
    schema.shard,
    schema.meta,
)

LOG_FILES = ("", "-wal", "-shm")


class Stranger(NamedTuple):
    """A job's folder that the database does not name, although an earlier database at its place did."""

    job_id: str
    mark: Mark


def strangers(store: Store) -> list[Stranger]:
    """Folders of jobs that only earlier databases at this place had; this one is new, emptied or an older copy."""
    with store.read() as tx:
        known = set(catalog.ids(tx))
    ours = {store.id, *lineage.left(store.home, store.place)}
    found = []
    for folder in layout.listed(layout.jobs_folder(store.data)):
        named = folder.name in known or folder.name.startswith(".")
        mark = place_of(folder).mark() if not named else None
        if mark is not None and mark.registered and mark.record and mark.store_id in ours:
            found.append(Stranger(folder.name, mark))
    return found


def rebuild(settings: Settings, *, now: float) -> list[str]:
    """Make a new SQLite database beside the damaged one; returns the changes in words.

    Raises `StoreInUse` while another process has the damaged one open: it would commit into the file put aside. One
    that was killed half-way left a mark, by which the next one begins again with the database that it put aside.
    """
    path = settings.sqlite_file
    if path is None:
        raise StoreError("only an SQLite store can be rebuilt; restore the database from its backup")
    begun = half_made.unfinished(path)
    aside = begun or path.with_name(f"{path.name}.damaged-{int(now)}")
    with os_errors.explained(settings.home), unopened(path) as free:
        if not free:
            raise StoreInUse(
                f"another process has {path} open", step="stop what runs, and run: conserve check --repair"
            )
        write_whole(half_made.mark_of(path), aside.name.encode(), durable=True)
        put_aside(path, aside, again=begun is not None, now=now)
    salvaged = salvage(aside)
    unread = [said for name, said in UNREAD.items() if not is_whole_table(aside, name)]
    store = Store.opened(settings)  # its own id is none of the place's
    try:
        said = refill(store, salvaged, now=now)
    finally:
        store.close()
    half_made.forget(path)
    return [f"the damaged database is kept as {aside.name}", *said, *unread]


def put_aside(path: Path, aside: Path, *, again: bool, now: float) -> None:
    """Rename the damaged database with its logs or, if that was done before, the one that was begun in its place.

    The damaged database goes before its logs, and a begun one behind them. So logs without a database are the
    damaged one's, from which a kill parted them.
    """
    begun = again and path.exists()
    away = path.with_name(f"{path.name}.unfinished-{int(now)}") if begun else aside
    for suffix in reversed(LOG_FILES) if begun else LOG_FILES:
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(away.with_name(away.name + suffix))


def refill(store: Store, salvaged: Mapping[str, Sequence[Mapping[str, Any]]], *, now: float) -> list[str]:
    """Fill an empty database from the salvaged rows and the jobs' folders, and mend each job."""
    with store.write() as tx:
        take_id(tx, store, salvaged["meta"])
        take_place(tx, salvaged["meta"])
        counters.never_again(tx, now=now)  # so that a late writer finds its lease gone
        for row in salvaged["job"]:
            if catalog.is_readable({**dict.fromkeys(job.c.keys()), **row}):
                put(tx, job, row)
        known = set(catalog.ids(tx))
        for row in salvaged["journal"]:
            if row.get("job_id") in known and is_whole(SalvagedRow(row)):
                put(tx, journal, row)
        for row in salvaged["request"]:
            if row.get("job_id") in known:
                put(tx, request, {**row, "epoch": None})
        for row in salvaged["shard"]:
            if row.get("job_id") in known and isinstance(row.get("file"), str):
                put(tx, shard, row)
        for table in (schema.server, schema.harvested):
            for row in salvaged[table.name]:
                put(tx, table, row)
        put_batches(tx, salvaged)
    said = [f"{count(len(known), 'job was', 'jobs were')} read from it"]
    again = Store.over(store.home, store.engine)
    again.note_id()
    with again.read() as tx:
        require_folders(tx, again.data)
    said += adopt(again, strangers(again), now=now, batches=False)
    with again.write() as tx:
        put_batches(tx, salvaged)  # those of the jobs that were taken in
        add_missing_batches(tx)
        add_missing_causes(tx)
    for job_id in known:
        with suppress(StoreForbidden):  # the check that follows tells of the job
            said += mending.mend_rows(again, job_id, now=now)
    return said


def put_batches(tx: Connection, salvaged: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Put keys, hooks and messages, and the files and batches whose jobs are there; those that are there stay."""
    for table in (schema.file, schema.batch, schema.api_key, schema.hook, schema.message):
        for row in salvaged[table.name]:
            put(tx, table, row)


class SalvagedRow:
    """Columns of a salvaged row as attributes; None for a column that it lacks."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)


def put(tx: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Insert a row's columns that the table has; a row that the database refuses is left out."""
    values = {name: value for name, value in row.items() if name in table.c}
    with suppress(SQLAlchemyError, TypeError, ValueError), tx.begin_nested():
        tx.execute(insert(table).values(values))


def take_id(tx: Connection, store: Store, rows: Sequence[Mapping[str, Any]]) -> None:
    """Give the new database the id of the old one, which the folders of its jobs carry."""
    read = [row["value"] for row in rows if row.get("key") == STORE_ID and isinstance(row.get("value"), str)]
    earlier = [each for each in lineage.ids(store.home, store.place) if each != store.id]
    known = [one for one in read if one in earlier]
    wanted = (known or earlier or read or [store.id])[-1]
    tx.execute(update(meta).where(meta.c.key == STORE_ID).values(value=wanted))


def take_place(tx: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Let the new database name the place of the files that the old one named."""
    for row in rows:
        if row.get("key") == data.DATA and isinstance(row.get("value"), str):
            data.record(tx, row["value"])


def adopt(store: Store, found: Sequence[Stranger], *, now: float, batches: bool = True) -> list[str]:
    """Add jobs from their folders, with the results that lie there; returns the changes in words.

    Each gets a batch, unless the caller looks after `batches`.
    """
    said = []
    for stranger in found:
        try:
            if adopt_one(store, stranger, now=now, batch=batches):
                said.append(f"job {stranger.job_id} was taken in from its folder")
        except StoreForbidden as error:
            said.append(f"job {stranger.job_id} is yet to be taken in from its folder: {error}")
    return said


def adopt_one(store: Store, stranger: Stranger, *, now: float, batch: bool) -> bool:
    """Add a job from its folder; False if its record does not do, `StoreForbidden` for a file out of reach.

    One transaction adds the job and counts its rows, since a harvester may claim rows of it right behind.
    """
    where, job_id, record = store.data, stranger.job_id, stranger.mark.record or {}
    found = [(file, checking.read_shard(where, file)) for file in results_in(where, job_id)]
    with store.write() as tx:
        catalog.lock_ids(tx)
        if catalog.taken(tx, job_id):  # another repair was faster
            return False
        put(tx, job, {name: value for name, value in record.items() if name != "seq"})
        if not catalog.taken(tx, job_id):
            return False
        add_missing_causes(tx, job_id)
        if batch:
            add_missing_batches(tx)
        known = {shards.add(tx, file, now=now): read for file, read in found}
        mended = mending.mend(tx, where, checking.audit(tx, where, job_id, known), now)
        counters.never_again(tx, now=now)
    job_folders.register(layout.job_folder(where, job_id), store.id, record)
    mending.throw_away_dropped(store, mended, now)
    mending.restore_from_trash(store, job_id)
    return True


def results_in(where: FilePath, job_id: str) -> Iterator[ShardFile]:
    """Yield the readable files in a job's folder of results, answers before errors; none has an id yet."""
    found = []
    for path in layout.listed(layout.job_folder(where, job_id) / layout.RESULTS):
        if not path.name.endswith(".parquet"):
            continue
        with suppress(OSError, pa.ArrowException), os_errors.damage_apart(path):
            table = pq.read_table(source(path), page_checksum_verification=True)
            failed = table["error_type"].null_count < table.num_rows
            found.append((failed, path, table.num_rows))
    for failed, path, rows in sorted(found, key=lambda one: (one[0], one[1].name)):
        yield ShardFile(
            id=0,
            job_id=job_id,
            file=below(path, where),
            failed=failed,
            num_rows=rows,
            seal=digests.seal(path),
        )


KEYS_UNREAD = (
    "not all keys could be read; run: conserve keys list, and make those that lack: conserve keys add NAME"
)
HOOKS_UNREAD = (
    "not all hooks could be read; run: conserve hooks list, and make those that lack: conserve hooks add URL"
)
SERVERS_UNREAD = (
    "not all servers could be read; run: conserve fleet list, and drain again those that are to get no rows: "
    "conserve fleet drain SERVER"
)
UNREAD = {"api_key": KEYS_UNREAD, "hook": HOOKS_UNREAD, "server": SERVERS_UNREAD}
FOR_NOW = ("lease", "span", "feeding")  # tables of what harvesters do just now; none has the database open
TABLES = tuple(name for name in schema.metadata.tables if name not in FOR_NOW)


def salvage(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the rows of a damaged database that can be read, from both ends of each table."""
    found: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    with suppress(sqlite3.Error, OSError):
        connection = sqlite3.connect(path)
        connection.row_factory = sqlite3.Row
        connection.text_factory = lambda value: value.decode(errors="replace")
        try:
            for table in TABLES:
                keys = [column.name for column in schema.metadata.tables[table].primary_key]
                found[table] = [*from_both_ends(connection, table, keys)]
        finally:
            connection.close()
    return found


def is_whole_table(path: Path, table: str) -> bool:
    """True if every row of a table can be read, or an older version's database never had the table."""
    if not path.exists():
        return False
    with suppress(sqlite3.Error, OSError), closing(sqlite3.connect(path)) as connection:
        names = {
            name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")
        }
        if names and table not in names:
            return True
        connection.execute(f"select * from {table}").fetchall()
        return True
    return False


def from_both_ends(
    connection: sqlite3.Connection, table: str, keys: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows up to the first unreadable one, then from the last one backward."""
    seen = set()
    for order in ("asc", "desc"):
        columns = ", ".join(f"{key} {order}" for key in keys)
        with suppress(sqlite3.Error):
            for row in connection.execute(f"select * from {table} order by {columns}"):
                values = dict(row)
                key = tuple(values.get(name) for name in keys)
                if key not in seen:
                    seen.add(key)
                    yield values
