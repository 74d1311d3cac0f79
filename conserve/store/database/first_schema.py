"""The tables as the first migration makes them, frozen: `schema` has changed since."""

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
Serial = BigInteger().with_variant(Integer, "sqlite")

Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
Table(
    "job",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),
    Column("error", Text),
    Column("priority", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("task", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("next_position", BigInteger, nullable=False),
    Column("succeeded", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("retries", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("resumed_tokens", BigInteger, nullable=False),
)
Table(
    "lease",
    metadata,
    Column("epoch", Serial, primary_key=True),
    Column("job_id", Text, ForeignKey("job.id"), nullable=False),
    Column("owner", Text, nullable=False),
    Column("claimed_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Index("lease_by_job", "job_id"),
    sqlite_autoincrement=True,
)
Table(
    "request",
    metadata,
    Column("job_id", Text, ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("epoch", BigInteger),
    Column("attempts", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("available_at", Float, nullable=False),
    Column("suspect", Boolean, nullable=False),
    Column("started_at", Float),
    Column("tokens", LargeBinary),
    Column("tokens_by", Text),
    Index("request_by_epoch", "epoch", "job_id", "position"),
    sqlite_with_rowid=False,
)
Table(
    "journal",
    metadata,
    Column("job_id", Text, ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("failed", Boolean, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
Table(
    "shard",
    metadata,
    Column("id", Serial, primary_key=True),
    Column("job_id", Text, ForeignKey("job.id"), nullable=False),
    Column("file", Text, nullable=False, unique=True),
    Column("failed", Boolean, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("shard_by_job", "job_id"),
)
