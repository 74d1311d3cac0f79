"""SELECT statements that only read. DuckDB lets a WITH clause insert, update, delete, and copy to a file.

So does a text that a function runs as SQL of its own, which is in no tree of the statement around it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import duckdb

NODE = re.compile(r'"type":"(\w+_NODE)"')  # in the tree of a parsed query
WRITING = re.compile(rb"(copy|insert|update|delete|merge|create|attach|export|install|load)\b", re.IGNORECASE)
RUNS_TEXT = "query"  # as a table; its text is read here where it is a literal
RUNS_TREE = "json_execute_serialized_sql"
RUNS_SQL = re.compile(rf"\b({RUNS_TEXT}|{RUNS_TREE})\b", re.IGNORECASE)
READING = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}


def only_reads(duck: duckdb.DuckDBPyConnection, select: str) -> bool:
    """True if no WITH clause of a SELECT writes, be it a row or, by COPY, a file. It is parsed, and not run.

    Nor may a text in it that is run as SQL: it has to be a literal, since no other is known before.
    """
    ((tree,),) = duck.execute("select json_serialize_sql($1)", [select]).fetchall()
    if '"error":false' not in tree or not set(NODE.findall(tree)) <= READING:
        return False
    return RUNS_SQL.search(tree) is None or all(runs_reading(duck, call) for call in calls(json.loads(tree)))


def calls(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the calls of functions in a tree, however deep it is."""
    left = [tree]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
            if "function_name" in one:
                yield one
        elif isinstance(one, list):
            left += one


def runs_reading(duck: duckdb.DuckDBPyConnection, call: dict[str, Any]) -> bool:
    """False for a call that runs SQL, unless that is a literal text that only reads."""
    name = str(call["function_name"]).lower()
    if name != RUNS_TEXT:
        return name != RUNS_TREE
    texts = [literal_of(argument) for argument in call.get("arguments", call.get("children", [None]))]
    return bool(texts) and all(text is not None and only_reads(duck, text) for text in texts)


def literal_of(argument: Any) -> str | None:
    """Text of an argument that is a literal; None for any other."""
    if not isinstance(argument, dict):
        return None
    one = argument.get("expression", argument)
    found = one.get("literal", {}).get("text") or one.get("value", {}).get("value")
    return found if isinstance(found, str) else None


def names_writing(sql: str) -> bool:
    """True if a word of the SQL begins a statement that writes, or names a function that may run one.

    For a PIVOT, of which DuckDB runs a part before it is refused; a column of such a name has to be quoted there.
    """
    text = sql.encode()  # places are counted in bytes
    return RUNS_SQL.search(sql) is not None or any(
        kind == duckdb.token_type.keyword and WRITING.match(text, place) is not None
        for place, kind in duckdb.tokenize(sql)
    )
