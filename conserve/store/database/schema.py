"""The tables. Times are seconds since the epoch (UTC), as floats, which every database has.

    job      one row a job, with its counters; a position at or past `next_position` was never leased
    lease    one row a claim; `epoch` numbers claims for ever and fences late writers
    span     one row a lease of rows in their first attempt: an interval of positions, and those that have left it
    request  live rows that went their own way: they saved tokens, came back, or were passed over
    journal  finished rows that are not in a shard yet
    shard    the Parquet files that hold the rest
    harvested  tokens by quarter of an hour, for forecasts
    file     files that clients of the Batch API uploaded, and files of answers made for them
    batch    one row a job: its name and its state in OpenAI's Batch API; before its job exists, what was asked for
    api_key  keys of the Batch API, as hashes
    hook     addresses that are told of changes of batches
    message  the outbox: what is to be sent to a hook, and what was
    server   servers that harvesters have seen
    feeding  what each harvester sees of each of them

A position is a request's place in its job's execution order. At every instant each position of a job is in
exactly one place: not yet leased (>= next_position), in a span, in `request`, in `journal`, or in a shard.
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
    and_,
    literal_column,
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
    Column("priority", Integer, nullable=False),
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
    Column("deadline", Float),  # when the job is to be done
    Column("on_late", Text),  # store.books.states.OnLate at its deadline; null: it expires
    Column("bound_by_run", Boolean),  # true if a first lease named the model, rather than the user
    Column("failed_by", Text),  # store.books.states.FailedBy; null unless state is "failed"
)

lease = Table(
    "lease",
    metadata,
    Column("epoch", Serial, primary_key=True),
    Column("job_id", Text, ForeignKey("job.id"), nullable=False),
    Column("owner", Text, nullable=False),
    Column("claimed_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("lease_s", Float),  # how long its owner may be silent; null for one of an earlier version
    Index("lease_by_job", "job_id"),
    sqlite_autoincrement=True,  # an epoch is never used twice, even after its row is gone
)

# A ConServe that knows no spans would end a lease and leave its rows in no place: the foreign key refuses that.
span = Table(
    "span",
    metadata,
    Column("epoch", BigInteger, ForeignKey("lease.epoch"), primary_key=True),
    Column("job_id", Text, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("stop", BigInteger, nullable=False),
    Column("held", Integer, nullable=False),  # positions that have not left
    Column("gone", LargeBinary, nullable=False),  # bit n, lowest first: position start + n has left
    Column("claimed_at", Float, nullable=False),
)

request = Table(
    "request",
    metadata,
    Column("job_id", Text, ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("epoch", BigInteger),  # the lease it is under; null while it waits
    Column("attempts", Integer, nullable=False),  # times leased
    # Attempts that ended in an error, deaths included.
    Column("failures", Integer, nullable=False, default=0),
    Column("available_at", Float, nullable=False, default=0.0),  # backoff: not before
    Column("suspect", Boolean, nullable=False, default=False),  # in flight when an engine died: runs alone
    Column("started_at", Float),  # first lease
    Column("tokens", LargeBinary),  # generated so far, little-endian int32
    Column("tokens_by", Text),  # Endpoint.identity that generated them
    Column("checksum", BigInteger),  # CRC-32 of these two; null for what an earlier version saved
    Column("deaths", Integer),  # of an engine, or a whole harvester, in which the row was alone; null: none
    Column("losses", Integer),  # owners and servers that died while they had the row; null: none
    Index("request_by_epoch", "epoch", "job_id", "position"),  # a lease's rows; with null, the waiting ones
    sqlite_with_rowid=False,
)

PASSED_OVER = and_(
    request.c.epoch.is_(None),
    request.c.attempts == literal_column("0"),
    request.c.available_at == literal_column("0"),
)
"""Condition on a row of `request`: it was never leased, although rows behind it were.

A row that `retry` put back was never leased either, but has `available_at` set. The zeros are part of the text,
since a database reads an index of some rows only where the text of a query asks for no others.
"""

# SQLite takes this index for the best one only if it has all columns of the condition.
Index(
    "request_passed_over",
    *(request.c.job_id, request.c.attempts, request.c.available_at, request.c.position, request.c.epoch),
    sqlite_where=PASSED_OVER,
    postgresql_where=PASSED_OVER,
)

journal = Table(
    "journal",
    metadata,
    Column("job_id", Text, ForeignKey("job.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True),
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

harvested = Table(
    "harvested",
    metadata,
    Column("slot", BigInteger, primary_key=True, autoincrement=False),  # quarters of an hour since 1970
    Column("tokens", Float, nullable=False),  # computed in it: prompts without cached ones, and answers
    Column("busy_s", Float, nullable=False),  # of it, in which any harvester had rows to run
    Column("busy_until", Float, nullable=False),  # end of the last interval in `busy_s`
)

file = Table(
    "file",
    metadata,
    Column("seq", Serial, primary_key=True),  # order of upload
    Column("id", Text, nullable=False, unique=True),
    Column("project", Text, nullable=False),
    Column("purpose", Text, nullable=False),  # "batch", or "batch_output" of a job's answers and errors
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("num_lines", BigInteger, nullable=False),
    Column("digest", Text, nullable=False),  # BLAKE2b of the contents
    Column("path", Text, nullable=False, unique=True),  # relative to the store's home
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    # the job whose answers it holds; null for an upload
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE")),
    Column("idempotency_key", Text),
    Index("file_by_idempotency_key", "project", "idempotency_key", unique=True),
    Index("file_by_job", "job_id"),
)

batch = Table(
    "batch",
    metadata,
    Column("seq", Serial, primary_key=True),  # order of creation
    Column("id", Text, nullable=False, unique=True),
    Column("project", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("job_id", Text, ForeignKey("job.id", ondelete="CASCADE"), unique=True),  # null until it is queued
    Column("file_id", Text),  # its input; null for a job of `conserve submit`
    Column("endpoint", Text),  # as is null: such a job's task names it
    Column("completion_window", Text),
    Column("window_s", Float),
    Column("on_late", Text),  # as of a job
    Column("metadata", Text),  # JSON object of texts
    Column("key_name", Text),  # api_key.name that made it
    Column("idempotency_key", Text),
    Column("output_expires_s", Float),  # from the output's creation
    Column("refused_at", Float),  # the input cannot become a job
    Column("errors", Text),  # JSON of store.books.batches.InputFault's: why
    Column("cancelling_at", Float),
    Column("delivered_at", Float),  # the files of answers and errors are there
    Column("delivered_of", Float),  # `job.finished_at` then: `retry` makes it another
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Index("batch_by_idempotency_key", "project", "idempotency_key", unique=True),
)

api_key = Table(
    "api_key",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("project", Text, nullable=False),
    Column("hash", Text, nullable=False, unique=True),  # SHA-256 of the key
    Column("live", Boolean, nullable=False),  # may send live requests
    Column("batch", Boolean, nullable=False),  # may use files and batches
    Column("limit_rows", BigInteger),  # unfinished at a time, of the batches that the key made
    Column("limit_tokens", BigInteger),  # of its batches of the last 24 hours
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
)

hook = Table(
    "hook",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("project", Text),  # whose batches it is told of; null: every project's
    Column("url", Text, nullable=False),
    Column("events", Text, nullable=False),  # JSON array of store.books.events.Event's
    Column("secret", Text, nullable=False),  # signs the messages, so that it is kept as it is
    Column("allow_private", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),  # removed, or refused by its receiver for good
    Column("ended", Text),  # why
)

message = Table(
    "message",
    metadata,
    Column("seq", Serial, primary_key=True),
    Column("id", Text, nullable=False, unique=True),  # the header webhook-id
    Column("hook_id", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("batch_id", Text),  # no foreign keys: a message outlives its job
    Column("job_id", Text),
    Column("body", Text, nullable=False),  # the JSON that is sent, the same at every attempt
    Column("created_at", Float, nullable=False),
    Column("state", Text, nullable=False),  # store.books.outbox.MessageState
    Column("attempts", Integer, nullable=False),
    Column("next_at", Float, nullable=False),  # not sent before
    Column("owner", Text),  # the process that sends it
    Column("held_until", Float),  # others leave it alone until then
    Column("tried_at", Float),  # last attempt
    Column("status", Integer),  # HTTP status of its answer
    Column("error", Text),  # why it failed
    Index("message_by_turn", "state", "next_at"),
    Index("message_by_hook", "hook_id", "seq"),
)

server = Table(
    "server",
    metadata,
    Column("url", Text, primary_key=True),
    Column("model", Text),
    Column("version", Text),
    Column("seen_at", Float),  # last sign of life
    Column("drained_at", Float),  # it gets no rows since then; null: it does
)

feeding = Table(
    "feeding",
    metadata,
    Column("owner", Text, primary_key=True),  # the harvester, named as the owners of leases are
    Column("url", Text, primary_key=True),
    Column("state", Text, nullable=False),  # jobs.fleet.member.MemberState
    Column("in_flight", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),  # rows that are leased for the server and not sent yet
    Column("tokens_per_s", Float, nullable=False),
    Column("why", Text),  # of a state that is not good
    Column("noted_at", Float, nullable=False),
)
