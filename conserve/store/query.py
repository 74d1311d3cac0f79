"""SQL over a store: DuckDB views `jobs`, `results` and `inputs`, in a sandbox that can reach nothing else."""

import glob
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
from sqlalchemy import select, text

from conserve.errors import QueryError
from conserve.store import catalog, readings, schema, shards
from conserve.store.damage import Damage, Part, damaged_rows, unreadable
from conserve.store.input_parts import InputPart, fault, parts_of, relation
from conserve.store.journal import is_whole
from conserve.store.results import arrow_schema, decode, to_arrow
from conserve.store.shards import ShardFile
from conserve.store.store import Store

journal = schema.journal

SETTINGS = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # a table name must never reach for a Python variable
    "preserve_insertion_order": True,
}

ROW = ("job_id", "row_index")  # what names a row in the views `results` and `inputs`

NUMBERS = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "FLOAT", "DOUBLE"}

REACH = "conserve sql reads the views jobs, results and inputs and nothing else"


class Duplicate(NamedTuple):
    """A value that occurs more than once."""

    value: str
    times: int


def first_duplicate(path: Path, column: str) -> Duplicate | None:
    """Some value that occurs more than once in a Parquet column, if any does; spills to disk if it must."""
    with duckdb.connect(":memory:") as duck:
        row = duck.execute(
            f"select {quoted(column)}, count(*) from read_parquet(?) "
            f"where {quoted(column)} is not null group by 1 having count(*) > 1 limit 1",
            [str(path)],
        ).fetchone()
    return Duplicate(*row) if row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the store held at one moment; shards are immutable, so their names are enough."""

    jobs: list[readings.JobReading]
    catalog: list[catalog.Job]
    shards: list[ShardFile]
    journal_rows: pa.Table
    damages: list[Damage]
    """What cannot be read of results and copied inputs; it is left out."""


def snapshot(store: Store, *, now: float, only: Sequence[str] | None = None) -> Snapshot:
    """Read jobs, shard names and journal in one transaction, so that no row is missed or seen twice."""
    with store.read() as tx:
        jobs = [readings.to_reading(tuple(row)) for row in tx.execute(text(readings.JOBS), {"now": now})]
        entries = catalog.everything(tx)
        wanted = [job.id for job in jobs if only is None or job.id in only]
        found = shards.files(tx, wanted)
        rows = tx.execute(select(journal).where(journal.c.job_id.in_(wanted))).all()
    ours = [entry for entry in entries if entry.id in wanted]
    damages = unreadable(store.home, ours, found, now=now, parts=[Part.SHARD, Part.INPUTS])
    lost = {damage.file for damage in damages}
    return Snapshot(
        jobs=[job for job in jobs if job.id in wanted],
        catalog=ours,
        shards=[file for file in found if file.file not in lost],
        journal_rows=journal_table([row for row in rows if is_whole(row)]),
        damages=[*damages, *damaged_rows(rows)],
    )


def journal_table(rows: Sequence[Any]) -> pa.Table:
    """Rows of the journal as a table; compaction keeps it short."""
    return to_arrow([r.job_id for r in rows], [r.position for r in rows], [decode(r.payload) for r in rows])


class LeftOut(NamedTuple):
    """A job whose input rows cannot be shown, and why."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Views:
    """An open DuckDB with the views in place."""

    duck: duckdb.DuckDBPyConnection
    left_out: list[LeftOut]
    damages: list[Damage]
    """Results that are left out since they are not what was written."""


@contextmanager
def views(
    store: Store, *, now: float, only: Sequence[str] | None = None, sealed: bool = True
) -> Iterator[Views]:
    """Open the views over the store as it is now; `sealed` locks everything else away."""
    taken = snapshot(store, now=now, only=only)
    with (
        tempfile.TemporaryDirectory(prefix="conserve-sql-") as scratch,
        duckdb.connect(":memory:", config={**SETTINGS, "temp_directory": scratch}) as duck,
    ):
        duck.execute("set timezone = 'UTC'")
        add_jobs(duck, taken)
        files = [store.home / shard.file for shard in taken.shards]
        add_results(duck, taken, files)
        readable, left_out = readable_inputs(store, taken)
        add_inputs(duck, readable)
        if sealed:
            inputs = [part.path for parts in readable.values() for part in parts]
            seal(duck, [*files, *inputs])
        yield Views(duck, left_out, [each for each in taken.damages if each.part is not Part.INPUTS])


def add_jobs(duck: duckdb.DuckDBPyConnection, taken: Snapshot) -> None:
    """The view `jobs`: one row a job, with its counters."""
    rows = [asdict(job) | {"state": job.state.value, "tags": list(job.tags.items())} for job in taken.jobs]
    kinds: dict[str, pa.DataType] = dict.fromkeys(("id", "state", "error", "row_order", "model"), pa.string())
    kinds["tags"] = pa.map_(pa.string(), pa.string())
    kinds |= dict.fromkeys(("submitted_at", "started_at", "finished_at"), pa.float64())
    fields = [(name, kinds.get(name, pa.int64())) for name in readings.JobReading.__slots__]
    duck.register("job_rows", pa.Table.from_pylist(rows, schema=pa.schema(fields)))
    duck.execute(
        "create table jobs as select * replace (to_timestamp(submitted_at) as submitted_at, "
        "to_timestamp(started_at) as started_at, to_timestamp(finished_at) as finished_at) from job_rows"
    )
    duck.unregister("job_rows")


def add_results(duck: duckdb.DuckDBPyConnection, taken: Snapshot, files: Sequence[Path]) -> None:
    """The view `results`: one row a finished input row, from shards and journal together."""
    duck.register("journal_arrow", taken.journal_rows)
    duck.execute("create schema store; create table store.journal as select * from journal_arrow")
    duck.unregister("journal_arrow")
    parts = ["select * from store.journal"]
    if files:
        parts.append(f"select * from read_parquet({literals(files)}, union_by_name = true)")
    documents = ", ".join(f"{name}::json as {name}" for name in ("json", "choices", "logprobs"))
    duck.execute(
        f"create view results as select * exclude (position) replace ({documents}) "
        f"from ({' union all by name '.join(parts)})"  # older shards lack newer columns
    )
    assert [name for name in arrow_schema().names if name != "position"] == columns_of(duck, "results")


def readable_inputs(store: Store, taken: Snapshot) -> tuple[dict[str, list[InputPart]], list[LeftOut]]:
    """The files with each job's input rows; jobs of which one is gone, damaged or has changed are left out."""
    readable: dict[str, list[InputPart]] = {}
    damaged = {damage.job_id: damage for damage in taken.damages if damage.part is Part.INPUTS}
    left_out = [LeftOut(str(job_id), f"{d.file} {d.what}; {d.fix}") for job_id, d in damaged.items()]
    for job in taken.catalog:
        if job.id in damaged:
            continue
        parts = parts_of(store.home, job.id, job.source)
        if reason := fault(job.source, parts):
            left_out.append(LeftOut(job.id, reason))
        else:
            readable[job.id] = parts
    return readable, left_out


def add_inputs(duck: duckdb.DuckDBPyConnection, readable: dict[str, list[InputPart]]) -> None:
    """The view `inputs`: job_id, row_index, and the columns of the input files of all jobs by name."""
    if not readable:
        duck.execute(
            "create view inputs as select null::varchar as job_id, null::bigint as row_index where false"
        )
        return
    types = {job_id: column_types(duck, parts) for job_id, parts in readable.items()}
    as_text = disagreeing(list(types.values()))
    selects = (input_select(job_id, parts, types[job_id], as_text) for job_id, parts in readable.items())
    duck.execute(f"create view inputs as {' union all by name '.join(selects)}")


def table_of(parts: Sequence[InputPart]) -> str:
    """The SQL table of an input's columns and `file_row_number`."""
    return relation(parts, literals([part.path for part in parts]))


def column_types(duck: duckdb.DuckDBPyConnection, parts: Sequence[InputPart]) -> dict[str, str]:
    """The columns of an input and their SQL types."""
    described = duck.execute(f"describe select * from {table_of(parts)}").fetchall()
    return {name: kind for name, kind, *_ in described[:-1]}  # the last is file_row_number


def disagreeing(files: Sequence[dict[str, str]]) -> set[str]:
    """Names of columns that have no common type across the files; numbers agree with numbers."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for types in files:
        for name, kind in types.items():
            kinds[name].add(kind)
    return {name for name, found in kinds.items() if len(found) > 1 and not found <= NUMBERS}


def input_select(job_id: str, parts: Sequence[InputPart], types: dict[str, str], as_text: set[str]) -> str:
    """One job's input rows; a column of the user's that is called like one of ours gets a prefix."""
    chosen = [f"{literal(job_id)} as job_id", "file_row_number as row_index"]
    for name, alias in prefixed(list(types), ROW).items():
        cast = "::varchar" if name in as_text else ""
        chosen.append(f"{quoted(name)}{cast} as {quoted(alias)}")
    return f"select {', '.join(chosen)} from {table_of(parts)}"


def prefixed(names: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Names for columns beside those taken: `input_` goes in front as often as it must."""
    clashing = {name.lower() for name in taken}  # to SQL, `Text` is `text`
    occupied = clashing | {name.lower() for name in names}
    aliases = {name: name for name in names}
    for name in names:
        if name.lower() in clashing:
            while aliases[name].lower() in occupied:
                aliases[name] = f"input_{aliases[name]}"
            occupied.add(aliases[name].lower())
    return aliases


def seal(duck: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> None:
    """Shut everything but these files away, for good: files, databases, extensions, settings."""
    both_spellings = ", ".join(f"{literal(str(path))}, {literal(glob.escape(str(path)))}" for path in files)
    duck.execute(f"set allowed_paths = [{both_spellings}]")
    duck.execute("set enable_external_access = false")
    duck.execute("set lock_configuration = true")


def ask(duck: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    """Run one SELECT; everything else is refused, since a COPY could write where a view may read."""
    try:
        statements = duck.extract_statements(sql)
        if not statements:
            raise QueryError('there is no SQL; try: conserve sql "select * from jobs"')
        if len(statements) > 1:
            raise QueryError("one statement at a time, please")
        if statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError(f"{REACH}: only SELECT is possible")
        return duck.sql(statements[0].query)
    except duckdb.PermissionException as error:
        raise QueryError(f"{REACH}: no other files, databases or settings") from error
    except duckdb.CatalogException as error:
        raise QueryError(f"{REACH}: {explain(error)}") from error
    except duckdb.Error as error:
        raise QueryError(explain(error)) from error


def explain(error: duckdb.Error) -> str:
    """DuckDB's message in one line, with what to look at next."""
    message = " ".join(line.strip() for line in str(error).splitlines() if line.strip() and "^" not in line)
    return f'{message}; the columns are shown by: conserve sql "describe results"'


def columns_of(duck: duckdb.DuckDBPyConnection, view: str) -> list[str]:
    """The column names of a view."""
    return [row[0] for row in duck.execute(f"describe {view}").fetchall()]


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """An SQL string."""
    return "'" + value.replace("'", "''") + "'"


def literals(paths: Sequence[Path]) -> str:
    """A list of files in SQL; characters in their names that a glob would read stand for themselves."""
    return "[" + ", ".join(literal(glob.escape(str(path))) for path in paths) + "]"
