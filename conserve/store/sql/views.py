"""The views `jobs`, `results` and `inputs` over a snapshot; a file that cannot be read is left out of its view."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict

import duckdb
import pyarrow as pa

from conserve.errors import first_line
from conserve.store.books import catalog, readings
from conserve.store.books.results import COLUMNS, DOCUMENTS
from conserve.store.books.shards import ShardFile
from conserve.store.files import digests
from conserve.store.files.objects import FilePath
from conserve.store.sql.input_columns import (
    FILE_ROW,
    RESULT_COLUMNS,
    InputColumns,
    casts,
    input_select,
    input_types,
    inputs_select,
    with_columns,
)
from conserve.store.sql.input_parts import InputPart, changed, is_in_folder_of, parts_of
from conserve.store.sql.quoting import parquet, quoted
from conserve.store.sql.readable import CHECK, REPAIR, LeftOut
from conserve.store.sql.snapshot import Snapshot
from conserve.store.sql.unsupported_values import SUBMIT_AGAIN, fix_of, time_fault
from conserve.store.upkeep.damage import Damage, StorePart

Fault = Callable[[FilePath], str | None]  # reason why a file cannot be read; None if it can
FIRST_COLUMNS = ("job_id", "position", *(name for name in COLUMNS if name != "engine"))
"""The columns that shards of every version have."""


def add_jobs(duck: duckdb.DuckDBPyConnection, taken: Snapshot) -> None:
    """Create the view `jobs`: one row a job, with its counters; its id is also `job_id`, as in the other views."""
    rows = [asdict(job) | {"state": job.state.value, "tags": list(job.tags.items())} for job in taken.jobs]
    kinds: dict[str, pa.DataType] = dict.fromkeys(
        ("id", "state", "error", "row_order", "model", "on_late", "failed_by"), pa.string()
    )
    kinds["tags"] = pa.map_(pa.string(), pa.string())
    kinds |= dict.fromkeys(("submitted_at", "started_at", "finished_at", "deadline"), pa.float64())
    fields = [(name, kinds.get(name, pa.int64())) for name in readings.JobReading.__slots__]
    duck.register("job_rows", pa.Table.from_pylist(rows, schema=pa.schema(fields)))
    duck.execute(
        "create table jobs as select * replace (to_timestamp(submitted_at) as submitted_at, "
        "to_timestamp(started_at) as started_at, to_timestamp(finished_at) as finished_at, "
        "to_timestamp(deadline) as deadline), id as job_id from job_rows"
    )
    duck.unregister("job_rows")


def add_results(
    duck: duckdb.DuckDBPyConnection, taken: Snapshot, fault: Fault
) -> tuple[list[FilePath], list[LeftOut]]:
    """Create the view `results`: one row a finished input row, from shards and journal together.

    Returns the shards that it reads, and the jobs with results that it cannot read.
    """
    duck.register("journal_arrow", taken.journal_rows)
    duck.execute("create table store.journal as select * from journal_arrow")
    duck.unregister("journal_arrow")
    files = {taken.data / shard.file: shard for shard in taken.shards}
    faults = {shard: reason for path, shard in files.items() if (reason := fault(path))}
    readable = [path for path, shard in files.items() if shard not in faults]
    try:
        create_results(duck, readable)
    except duckdb.Error:  # a file is not a shard: find out which
        readable, others = with_columns(duck, readable, FIRST_COLUMNS)
        faults |= {files[path]: reason for path, reason in others.items()}
        create_results(duck, readable)
    return readable, [
        *damaged_shards(faults),
        *damages(taken, "results", (StorePart.SHARD, StorePart.JOURNAL)),
    ]


def damages(taken: Snapshot, view: str, parts: Collection[StorePart]) -> list[LeftOut]:
    """Rows that a view leaves out for the snapshot's damages; one entry a job, naming its first damaged file."""
    by_job: dict[str, list[Damage]] = defaultdict(list)
    for damage in taken.damages:
        if damage.part in parts and damage.job_id is not None:
            by_job[damage.job_id].append(damage)
    return [
        LeftOut(
            view=view, job_id=job_id, reason=f"{first.file} {first.what}{and_more(others)}", fix=first.fix
        )
        for job_id, (first, *others) in by_job.items()
    ]


def and_more(others: Sequence[object]) -> str:
    """The end of a sentence that names the first of several files."""
    return f", and {len(others)} more of its files" if others else ""


def create_results(duck: duckdb.DuckDBPyConnection, shards: Sequence[FilePath]) -> None:
    """Create the view `results` over the journal and these shards."""
    parts = ["select * from store.journal"]
    if shards:
        parts.append(f"select * from {parquet(shards, 'union_by_name = true')}")
    documents = ", ".join(f"{column}::json as {column}" for column in DOCUMENTS)
    duck.execute(
        f"create view results as select * exclude (position) replace ({documents}) "
        f"from ({' union all by name '.join(parts)})"  # older shards lack newer columns
    )
    assert columns_of(duck, "results") == list(RESULT_COLUMNS)


def damaged_shards(faults: dict[ShardFile, str]) -> list[LeftOut]:
    """Rows that the view `results` leaves out: one entry a job, which names its first damaged shard."""
    by_job: dict[str, list[str]] = defaultdict(list)
    for shard, reason in faults.items():
        by_job[shard.job_id].append(f"{shard.file} {reason}")
    return [
        LeftOut(view="results", job_id=job_id, reason=first + and_more(others), fix=REPAIR)
        for job_id, (first, *others) in by_job.items()
    ]


def readable_inputs(taken: Snapshot, fault: Fault) -> tuple[dict[str, list[InputPart]], list[LeftOut]]:
    """Files with each job's input rows. A job with a file that is gone, damaged or changed is left out."""
    readable: dict[str, list[InputPart]] = {}
    left_out = damages(taken, "inputs", (StorePart.INPUTS,))
    damaged = {gap.job_id for gap in left_out}
    with digests.memory(taken.home, now=taken.now) as known:
        for job in taken.catalog:
            if job.id in damaged:
                continue
            parts = parts_of(taken.data, job.id, job.source)
            if reason := changed(job.source, parts, known) or input_fault(job.source, parts, fault):
                fix = CHECK if job.source.copied else "put back the file that was submitted, to join it"
                fix = fix_of(reason, fix)
                left_out.append(LeftOut(view="inputs", job_id=job.id, reason=reason, fix=fix))
            else:
                readable[job.id] = parts
    return readable, left_out


def input_fault(source: catalog.Source, parts: Sequence[InputPart], fault: Fault) -> str | None:
    """Reason why input files cannot be read; None if they can."""
    for part in parts:
        if reason := fault(part.path):
            which = f"the copy of its input, {part.path.name}," if source.copied else f"its input {part.path}"
            return f"{which} {reason}"
    return None


def add_inputs(duck: duckdb.DuckDBPyConnection, readable: dict[str, list[InputPart]]) -> list[LeftOut]:
    """Create the view `inputs`: job_id, row_index, and by name the columns of the input files of all jobs.

    A job with a file that DuckDB cannot read, or with a time that it cannot hold, is left out.
    """
    columns: dict[str, InputColumns] = {}
    left_out = []
    for job_id, parts in readable.items():
        try:
            found = input_types(duck, parts)
        except duckdb.Error as error:
            reason = f"its input {parts[0].path} cannot be read ({first_line(error)})"
            left_out.append(LeftOut(view="inputs", job_id=job_id, reason=reason, fix=CHECK))
            continue
        if odd := odd_time(parts, found.types):
            left_out.append(LeftOut(view="inputs", job_id=job_id, reason=odd, fix=SUBMIT_AGAIN))
        else:
            columns[job_id] = found
    types = {job_id: found.types for job_id, found in columns.items()}
    wanted = casts(list(types.values()))
    selects = []
    for job_ids in alike(types, readable):
        first = job_ids[0]
        if len(job_ids) > 1:  # a union of thousands takes minutes to bind
            paths = [readable[job_id][0].path for job_id in job_ids]
            selects.append(inputs_select(paths, types[first], wanted))
        else:
            selects.append(input_select(first, readable[first], columns[first], wanted))
    nothing = "select null::varchar as job_id, null::bigint as row_index where false"
    duck.execute(f"create view inputs as {' union all by name '.join(selects) or nothing}")
    return left_out


def alike(
    types: Mapping[str, Mapping[str, str]], readable: Mapping[str, Sequence[InputPart]]
) -> Iterable[list[str]]:
    """Jobs whose inputs can be read in one scan: of one copied file each, with the same columns and types."""
    groups: dict[object, list[str]] = {}
    for job_id, kinds in types.items():
        plain = is_in_folder_of(job_id, readable[job_id]) and FILE_ROW not in map(str.lower, kinds)
        groups.setdefault(tuple(kinds.items()) if plain else job_id, []).append(job_id)
    return groups.values()


def odd_time(parts: Sequence[InputPart], kinds: Mapping[str, str]) -> str | None:
    """First part of an input that has a time that DuckDB cannot hold, as a reason; None if there is none."""
    if not any("TIME" in kind for kind in kinds.values()):
        return None
    for part in parts:
        if fault := time_fault(part.path):
            return f"its input {part.path} {fault}"
    return None


def columns_of(duck: duckdb.DuckDBPyConnection, view: str) -> list[str]:
    """The column names of a view."""
    return [row[0] for row in duck.execute(f"describe {quoted(view)}").fetchall()]
