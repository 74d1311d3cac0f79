"""Numbered migrations; a store records the last one that was applied.

A released migration is never edited: add the next one, and when it changes a table that an earlier one makes
from `schema`, freeze that table's old definition first, as `first_schema` does. A test compares the tables that all
of them make with `schema`.
"""

import json
import re
import secrets
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKeyConstraint,
    Integer,
    Table,
    Text,
    exists,
    func,
    insert,
    inspect,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from conserve.errors import StoreTooNew
from conserve.store.database import first_schema, schema
from conserve.store.database.versions import LATEST, number, too_new

STORE_ID = "store_id"  # its key in `meta`
ID = select(schema.meta.c.value).where(schema.meta.c.key == STORE_ID)


def m001_first_tables(tx: Connection) -> None:
    """Jobs, leases, requests, journal and shards."""
    first_schema.metadata.create_all(tx)


def m002_damage_is_noticed(tx: Connection) -> None:
    """Digests of files, checksums of journal rows, lengths of leases, and the store's own id."""
    add_column(tx, "job", Column("files", Text))
    add_column(tx, "journal", Column("checksum", BigInteger))
    add_column(tx, "lease", Column("lease_s", Float))
    add_column(tx, "request", Column("checksum", BigInteger))
    add_column(tx, "shard", Column("digest", Text))
    add_column(tx, "shard", Column("bytes", BigInteger))
    if not store_id(tx):
        tx.execute(insert(schema.meta).values(key=STORE_ID, value=uuid.uuid4().hex))


def m003_models_and_tags(tx: Connection) -> None:
    """The model that a job is bound to, and its tags."""
    add_column(tx, "job", Column("model", Text))
    add_column(tx, "job", Column("tags", Text))


def m004_deaths(tx: Connection) -> None:
    """Deaths of engines with a row alone, apart from the row's other failures."""
    add_column(tx, "request", Column("deaths", Integer))


def m005_batches(tx: Connection) -> None:
    """Files, batches and keys of the Batch API; every job has a batch."""
    for table in (schema.file, schema.batch, schema.api_key):
        table.create(tx, checkfirst=True)
    add_missing_batches(tx)


def m006_deadlines(tx: Connection) -> None:
    """The moment at which a job expires."""
    add_column(tx, "job", Column("deadline", Float))


def m007_hooks(tx: Connection) -> None:
    """Hooks, and the messages to them."""
    for table in (schema.hook, schema.message):
        table.create(tx, checkfirst=True)


def m008_forecasts(tx: Connection) -> None:
    """Harvested tokens by quarter of an hour, and what becomes of a job at its deadline."""
    schema.harvested.create(tx, checkfirst=True)
    add_column(tx, "job", Column("on_late", Text))
    add_column(tx, "batch", Column("on_late", Text))


def m009_spans(tx: Connection) -> None:
    """Leases of whole intervals; on PostgreSQL results no longer look their job up one by one."""
    schema.span.create(tx, checkfirst=True)
    if tx.dialect.name == "postgresql":
        tx.execute(text("alter table journal drop constraint if exists journal_job_id_fkey"))


def m010_servers(tx: Connection) -> None:
    """Servers that harvesters feed, and what each harvester sees of them."""
    for table in (schema.server, schema.feeding):
        table.create(tx, checkfirst=True)


def m011_bound_by_runs(tx: Connection) -> None:
    """Mark of jobs that a run, not the user, bound to their models; unknown of older jobs, which stay bound."""
    add_column(tx, "job", Column("bound_by_run", Boolean))


def m012_losses(tx: Connection) -> None:
    """Owners that died with a row, none of which is known of older ones."""
    add_column(tx, "request", Column("losses", Integer))


def m013_passed_over(tx: Connection) -> None:
    """An index of the rows that were passed over, so that a claim reads no row that `retry` put back."""
    columns = "job_id, attempts, available_at, position, epoch"
    where = "epoch is null and attempts = 0 and available_at = 0"
    tx.execute(text(f"create index if not exists request_passed_over on request ({columns}) where {where}"))


def m014_causes(tx: Connection) -> None:
    """Cause of a job's failure, so that a repair knows those that it may queue again."""
    add_column(tx, "job", Column("failed_by", Text))
    add_missing_causes(tx)


MIGRATIONS: list[Callable[[Connection], None]] = [
    m001_first_tables,
    m002_damage_is_noticed,
    m003_models_and_tags,
    m004_deaths,
    m005_batches,
    m006_deadlines,
    m007_hooks,
    m008_forecasts,
    m009_spans,
    m010_servers,
    m011_bound_by_runs,
    m012_losses,
    m013_passed_over,
    m014_causes,
]
assert len(MIGRATIONS) == LATEST, "a new migration also moves LATEST"


DEFAULT_PROJECT = "default"
"""Project of jobs that `conserve submit` queued, and of requests to an API without keys."""


BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


def new_batch_id() -> str:
    """Id of a batch, which cannot be guessed: 128 random bits."""
    return f"batch_{secrets.token_hex(16)}"


def add_missing_batches(tx: Connection) -> None:
    """Give each job without a batch one: that of its tags, or another in the default project."""
    of_job = exists().where(schema.batch.c.job_id == schema.job.c.id)
    columns = schema.job.c.id, schema.job.c.submitted_at, schema.job.c.tags
    for row in tx.execute(select(*columns).where(~of_job).order_by(schema.job.c.seq)).all():
        batch_id, project = batch_of_tags(row.tags)
        if tx.scalar(select(schema.batch.c.seq).where(schema.batch.c.id == batch_id)) is not None:
            batch_id = new_batch_id()
        values = {"job_id": row.id, "created_at": row.submitted_at, "project": project}
        tx.execute(insert(schema.batch).values(id=batch_id, **values))


def add_missing_causes(tx: Connection, job_id: str | None = None) -> None:
    """Give jobs, or one, without a cause that failed for damage theirs, by the sentences of earlier versions."""
    job = schema.job
    of_damage = or_(*(job.c.error.startswith(words) for words in ("the requests ", "the record ")))
    failed = job.c.state == "failed", job.c.failed_by.is_(None), of_damage
    these = (job.c.id == job_id,) if job_id is not None else ()
    tx.execute(update(job).where(*these, *failed).values(failed_by="damage"))


def batch_of_tags(tags: str | None) -> tuple[str, str]:
    """Id and project of the batch that a job was made of; a new id in the default project for another job."""
    found: Any = None
    with suppress(ValueError):
        found = json.loads(tags or "{}")
    if isinstance(found, dict) and BATCH_ID.fullmatch(str(found.get("batch"))):
        return found["batch"], str(found.get("project", DEFAULT_PROJECT))
    return new_batch_id(), DEFAULT_PROJECT


def add_column(tx: Connection, table: str, column: "Column[Any]") -> None:
    """Add a column that may be null to a table, unless the table has it."""
    if column.name in {found["name"] for found in inspect(tx).get_columns(table)}:
        return
    kind = column.type.compile(tx.dialect)
    tx.execute(text(f"alter table {table} add column {column.name} {kind}"))


def version(tx: Connection) -> int:
    """The number of the last migration applied; 0 for an empty database."""
    if not inspect(tx).has_table("meta"):
        return 0
    return number(tx.scalar(select(schema.meta.c.value).where(schema.meta.c.key == "version")) or 0)


def migrate(tx: Connection) -> None:
    """Bring the store to the latest version, or raise `StoreTooNew` for one from the future."""
    lock(tx)
    current = version(tx)
    if current > LATEST:
        raise StoreTooNew(too_new(current))
    if not current and is_new(tx):
        make_at_once(tx)
        current = LATEST
    for latest, apply in enumerate(MIGRATIONS[current:], start=current + 1):
        apply(tx)
        remember(tx, latest)


def is_new(tx: Connection) -> bool:
    """True for an SQLite database without any table, and for one of PostgreSQL without those of a store."""
    found = set(inspect(tx).get_table_names())
    if tx.dialect.name == "postgresql":
        return found.isdisjoint(schema.metadata.tables)
    return tx.dialect.name == "sqlite" and not found


def make_at_once(tx: Connection) -> None:
    """Make what the migrations arrive at, in a fraction of their time: each of them looks at what is there."""
    for statement in statements(tx.dialect.name):
        tx.exec_driver_sql(statement)
    first = {STORE_ID: uuid.uuid4().hex, "version": str(LATEST)}
    tx.execute(insert(schema.meta), [{"key": key, "value": value} for key, value in first.items()])


@cache
def statements(dialect: str) -> list[str]:
    """Statements that make all tables and their indexes."""
    tables = schema.metadata.sorted_tables
    made: list[CreateTable | CreateIndex] = [
        CreateTable(table, include_foreign_key_constraints=references(table, dialect)) for table in tables
    ]
    made += [
        CreateIndex(index)
        for table in tables
        for index in sorted(table.indexes, key=lambda one: str(one.name))
    ]
    known = {"sqlite": sqlite.dialect, "postgresql": postgresql.dialect}
    return [str(each.compile(dialect=known[dialect]())) for each in made]


def references(table: Table, dialect: str) -> list[ForeignKeyConstraint]:
    """References to other tables that a table has; on PostgreSQL the journal has none (`m009_spans`)."""
    return [] if (table, dialect) == (schema.journal, "postgresql") else list(table.foreign_key_constraints)


def lock(tx: Connection) -> None:
    """Keep two processes from migrating one PostgreSQL database at once; SQLite's transaction is a lock."""
    if tx.dialect.name == "postgresql":
        tx.execute(select(func.pg_advisory_xact_lock(0x434F4E53)))


def store_id(tx: Connection) -> str:
    """The store's own id, which its job folders carry too."""
    return str(tx.scalar(ID) or "")


def remember(tx: Connection, number: int) -> None:
    """Record `number` as the last migration applied."""
    changed = tx.execute(
        update(schema.meta).where(schema.meta.c.key == "version").values(value=str(number))
    ).rowcount
    if not changed:
        tx.execute(insert(schema.meta).values(key="version", value=str(number)))
