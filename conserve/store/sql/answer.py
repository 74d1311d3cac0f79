"""Answers to queries, computed by a child process within bounds of memory, disk and time."""

import atexit
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import duckdb
import msgspec
import pyarrow as pa

from conserve import errors
from conserve.errors import ConserveError, QueryError, QueryTooGreedy, StoreError
from conserve.store.files import layout
from conserve.store.files.objects import FilePath
from conserve.store.sql import child, mistakes, query, readable, scratch
from conserve.store.sql.batches import RowBatches, rows_of
from conserve.store.sql.bounds import Bounds
from conserve.store.sql.child import Frame, Send
from conserve.store.sql.named_files import NamedFile
from conserve.store.sql.readable import REPAIR, LeftOut
from conserve.store.sql.requests_view import Wording
from conserve.store.sql.snapshot import Snapshot
from conserve.store.sql.unsupported_values import fix_of, text_fault
from conserve.units import binary_size

# Beginning of DuckDB's messages once rows flow through Arrow.
STREAMED = re.compile(r"[A-Z][A-Za-z /-]* Error: ")
HELD_BYTES = 4 << 20  # of an answer, before any is sent: a file that fails until then can be left out
PERHAPS_DAMAGE = (duckdb.Error, pa.ArrowException, OSError)
BLAMELESS = (  # errors that no damaged file can cause
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.PermissionException,
    duckdb.ConversionException,
    duckdb.OutOfRangeException,
    duckdb.OutOfMemoryException,
    MemoryError,  # Arrow's are of both kinds
)


class PreparedDatabase:
    """An empty database that queries' processes inherit from the second one on: to open one takes 20 ms.

    This process never uses it. A program of one query and one thread, as `conserve sql`, has none. Beside other
    threads the first process inherits one too: what DuckDB makes once a process is then whole. A process that was
    forked while another thread made it would wait for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries = 0
        self._duck: duckdb.DuckDBPyConnection | None = None

    def for_next(self) -> duckdb.DuckDBPyConnection | None:
        """The database for another query's process; None for the first of a program without other threads."""
        with self._lock:
            self._queries += 1
            if self._duck is None and (self._queries > 1 or threading.active_count() > 1):
                self._duck = query.empty_database()
                atexit.register(self.close)
            return self._duck

    def close(self) -> None:
        """Close the database, which DuckDB's library would else report at the program's end."""
        with self._lock:
            if self._duck is not None:
                self._duck.close()
            self._duck = None


PREPARED = PreparedDatabase()
CHANGED = "it was retried, repaired or removed while the query read its results"
AGAIN = "run the query again"
LEFT_OUT, SCHEMA, ROWS, FAILED, DONE = b"L", b"S", b"R", b"F", b"D"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotQuery:
    """A query over a snapshot.

    `ask` binds the query on a connection that has the views. `uses` is called on it before. Both are called in the
    child process, so that this process starts no threads. `changed` names the jobs that have lost files since the
    snapshot, and not by damage; it is called in this process where a file cannot be read.
    """

    taken: Snapshot
    ask: Callable[[duckdb.DuckDBPyConnection], duckdb.DuckDBPyRelation]
    uses: query.Uses
    bounds: Bounds
    sealed: bool = True
    wording: Wording | None = None
    named: tuple[NamedFile, ...] = ()
    changed: Callable[[], Set[str]] = frozenset


@contextmanager
def answered(
    question: SnapshotQuery,
    *,
    warn: Callable[[LeftOut], None],
    on_wait: Callable[[float | None], None] = lambda waited_s: None,
    spill_in: Path | None = None,
) -> Iterator[RowBatches]:
    """Compute an answer in a child process; yields its rows as they arrive.

    `warn` is called with the rows that the views in use leave out, `on_wait` as `child.working` says. Temporary
    files go to `spill_in`, by default the system's folder for them. Raises `QueryTooGreedy` where the query exceeds
    its bounds, `QueryError` for a mistake in it, and `StoreError` for damage met after the first rows.
    """
    bounds = question.bounds
    empty = PREPARED.for_next()
    with (
        scratch.place(spill_in) as spill,
        child.working(
            lambda send: compute(question, spill, send, empty),
            memory_bytes=bounds.memory_bytes,
            timeout_s=bounds.timeout_s,
            on_wait=on_wait,
        ) as frames,
    ):
        said = by_cause(checked(frames, bounds), question)
        start = begun(said, warn, question)
        schema, documents = msgspec.msgpack.decode(start, type=tuple[bytes, list[str]])
        batches = (batch for frame in said for batch in from_ipc(frame.payload))
        yield RowBatches(pa.ipc.read_schema(pa.py_buffer(schema)), frozenset(documents), batches)


def with_causes(left_out: list[LeftOut], question: SnapshotQuery) -> list[LeftOut]:
    """Rows that are left out, as those of jobs that have changed where that is why a file is not there."""
    changed = question.changed() if any(one.damaged for one in left_out) else ()
    return [
        replace(one, reason=CHANGED, fix=AGAIN) if one.damaged and one.job_id in changed else one
        for one in left_out
    ]


def by_cause(frames: Iterator[Frame], question: SnapshotQuery) -> Iterator[Frame]:
    """Yield frames; an error that names a file of a job that has changed is told as that, not as damage."""
    try:
        yield from frames
    except StoreError as error:
        for job_id in question.changed():
            if f"/{layout.JOBS}/{job_id}/" in str(error):
                raise StoreError(f"the answer is not whole: job {job_id}: {CHANGED}; {AGAIN}") from error
        raise


def begun(
    said: Iterator[Frame], warn: Callable[[LeftOut], None], question: SnapshotQuery
) -> bytes | bytearray:
    """Read frames up to the schema of the answer; warns of the left-out rows that come before it."""
    for frame in said:
        if frame.kind == SCHEMA:
            return frame.payload
        for left_out in with_causes(msgspec.json.decode(frame.payload, type=list[LeftOut]), question):
            warn(left_out)
    raise AssertionError("an answer without a schema")


def checked(frames: Iterator[Frame], bounds: Bounds) -> Iterator[Frame]:
    """Yield frames until the child is done; raises the error that it sent, or `QueryTooGreedy` if it just ended."""
    try:
        for frame in frames:
            if frame.kind == DONE:
                return
            if frame.kind == FAILED:
                raise failure(frame.payload)
            yield frame
        how = "early"
    except child.TookTooLong:
        raise QueryTooGreedy(
            f"the query took longer than {bounds.timeout_s:g} s and was ended; "
            "narrow it down, or give it more with --timeout"
        ) from None
    except child.Died as death:
        how = str(death)
    bound = "" if bounds.memory_bytes is None else f" (it may take {binary_size(bounds.memory_bytes)})"
    raise QueryTooGreedy(
        f"the query's process ended {how}, most likely for want of memory{bound}; "
        "narrow it down, or give it more with --memory"
    )


def compute(
    question: SnapshotQuery, spill: Path, send: Send, empty: duckdb.DuckDBPyConnection | None = None
) -> None:
    """Answer the query, in the child process; damaged files are left out of the next attempt.

    `empty` is a database that this process alone has.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's other pools map a gigabyte at a time
    attempt = QueryAttempts(question, spill, send, empty)
    try:
        while not attempt.answered():
            pass
    except BrokenPipeError:  # the parent reads no further
        return
    except BaseException as error:
        child.unbound_memory()
        send(FAILED, described(error, question))


class QueryAttempts:
    """Attempts to answer a query, each without the files that the one before found damaged.

    Where the query has a name that is unknown, another attempt has all views, for the names that may be meant.
    """

    def __init__(
        self, question: SnapshotQuery, spill: Path, send: Send, empty: duckdb.DuckDBPyConnection | None
    ) -> None:
        self._question, self._spill, self._send = question, spill, send
        self._empty = empty
        self._damaged: dict[FilePath, str] = {}
        self._said: set[LeftOut] = set()
        self._begun = self._every_view = False

    def answered(self) -> bool:
        """Send the answer; False if the next attempt can leave out the damaged files, or says more of a mistake."""
        question = self._question
        empty, self._empty = self._empty, None
        with query.opened(
            question.taken,
            spill=self._spill,
            sealed=question.sealed,
            wording=question.wording,
            bounds=question.bounds,
            named=question.named,
            damaged=self._damaged,
            uses=question.uses,
            every_view=self._every_view,
            empty=empty,
        ) as views:
            used = views.used
            self._warn(one for one in views.left_out if used is None or one.view in used)
            try:
                self._send_rows(rows_of(question.ask(views.duck)))
            except QueryError as error:
                if self._every_view or not isinstance(error.__cause__, duckdb.CatalogException):
                    raise
                self._every_view = True
                return False
            except PERHAPS_DAMAGE as error:
                if isinstance(error, (BLAMELESS, BrokenPipeError)):
                    raise
                files = [
                    path
                    for view, paths in views.files.items()
                    if used is None or view in used
                    for path in paths
                ]
                found = {
                    path: reason for path in files if (reason := readable.damage(path) or text_fault(path))
                }
                if not found:
                    raise
                if self._begun:
                    path, reason = next(iter(found.items()))
                    raise StoreError(f"{path} {reason}; {fix_of(reason, REPAIR)}") from error
                self._damaged |= found
                return False
            self._send(DONE, b"")  # the process ends here, without closing the database for milliseconds
        return True

    def _warn(self, left_out: Iterable[LeftOut]) -> None:
        new = [one for one in left_out if one not in self._said]
        self._said.update(new)
        self._send(LEFT_OUT, msgspec.json.encode(new))

    def _send_rows(self, rows: RowBatches) -> None:
        frames, held, held_bytes = map(to_ipc, rows.batches), list[bytes](), 0
        for frame in frames:
            held.append(frame)
            held_bytes += len(frame)
            if held_bytes > HELD_BYTES:
                break
        schema = rows.schema.serialize().to_pybytes()
        self._send(SCHEMA, msgspec.msgpack.encode((schema, sorted(rows.documents))))
        self._begun = True
        for frame in chain(held, frames):
            self._send(ROWS, frame)


def described(error: BaseException, question: SnapshotQuery) -> bytes:
    """Payload of a failure: class, message and parts of a `ConserveError`, or a traceback."""
    named = named_error(error, question)
    if named is not None:
        parts = {"cause": named.cause, "step": named.step, "joint": named.joint}
        return msgspec.json.encode([type(named).__name__, str(named), parts])
    import traceback

    return msgspec.json.encode([None, "".join(traceback.format_exception(error)), {}])


def named_error(error: BaseException, question: SnapshotQuery) -> ConserveError | None:
    """`ConserveError` for an error of DuckDB or Arrow; None for a bug of ConServe."""
    if isinstance(error, ConserveError):
        return error
    text = str(error)
    if "max_temp_directory_size" in text or "No space left on device" in text:
        disk = question.bounds.disk_bytes
        most = f" than {binary_size(disk)}" if disk is not None else ""
        return QueryTooGreedy(f"the query needs more temporary disk{most}; narrow it down, or set sql_disk")
    if isinstance(error, MemoryError | duckdb.OutOfMemoryException) or "Out of Memory" in text:
        more = f"more memory{of_memory(question.bounds)}"
        return QueryTooGreedy(f"the query needs {more}; narrow it down, or give it more with --memory")
    if isinstance(error, duckdb.Error):
        return mistakes.explained(error)
    streamed = isinstance(error, OSError | pa.ArrowException) and STREAMED.match(text)
    return mistakes.streamed(text) if streamed else None


def of_memory(bounds: Bounds) -> str:
    """The words " than 2 GiB"; empty where memory is not bounded."""
    return f" than {binary_size(bounds.memory_bytes)}" if bounds.memory_bytes is not None else ""


def failure(payload: bytes | bytearray) -> Exception:
    """Exception for a payload of `described`."""
    name, text, parts = msgspec.json.decode(payload, type=tuple[str | None, str, dict[str, str | None]])
    if name is None:
        return RuntimeError(text)
    error: ConserveError = getattr(errors, name)(text)
    vars(error).update(parts)
    return error


def to_ipc(batch: pa.RecordBatch) -> bytes:
    """Encode a batch as an IPC stream of its own, dictionaries included."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def from_ipc(data: bytes | bytearray) -> list[pa.RecordBatch]:
    """The inverse of `to_ipc`."""
    return list(pa.ipc.open_stream(pa.py_buffer(data)))
