"""SELECT statements that only read. DuckDB lets a WITH clause insert, update, delete, and copy to a file."""

import re

import duckdb

NODE = re.compile(r'"type":"(\w+_NODE)"')  # in the tree of a parsed query
READING = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}


def only_reads(select: str) -> bool:
    """True if no WITH clause of a SELECT writes, be it a row or, by COPY, a file."""
    with duckdb.connect(":memory:", config={"enable_external_access": False}) as empty:
        row = empty.execute("select json_serialize_sql($1)", [select]).fetchone()
    return row is not None and set(NODE.findall(row[0])) <= READING
