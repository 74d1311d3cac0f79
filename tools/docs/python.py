"""The page of ConServe from Python, written from signatures and docstrings: docs/reference/python.md."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Annotated, Any, get_args, get_origin

from msgspec import Struct

import conserve
from conserve.api.engines import Engine
from conserve.api.twins import BlockingCall, Method

HEAD = """# Python

<!-- Written by `python -m tools.docs` from the docstrings; change these. -->

`import conserve` gives the names below. [The tutorial](../tutorials/python.md) shows them at work.

A call marked **aio** blocks, and has a twin that is awaited and takes the same arguments: `job.wait()` and `await
job.wait.aio()`. Both run the same code, in any thread and in any event loop, Jupyter's too.

Handles of stores, jobs and results hold no connection. They may be pickled, sent to other processes and kept; each
call reads the store as it then is. The settings of the store go with a pickled handle, an API key too.

The relations of `store.sql` and `results.duckdb` are on DuckDB's default connection, which refuses a second call at
a time (`ResourceInUseException`; before DuckDB 2.0 it waits). A call of ConServe waits until it is free. Your own
calls may be refused while another thread, or an awaited twin, uses it: in such programs read relations on a cursor,
as `duckdb.cursor().sql("from answers").fetchall()`, or take `results.arrow()`.

Errors are the classes of `conserve.errors`, with the [exit code](exit-codes.md) that the command line has for them
as `exit_code`. A message names arguments, and the commands that go on from there.

| error | raised for | `exit_code` |
|---|---|---|
"""
ERRORS = (
    ("UsageError", "any mistake that another call would mend"),
    ("InputError", "a source that cannot become a job"),
    ("TemplateError", "a prompt that does not compile, or names a missing column"),
    ("SettingsError", "a setting, a model or an endpoint that makes no sense"),
    ("JobNotFound", "a name that no job has"),
    ("QueryError", "SQL that is wrong or not allowed"),
    ("PackageMissing", "pandas or polars, where it is not installed"),
    ("QueryTooGreedy", "a query that needs more memory, disk or time than it may have"),
    ("JobRefused", "a job that may not run as things stand"),
    ("StoreError", "a store that cannot be read or written"),
    ("EndpointUnusable", "an engine or a server that cannot serve"),
)
WARNINGS = """
Warnings: `RowsUnanswerable` for rows of a new job that cannot be sent, `RowsLeftOut` for rows that cannot be read.
All errors derive from `ConserveError`.
"""
INTERNAL = {"document", "settings", "borrowed"}
LABELS = {"JobReading": "reading"}
FUNCTIONS = ("open", "map")
CLASSES = ("Store", "Job", "Results", "Engine", "Outcome", "JobReading", "Result", "JobState")
WIDTH = 116


def page() -> str:
    """The whole page."""
    errors = (f"| `{name}` | {what} | {getattr(conserve.errors, name).exit_code} |" for name, what in ERRORS)
    parts = [HEAD + "\n".join(errors) + "\n" + WARNINGS]
    for name in FUNCTIONS:
        call = getattr(conserve, name)
        parts.append(f"## conserve.{name}\n\n{described(f'conserve.{name}', call)}")
    parts += [of_class(name, getattr(conserve, name)) for name in CLASSES]
    return "\n".join(parts)


def of_class(name: str, kind: type) -> str:
    """Section of a class: its docstring, how it is made, its fields or its methods."""
    parts = [f"## {name}\n\n{prose(kind)}"]
    if name == "Engine":
        parts.append(signature("conserve.Engine", Engine.__init__) + "\n")
    if is_dataclass(kind) or issubclass(kind, Struct):
        of = inspect.get_annotations(kind).items()
        parts.append("\n".join(f"- `{name}`: `{text(annotation)}`" for name, annotation in of) + "\n")
    if issubclass(kind, Enum):
        parts.append("\n".join(f'- `"{member.value}"`' for member in kind) + "\n")
        return "\n".join(parts)
    for member, value in members(kind):
        label = f"{LABELS.get(name, name.lower())}.{member}"
        parts.append(f"### {label}\n\n{described(label, value)}")
    return "\n".join(parts)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that say what they are, in the order of their definition."""
    for name, value in vars(kind).items():
        shown = not name.startswith("_") and name not in INTERNAL
        if shown and (isinstance(value, Method | property) or inspect.isfunction(value)):
            yield name, value


def described(label: str, value: Any) -> str:
    """Signature and docstring of a call."""
    if isinstance(value, property):
        return prose(value)
    twin = "**aio.** " if isinstance(value, Method | BlockingCall) else ""
    return f"{signature(label, value)}\n\n{twin}{prose(value)}"


def signature(label: str, value: Any) -> str:
    """Signature as it is written in the code, one argument a line where it is long."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(value)))
    (found,) = ast.parse(source).body
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    found.args.args = [one for one in found.args.args if one.arg != "self"]
    back = (
        f" -> {ast.unparse(found.returns)}" if found.returns is not None and found.name != "__init__" else ""
    )
    line = f"{label}({ast.unparse(found.args)}){back}".replace("'", '"').replace('"duckdb.', "duckdb.")
    for quoted in re.findall(r'-> "[\w.]+"', line):
        line = line.replace(quoted, quoted.replace('"', ""))
    if len(line) > WIDTH - 20:
        line = "\n".join(one_a_line(label, found, back))
    return f"```python\n{line}\n```"


def one_a_line(label: str, found: ast.FunctionDef | ast.AsyncFunctionDef, back: str) -> Iterator[str]:
    """Lines of a long signature."""
    yield f"{label}("
    given = found.args
    for one, default in zip(
        given.args, [None] * (len(given.args) - len(given.defaults)) + given.defaults, strict=True
    ):
        yield f"    {argument(one, default)},"
    if given.kwonlyargs:
        yield "    *,"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield f"    {argument(one, default)},"
    yield f"){back}".replace("'", "")


def argument(one: ast.arg, default: ast.expr | None) -> str:
    """Argument with its type and its default."""
    value = "" if default is None else f" = {ast.unparse(default)}"
    return f"{ast.unparse(one)}{value}".replace("'", '"')


def text(annotation: Any) -> str:
    """Type of a field as it is written."""
    kind = (
        getattr(annotation, "__origin__", annotation) if get_origin(annotation) is Annotated else annotation
    )
    said = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return re.sub(r"\b(typing|collections\.abc|conserve[\w.]*)\.", "", said)


def prose(value: Any) -> str:
    """Docstring as paragraphs."""
    paragraphs = inspect.cleandoc(value.__doc__ or "").split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(one.split()), WIDTH) for one in paragraphs) + "\n"
