"""Evaluations in SQL: the views `eval_runs`, `eval_scores` and `eval_items` over runs' files."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conserve.evals.verdict import scoreless
from conserve.store.database.store import Store
from conserve.store.files import nights
from conserve.store.sql import query
from conserve.store.sql.batches import rows_of
from conserve.store.sql.eval_views import ITEMS, VIEWS
from conserve.store.sql.query import views
from conserve.store.sql.snapshot import snapshot

DAY_S = 86_400.0


def keep(store: Store, run_id: str, *, evaluation: str = "small", day: int = 0, **more: Any) -> None:
    """Keep the record of a run."""
    began_at = DAY_S * day
    record = {"id": run_id, "evaluation": evaluation, "state": "finished", "began_at": began_at, **more}
    path = nights.folder_of(store.home, run_id) / nights.RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def items(store: Store, run_id: str, scores: dict[str, dict[str, float]], *, suite: str = "qa") -> Path:
    """Write the items of a suite, each with its scores by metric."""
    rows = [
        {
            "suite": suite,
            "item": item,
            "epoch": 0,
            "answer": f"{item} of {run_id}",
            "scores": list(by.items()),
        }
        for item, by in scores.items()
    ]
    path = nights.folder_of(store.home, run_id) / f"items-{suite}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ITEMS), path)
    return path


def rows(store: Store, sql: str) -> list[tuple[Any, ...]]:
    with views(store, now=0.0) as opened:
        return list(rows_of(opened.duck.sql(sql)).tuples())


def test_a_run_is_a_row_with_its_names_times_and_tokens(store: Store) -> None:
    suites = [
        {"name": "qa", "prompt_tokens": 5, "answer_tokens": 2},
        {"name": "other", "prompt_tokens": None, "answer_tokens": 3},
        {"name": "third"},
    ]
    keep(store, "small-1", day=1, suites=suites, ended_at=DAY_S + 60, work_s=2.5, error="none")
    keep(store, "small-0", day=0)
    nights.names_file(store.home).write_text(json.dumps({"small-1": ["z", "a"], "small-9": ["gone"]}))
    at, end = datetime(1970, 1, 2, tzinfo=UTC), datetime(1970, 1, 2, 0, 1, tzinfo=UTC)
    columns = "* replace (epoch(began_at) as began_at, epoch(ended_at) as ended_at)"
    assert rows(store, f"select {columns} from eval_runs order by run_id") == [
        ("small-0", "small", [], "finished", None, 0.0, None, None, 0, 0),
        ("small-1", "small", ["a", "z"], "finished", "none", at.timestamp(), end.timestamp(), 2.5, 5, 5),
    ]
    (kinds,) = rows(store, "select typeof(began_at), typeof(ended_at) from eval_runs limit 1")
    assert kinds == ("TIMESTAMP WITH TIME ZONE",) * 2


def test_a_score_is_a_row_with_its_suite_and_facts(store: Store) -> None:
    score = {"metric": "exact", "mean": 0.5, "low": 0.4, "high": 0.6, "items": 10, "lower_is_better": False}
    suite = {"name": "qa", "failed": 2, "facts": {"seed": "0"}, "scores": [score, {**score, "metric": "f1"}]}
    keep(store, "small-0", suites=[suite, {"name": "none"}, {"name": "bare", "scores": [score]}])
    assert rows(store, "select * exclude (facts), facts['seed'] from eval_scores order by suite, metric") == [
        ("small-0", "bare", "exact", 0.5, 0.4, 0.6, 10, None, False, None),
        ("small-0", "qa", "exact", 0.5, 0.4, 0.6, 10, 2, False, "0"),
        ("small-0", "qa", "f1", 0.5, 0.4, 0.6, 10, 2, False, "0"),
    ]


def with_items(store: Store, run_id: str, scores: dict[str, dict[str, float]], **more: Any) -> None:
    """Keep a run of one suite with these items."""
    path = items(store, run_id, scores)
    keep(store, run_id, suites=[{"name": "qa", "file": path.name}, {"name": "none"}], **more)


FLIPS = "select run_id, item, metric, score, before_run, before_answer, before_score, flip from eval_items"


def test_items_that_lost_one_of_several_scores_are_found_by_the_query_that_a_doubt_names(
    store: Store,
) -> None:
    """Others of the suite never had that score, as those of another task of lm-eval."""
    whole = {"exact's": 1.0, "f1": 1.0}
    with_items(store, "small-0", {"a": whole, "b": whole, "c": whole, "d": {"other": 1.0}}, day=0)
    with_items(store, "small-1", {"a": whole, "b": {"f1": 0.5}, "c": {}, "d": {"other": 1.0}}, day=1)
    _, query, _ = scoreless("qa", "exact's", 2).split('"')
    assert [row[:3] for row in sorted(rows(store, query))] == [("small-1", "b", 0), ("small-1", "c", 0)]


def test_an_item_stands_beside_itself_in_the_run_before(store: Store) -> None:
    """Only runs of the same evaluation, and the same metric, count."""
    with_items(store, "small-0", {"a": {"exact": 1.0}, "b": {"exact": 0.0}, "c": {"exact": 1.0}}, day=0)
    with_items(store, "other-0", {"a": {"exact": 0.0}}, day=1, evaluation="other")
    with_items(
        store, "small-1", {"a": {"exact": 0.0, "f1": 0.5}, "b": {"exact": 1.0}, "c": {"exact": 1.0}}, day=2
    )
    assert rows(store, f"{FLIPS} where run_id <> 'small-0' order by run_id, item, metric") == [
        ("other-0", "a", "exact", 0.0, None, None, None, None),
        ("small-1", "a", "exact", 0.0, "small-0", "a of small-0", 1.0, "fell"),
        ("small-1", "a", "f1", 0.5, None, None, None, None),
        ("small-1", "b", "exact", 1.0, "small-0", "b of small-0", 0.0, "rose"),
        ("small-1", "c", "exact", 1.0, "small-0", "c of small-0", 1.0, None),
    ]
    ((count,),) = rows(store, "select count(*) from eval_items where before_run is null")
    assert count == 5


def test_an_item_without_a_score_is_a_row_without_a_metric(store: Store) -> None:
    with_items(store, "small-0", {"a": {"exact": 1.0}, "b": {}})
    assert rows(store, f"{FLIPS} order by item") == [
        ("small-0", "a", "exact", 1.0, None, None, None, None),
        ("small-0", "b", None, None, None, None, None, None),
    ]


def test_columns_of_the_views_are_the_same_without_a_run(store: Store) -> None:
    def columns() -> list[Sequence[Any]]:
        return [rows(store, f"select column_name, column_type from (describe {view})") for view in VIEWS]

    empty = columns()
    for view in VIEWS:
        assert rows(store, f"from {view}") == []
    with_items(store, "small-0", {"a": {"exact": 1.0}})
    assert columns() == empty
    assert [name for name, _ in empty[2]][:3] == ["run_id", "suite", "item"]


@pytest.mark.parametrize("damage", ["gone", "cut", "other columns", "found by an earlier attempt"])
def test_a_file_of_items_that_cannot_be_read_costs_its_rows_alone(
    store: Store, tmp_path: Path, damage: str
) -> None:
    for day, run_id in enumerate(("small-0", "small-1")):
        with_items(store, run_id, {"a": {"exact": 1.0}}, day=day)
    path = nights.folder_of(store.home, "small-1") / "items-qa.parquet"
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "other columns":
        pq.write_table(pa.table({"suite": ["qa"]}), path)
    found = {path: "is damaged"} if damage == "found by an earlier attempt" else {}
    with query.opened(snapshot(store, now=0.0), spill=tmp_path, damaged=found) as opened:
        assert opened.duck.execute("select run_id from eval_items").fetchall() == [("small-0",)]
        assert opened.duck.execute("select count(*) from eval_runs").fetchall() == [(2,)]
        assert [str(path.parent.name) for path in opened.files["eval_items"]] == ["small-0"]
