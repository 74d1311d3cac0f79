"""The views `eval_runs`, `eval_scores` and `eval_items` over the files of evaluations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from conserve.store.files import nights
from conserve.store.sql.input_columns import with_columns
from conserve.store.sql.quoting import parquet
from conserve.store.sql.views import Fault

VIEWS = ("eval_runs", "eval_scores", "eval_items")

TEXTS = pa.map_(pa.string(), pa.string())
RUNS = pa.schema(
    [
        ("run_id", pa.string()), ("evaluation", pa.string()), ("names", pa.list_(pa.string())),
        ("state", pa.string()), ("error", pa.string()), ("began_at", pa.float64()), ("ended_at", pa.float64()),
        ("work_s", pa.float64()), ("prompt_tokens", pa.int64()), ("answer_tokens", pa.int64()),
    ]
)  # fmt: skip
SCORES = pa.schema(
    [
        ("run_id", pa.string()), ("suite", pa.string()), ("metric", pa.string()), ("score", pa.float64()),
        ("low", pa.float64()), ("high", pa.float64()), ("items", pa.int64()), ("failed", pa.int64()),
        ("lower_is_better", pa.bool_()), ("facts", TEXTS),
    ]
)  # fmt: skip
ITEMS = pa.schema(
    [
        ("suite", pa.string()), ("item", pa.string()), ("epoch", pa.int64()), ("source", pa.string()),
        ("prompt", pa.string()), ("answer", pa.string()), ("expected", pa.string()), ("error", pa.string()),
        ("prompt_tokens", pa.int64()), ("answer_tokens", pa.int64()),
        ("scores", pa.map_(pa.string(), pa.float64())),
    ]
)  # fmt: skip
"""Columns of a file of items."""

FLIPS = """
    create view eval_items as
    with scored as (
        select file_run.run_id, run.evaluation, run.began_at, i.* exclude (filename, scores),
               score.key as metric, score.value as score
        from ({items}) i
        join store.eval_files file_run on file_run.filename = i.filename
        join eval_runs run on run.run_id = file_run.run_id
        left join unnest(map_entries(i.scores)) as entries(score) on true
    ), paired as (
        select *, lag(run_id) over same as before_run, lag(answer) over same as before_answer,
               lag(score) over same as before_score
        from scored
        window same as (partition by evaluation, suite, item, epoch, metric order by began_at, run_id)
    )
    select * exclude (evaluation, began_at),
           case when score < before_score then 'fell' when score > before_score then 'rose' end as flip
    from paired
"""
"""One row an item and metric, beside the same item of the evaluation's run before.

An item without a score has one row, without a metric.
"""


def add_evals(duck: duckdb.DuckDBPyConnection, home: Path, fault: Fault) -> list[Path]:
    """Create the views; returns the files of items that they read."""
    records = list(nights.records(home))
    marks = nights.names(home)
    add_table(duck, "eval_runs", [run_row(home, record, marks) for record in records], RUNS)
    add_table(duck, "eval_scores", [row for record in records for row in score_rows(record)], SCORES)
    runs = {path: str(record["id"]) for record in records for path in item_files(home, record)}
    whole, _ = with_columns(duck, [path for path in runs if not fault(path)], ITEMS.names)
    files = {path: runs[path] for path in whole}
    rows = [{"filename": str(path), "run_id": run_id} for path, run_id in files.items()]
    add_table(duck, "store.eval_files", rows, pa.schema([("filename", pa.string()), ("run_id", pa.string())]))
    duck.execute(FLIPS.format(items=items_select(duck, list(files))))
    return list(files)


def item_files(home: Path, record: Mapping[str, Any]) -> list[Path]:
    """Files of items of a run."""
    folder = nights.folder_of(home, str(record["id"]))
    return [folder / str(suite["file"]) for suite in record.get("suites", ()) if suite.get("file")]


def items_select(duck: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> str:
    """SELECT of all items with the file of each."""
    if files:
        return f"select * from {parquet(files, 'filename = true')}"
    duck.register("no_items", ITEMS.empty_table())
    duck.execute("create table store.no_items as from no_items")
    duck.unregister("no_items")
    return "select *, null::varchar as filename from store.no_items"


def run_row(home: Path, record: Mapping[str, Any], marks: Mapping[str, list[str]]) -> dict[str, Any]:
    """Row of `eval_runs`."""
    suites = record.get("suites", ())
    sums = {
        name: sum(suite.get(name) or 0 for suite in suites) for name in ("prompt_tokens", "answer_tokens")
    }
    given = sorted(marks.get(record["id"], ()))
    state = nights.state_of(home, str(record.get("state")), str(record.get("evaluation")))
    return {**record, "run_id": record["id"], "state": state, "names": given, **sums}


def score_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `eval_scores`."""
    return [
        {
            **score,
            "run_id": record["id"],
            "suite": suite["name"],
            "score": score["mean"],
            "failed": suite.get("failed"),
            "facts": list(suite.get("facts", {}).items()),
        }
        for suite in record.get("suites", ())
        for score in suite.get("scores", ())
    ]


def add_table(
    duck: duckdb.DuckDBPyConnection, name: str, rows: Sequence[Mapping[str, Any]], schema: pa.Schema
) -> None:
    """Create a table of these rows; its times, in s since 1970, become timestamps."""
    duck.register("rows_arrow", pa.Table.from_pylist([dict(row) for row in rows], schema=schema))
    times = ", ".join(f"to_timestamp({one}) as {one}" for one in schema.names if one.endswith("_at"))
    replaced = f" replace ({times})" if times else ""
    duck.execute(f"create table {name} as select *{replaced} from rows_arrow")
    duck.unregister("rows_arrow")
