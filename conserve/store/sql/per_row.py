"""Scores by row: `select avg(...)` over a job's rows, taken apart into one score a row."""

import json
from typing import Any, NamedTuple

import duckdb

from conserve.errors import QueryError
from conserve.store.sql.mistakes import explained
from conserve.store.sql.query import select_of

BY_ROW = "select row_index, avg(0::double) from results group by row_index"
MEANS = ("avg", "mean")


class RowScores(NamedTuple):
    """SELECT of `row_index` and scores, and whether it was made of means, which are over the rows that it has."""

    select: str
    of_means: bool


def by_row(sql: str) -> RowScores:
    """SELECT of `row_index` and scores: the given one, or one that is made of means over all rows.

    The mean of such scores is the mean that was asked for. Raises `QueryError` for any other SELECT.
    """
    with duckdb.connect(":memory:", config={"enable_external_access": False}) as empty:
        try:
            statements = empty.extract_statements(sql)
            if len(statements) != 1:
                raise QueryError("a score is one SELECT, as in: select avg(r.text = i.answer) from ...")
            select = select_of(empty, statements[0])
        except duckdb.Error as error:
            raise explained(error, sql) from error
        tree = tree_of(empty, select)
        node = tree["statements"][0]["node"]
        if names_row_index(node):
            return RowScores(select, of_means=False)
        if not all(is_mean(one) for one in node["select_list"]) or node.get("group_expressions"):
            raise QueryError(
                "a score is either one of each row, as in: select row_index, r.text = i.answer as score from "
                "results r join inputs i using (job_id, row_index); or a mean, as in: select avg(...) from ..."
            )
        if chooses(node):
            raise QueryError(
                "a mean is taken apart by row and takes no LIMIT, DISTINCT, HAVING, QUALIFY or SAMPLE; choose rows "
                "by WHERE, or a number of items by the suite's limit"
            )
        model = tree_of(empty, BY_ROW)["statements"][0]["node"]
        index, mean = model["select_list"]
        node["select_list"] = [index, *(of_numbers(one, mean) for one in node["select_list"])]
        node["group_expressions"], node["group_sets"] = model["group_expressions"], model["group_sets"]
        row = empty.execute("select json_deserialize_sql($1::json)", [json.dumps(tree)]).fetchone()
    assert row is not None
    return RowScores(str(row[0]), of_means=True)


def tree_of(duck: duckdb.DuckDBPyConnection, select: str) -> dict[str, Any]:
    """Tree of a SELECT."""
    row = duck.execute("select json_serialize_sql($1)", [select]).fetchone()
    assert row is not None
    tree: dict[str, Any] = json.loads(row[0])
    return tree


def names_row_index(node: dict[str, Any]) -> bool:
    """True if a SELECT has a column `row_index`, or perhaps has one."""
    if node.get("type") != "SELECT_NODE":
        return True
    return any(
        one.get("class") == "STAR" or "row_index" in (one.get("alias"), *one.get("column_names", [])[-1:])
        for one in node["select_list"]
    )


def of_numbers(mean: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Mean of numbers, also where the query has the mean of truths, which DuckDB lacks."""
    cast = model["arguments"][0]["expression"]
    arguments = [{**one, "expression": {**cast, "child": one["expression"]}} for one in mean["arguments"]]
    return {**mean, "arguments": arguments}


def is_mean(one: dict[str, Any]) -> bool:
    """True for `avg(...)`; a mean of distinct values is no mean over rows."""
    return one.get("class") == "FUNCTION" and one.get("function_name") in MEANS and not one.get("distinct")


def chooses(node: dict[str, Any]) -> bool:
    """True for a SELECT that chooses among its results, which would be rows once a mean is taken apart."""
    sorts = all(one["type"] == "ORDER_MODIFIER" for one in node["modifiers"])
    return not sorts or any(node.get(part) for part in ("having", "qualify", "sample"))
