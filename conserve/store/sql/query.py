"""SQL over a store: DuckDB views of jobs and of evaluations, sealed off from everything else."""

import contextlib
import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb

from conserve.errors import QueryError
from conserve.store.database.store import Store
from conserve.store.files.objects import FilePath, ObjectPath
from conserve.store.sql import eval_views, readable, scratch
from conserve.store.sql.bounds import Bounds
from conserve.store.sql.input_parts import InputPart
from conserve.store.sql.mistakes import ONLY_SELECT, VIEWS, explained, views_in
from conserve.store.sql.named_files import NamedFile, add_named
from conserve.store.sql.quoting import literal
from conserve.store.sql.read_only import names_writing, only_reads
from conserve.store.sql.readable import LeftOut
from conserve.store.sql.requests_view import Wording, add_requests
from conserve.store.sql.snapshot import Snapshot, snapshot
from conserve.store.sql.views import add_inputs, add_jobs, add_results, readable_inputs

SETTINGS: dict[str, Any] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_persistent_secrets": False,  # they would be read from the user's home folder
    "python_enable_replacements": False,  # a table name must never reach for a Python variable
    "preserve_insertion_order": True,
}

ASYNC_THREADS = "async_threads"  # for files of object stores
UTC = "set timezone = 'UTC'"
BEGINNING = f"{UTC}; create schema store"  # of every connection that gets views

LOOKS_AROUND = re.compile(
    r"\b(describe|duckdb_\w+|information_schema|pg_\w+|pragma\w*|query|query_table|show|sqlite_\w+)\b", re.I
)
"""Words of queries that may ask for the columns of a view without its name."""
DESCRIBES_ONE = re.compile(rf'\b(?:describe|show)\s+("?)(?:{"|".join(VIEWS)}|select)\b\1', re.I)
"""Words that ask for the columns of the view that follows, or of a query."""

NONE: Mapping[FilePath, str] = MappingProxyType({})

TROUBLE = (duckdb.IOException, duckdb.OutOfMemoryException, duckdb.InterruptException)
"""DuckDB's errors that say nothing about a file: the same question may be answered later."""


@dataclass(frozen=True, slots=True)
class Views:
    """An open DuckDB connection with the views, and the rows that they leave out."""

    duck: duckdb.DuckDBPyConnection
    left_out: list[LeftOut]
    files: dict[str, list[FilePath]]  # that each view reads
    used: Set[str] | None  # views that the query reads; None if that is unknown


Uses = Callable[[duckdb.DuckDBPyConnection], Set[str] | None]
"""Views that a query reads, None if that is unknown; called on a connection that has no views yet."""


@contextmanager
def views(
    store: Store,
    *,
    now: float,
    only: Sequence[str] | None = None,
    sealed: bool = True,
    wording: Wording | None = None,
    uses: Uses = lambda empty: None,
    compared: Set[str] | None = None,
) -> Iterator[Views]:
    """Open the views over the store as it is now; `sealed` shuts off everything else.

    Files of the views in `compared` are compared with their digests, and those of all views if it is None.
    """
    taken = snapshot(store, now=now, only=only, used=compared)
    with (
        scratch.place() as spill,
        opened(taken, spill=spill, sealed=sealed, wording=wording, uses=uses) as found,
    ):
        yield found


@contextmanager
def opened(
    taken: Snapshot,
    *,
    spill: Path,
    sealed: bool = True,
    wording: Wording | None = None,
    bounds: Bounds | None = None,
    named: Sequence[NamedFile] = (),
    damaged: Mapping[FilePath, str] = NONE,
    uses: Uses = lambda empty: None,
    every_view: bool = False,
    empty: duckdb.DuckDBPyConnection | None = None,
) -> Iterator[Views]:
    """Open the views over a snapshot; data beyond memory is written to the folder `spill`.

    Files that cannot be opened or are known to be `damaged` are left out. Views that the query does not use are
    not made, which saves half of the time of a short query. With `every_view` they are, without rows, since
    DuckDB's errors name those that a query may mean: to have rows, each of their files would be opened.
    `empty` is a connection of `empty_database` to make them on; without it a new one is opened.
    """

    def fault(path: FilePath) -> str | None:
        return damaged.get(path) or readable.fault(path)

    with duckdb.connect(":memory:", config=SETTINGS) if empty is None else empty as duck:
        used = uses(duck)
        begin(duck, spill, bounds, inherited=empty is not None)
        if isinstance(taken.data, ObjectPath):
            from conserve.store.sql.object_reader import add_objects

            shards_there = [taken.data / file.file for file in for_view(taken, "results", used).shards]
            add_objects(duck, taken.data.bucket, shards_there)
        made = set(VIEWS) if every_view or used is None else used
        shards, inputs = list[FilePath](), dict[str, list[InputPart]]()
        requests, items, left_out = list[FilePath](), list[Path](), list[LeftOut]()
        if "jobs" in made:
            add_jobs(duck, taken)
        if "results" in made:
            shards, no_results = add_results(duck, for_view(taken, "results", used), fault)
            left_out += no_results
        if "inputs" in made:
            inputs, no_inputs = readable_inputs(for_view(taken, "inputs", used), fault)
            left_out += no_inputs + add_inputs(duck, inputs)
        if "requests" in made:
            requests, no_requests = add_requests(duck, for_view(taken, "requests", used), wording, fault)
            left_out += no_requests
        if not made.isdisjoint(eval_views.VIEWS):
            items = eval_views.add_evals(duck, taken.home, fault)
        files = add_named(duck, named, VIEWS)
        input_files = [part.path for parts in inputs.values() for part in parts]
        if sealed:
            seal(duck, [*shards, *input_files, *requests, *items, *files])
        read: dict[str, list[FilePath]] = {
            "results": shards,
            "inputs": input_files,
            "requests": requests,
            "eval_items": [*items],
        }
        yield Views(duck, left_out, read, used)


def begin(duck: duckdb.DuckDBPyConnection, spill: Path, bounds: Bounds | None, *, inherited: bool) -> None:
    """Set what a connection needs before it gets views."""
    places = {"temp_directory": spill, "extension_directory": spill / "extensions"}
    settings = places | (bounds.settings() if bounds else {})
    setting = [f"set {name} = {literal(str(value))}" for name, value in settings.items()]
    first = f"reset threads; reset {ASYNC_THREADS}; {BEGINNING}" if inherited else BEGINNING
    duck.execute("; ".join([first, *setting]))


def empty_database() -> duckdb.DuckDBPyConnection | None:
    """Open a database that processes forked off this one may go on with; None where this DuckDB has none.

    It has no threads, which a fork would lose. A statement has run on it, by the first of which DuckDB makes the
    grammar and the time zones that all databases of a process share.
    """
    with contextlib.suppress(duckdb.Error):  # older ones have no such setting
        duck = duckdb.connect(":memory:", config={**SETTINGS, "threads": 1, ASYNC_THREADS: 0})
        return duck.execute(UTC)
    return None


def for_view(taken: Snapshot, view: str, used: Set[str] | None) -> Snapshot:
    """Snapshot for one view: without files if the view is not used."""
    if used is None or view in used:
        return taken
    return replace(taken, catalog=[], shards=[])


def seal(duck: duckdb.DuckDBPyConnection, files: Sequence[FilePath]) -> None:
    """Restrict the connection to these files for good: no other files, databases, extensions or settings."""
    both_spellings = ", ".join(f"{literal(str(path))}, {literal(glob.escape(str(path)))}" for path in files)
    duck.execute(
        f"set allowed_paths = [{both_spellings}]; set enable_external_access = false; "
        "set lock_configuration = true"
    )


def ask(duck: duckdb.DuckDBPyConnection, sql: str, *, limit: int | None = None) -> duckdb.DuckDBPyRelation:
    """Bind one SELECT; raises `QueryError` for anything else, since a COPY could write where a view may read."""
    if not is_utf8(sql):
        raise QueryError("the query is not UTF-8; write it again in UTF-8")
    try:
        statements = duck.extract_statements(sql)
        if not statements:
            raise QueryError('there is no SQL; try: conserve sql "select * from jobs"')
        if len(statements) > 1:
            raise QueryError("one statement at a time, please")
        found = duck.sql(select_of(duck, statements[0]))
        return found if limit is None else found.limit(limit)
    except duckdb.Error as error:
        raise explained(error, sql) from error


def select_of(duck: duckdb.DuckDBPyConnection, statement: duckdb.Statement) -> str:
    """SQL of a statement that only reads; raises `QueryError` for any other.

    DuckDB splits a PIVOT into several statements, and also a COPY that contains one. So a statement that it splits
    must parse as a subquery too.
    """
    text = str(statement.query).strip().rstrip(";")
    kind = kind_of(statement)
    if kind == "SELECT" and only_reads(duck, text):
        return text
    if kind == "MULTI" and not names_writing(text):
        with contextlib.suppress(duckdb.ParserException):
            wrapped = f"from (\n{text}\n)"
            if len(duckdb.extract_statements(wrapped)) == 1:
                return wrapped  # in a subquery DuckDB binds no WITH clause that writes
    raise QueryError(ONLY_SELECT)


def kind_of(statement: duckdb.Statement) -> str:
    """Kind of a statement, as "SELECT"; empty where DuckDB's Python has no name for it."""
    try:
        return str(statement.type.name)
    except ValueError:
        return ""


def views_of(empty: duckdb.DuckDBPyConnection, sql: str) -> set[str] | None:
    """Views that a query may read: those that it names anywhere. None if that is unknown: it may read all."""
    if (named := views_named(sql)) is None:
        return None
    try:
        empty.extract_statements(sql)
    except duckdb.Error:
        return None
    return named


def views_named(sql: str) -> set[str] | None:
    """Views that a query may read if it can be parsed, which no database is needed for. None for all."""
    if not is_utf8(sql) or LOOKS_AROUND.search(DESCRIBES_ONE.sub("", sql)):
        return None
    named = set(views_in(sql))
    return named | ({"results"} if "requests" in named else set())


def is_utf8(sql: str) -> bool:
    """False for text of the command line with bytes that are not UTF-8, which DuckDB takes as no text at all."""
    try:
        sql.encode()
    except UnicodeEncodeError:
        return False
    return True
