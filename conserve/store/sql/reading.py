"""SELECT statements that only read. DuckDB lets a WITH clause insert, update, delete, and copy to a file."""

import re

import duckdb

NODE = re.compile(r'"type":"(\w+_NODE)"')  # in the tree of a parsed query
WRITING = re.compile(rb"(copy|insert|update|delete|merge|create|attach|export|install|load)\b", re.IGNORECASE)
READING = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}


def only_reads(duck: duckdb.DuckDBPyConnection, select: str) -> bool:
    """True if no WITH clause of a SELECT writes, be it a row or, by COPY, a file. It is parsed, and not run."""
    ((tree,),) = duck.execute("select json_serialize_sql($1)", [select]).fetchall()
    return '"error":false' in tree and set(NODE.findall(tree)) <= READING


def names_writing(sql: str) -> bool:
    """True if a word of the SQL begins a statement that writes.

    For a PIVOT, of which DuckDB runs a part before it is refused; a column of such a name has to be quoted there.
    """
    text = sql.encode()  # places are counted in bytes
    return any(
        kind == duckdb.token_type.keyword and WRITING.match(text, place) is not None
        for place, kind in duckdb.tokenize(sql)
    )
