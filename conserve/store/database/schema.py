"""The tables. Times are seconds since the epoch (UTC), as floats, which every database has.

    job      one row a job, with its counters; a position at or past `next_position` was never leased
    lease    one row a claim; `epoch` numbers claims for ever and fences late writers
    request  one row per *live* request: leased, or returned and waiting for its next attempt
    journal  finished rows that are not in a shard yet
    shard    the Parquet files that hold the rest

A position is a request's place in its job's execution order. At every instant each position of a job is in
exactly one place: not yet leased (>= next_position), in `request`, in `journal`, or in a shard.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

metadata = MetaData()

# SQLite numbers rows by itself only in a column declared INTEGER; PostgreSQL wants the wide type.
Serial = BigInteger().with_variant(Integer, "sqlite")

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

job = Table(
    "job",
    metadata,
    Column("seq", Serial, primary_key=True),  # order of submission
    Column("id", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),  # JobState
    Column("error", Text),  # why state is "failed"
    Column("priority", Integer, nullable=False, default=0),
    Column("submitted_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("task", Text, nullable=False),  # JSON of jobs.task.Task
    # JSON of store.books.catalog.Source: the input and its fingerprint
    Column("source", Text, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("next_position", BigInteger, nullable=False, default=0),
    Column("succeeded", BigInteger, nullable=False, default=0),
    Column("failed", BigInteger, nullable=False, default=0),
    Column("retries", BigInteger, nullable=False, default=0),
    Column("prompt_tokens", BigInteger, nullable=False, default=0),
    Column("completion_tokens", BigInteger, nullable=False, default=0),
    Column("cached_tokens", BigInteger, nullable=False, default=0),
    Column("resumed_tokens", BigInteger, nullable=False, default=0),  # continued from, not generated again
    # JSON of {file name: store.files.digests.Seal}; null for a job of an earlier version
    Column("files", Text),
    Column("model", Text),  # that answers its rows; null until a run has leased the first of them
    Column("tags", Text),  # JSON object of texts
)

lease = Table(
    "lease",
    metadata,
    Column("epoch", Serial, primary_key=True, autoincrement=True),
    Column("job_id", Text, ForeignKey("job.id"), nullable=False),
    Column("owner", Text, nullable=False),
    Column("claimed_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("lease_s", Float),  # how long its owner may be silent; null for one of an earlier version
    Index("lease_by_job", "job_id"),
    sqlite_autoincrement=True,  # an epoch is never used twice, even after its row is gone
)

request = Table(
    "request",
    metadata,
    Column("job_id", Text, ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger),  # the lease it is under; null while it waits
    Column("attempts", Integer, nullable=False),  # times leased
    Column(
        "failures", Integer, nullable=False, default=0
    ),  # attempts that ended in an error, deaths included
    Column("available_at", Float, nullable=False, default=0.0),  # backoff: not before
    Column("suspect", Boolean, nullable=False, default=False),  # in flight when an engine died: runs alone
    Column("started_at", Float),  # first lease
    Column("tokens", LargeBinary),  # generated so far, little-endian int32
    Column("tokens_by", Text),  # Endpoint.identity that generated them
    Column("checksum", BigInteger),  # CRC-32 of these two; null for what an earlier version saved
    Column("deaths", Integer),  # of an engine in which the row was alone; null: none
    Index("request_by_epoch", "epoch", "job_id", "position"),  # a lease's rows; with null, the waiting ones
    sqlite_with_rowid=False,
)

journal = Table(
    "journal",
    metadata,
    Column("job_id", Text, ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("failed", Boolean, nullable=False),
    Column("payload", LargeBinary, nullable=False),  # JSON of store.books.results.Result
    Column("checksum", BigInteger),  # CRC-32 of the row; null for one of an earlier version
    sqlite_with_rowid=False,
)

shard = Table(
    "shard",
    metadata,
    Column("id", Serial, primary_key=True),
    Column("job_id", Text, ForeignKey("job.id"), nullable=False),
    Column("file", Text, nullable=False, unique=True),  # relative to the store's home
    Column("failed", Boolean, nullable=False),  # all rows failed, or none; `retry` drops the former
    Column("num_rows", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("digest", Text),  # of the file (store.files.digests); null for one of an earlier version
    Column("bytes", BigInteger),  # its length
    Index("shard_by_job", "job_id"),
)
