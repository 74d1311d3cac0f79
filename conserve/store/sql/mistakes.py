"""Mistakes in a user's SQL as sentences: the cause, the name that was meant, the next command."""

import difflib
import re
from collections.abc import Iterable

import duckdb

from conserve.errors import QueryError
from conserve.store.sql import eval_views
from conserve.store.sql.quoting import quoted

VIEWS = ("jobs", "results", "inputs", "requests", *eval_views.VIEWS)
REACH = f"conserve sql reads the views {', '.join(VIEWS)}, files given by --with, and nothing else"
ONLY_SELECT = f"{REACH}: only SELECT is possible"
WRITES = re.compile(r"WITH clause containing a .* must be at the top level")
"""DuckDB's refusal of a WITH clause that writes, in a subquery."""

KIND = re.compile(r"^(?:[A-Z]\w+ )+Error: ")
LISTS = re.compile(r"[\s!.]*(?:Did you mean \"|Candidate \w+:|LINE \d+:)")
"""Beginning of what follows the cause: nearest names, all functions of a name, the line with the mistake."""
POINTER = re.compile(r"\s*LINE \d+:")  # at the line of the query, whose words are no candidates
NO_COLUMN = re.compile(
    r'Referenced column "(.+?)" not found|not have a column named "(.+?)"|Column "(.+?)" does not exist'
)
NO_TABLE = re.compile(r'Table with name (.+?) does not exist|Referenced table "(.+?)" not found')
NAME = re.compile(r'"([^"]+)"|(\w+)')
"""A candidate: whole within quotes, else a word."""
NO_FUNCTION = re.compile(r"Function with name (.+?) does not exist")

CORRECT = "correct the query and ask again"


def explained(error: duckdb.Error, sql: str = "") -> QueryError:
    """`QueryError` for an error of DuckDB at this SQL, with the next command."""
    if isinstance(error, duckdb.PermissionException):
        return QueryError(f"{REACH}: no other files, databases or settings")
    message = str(error)
    if WRITES.search(message):
        return QueryError(ONLY_SELECT)
    cause, names = apart(message)
    if column := name_in(NO_COLUMN, cause):
        return missing("column", column, [names], step=columns_shown_by(sql))
    if table := name_in(NO_TABLE, cause):
        return missing("view", table, [names, *VIEWS], step=REACH)
    if function := name_in(NO_FUNCTION, cause):
        return missing("function", function, [names], step=CORRECT)
    next_step = columns_shown_by(sql) if isinstance(error, duckdb.BinderException) else CORRECT
    return QueryError(cause, step=next_step)


def streamed(message: str) -> QueryError:
    """`QueryError` for DuckDB's message in an error of Arrow's, met after the first rows."""
    return QueryError(apart(message)[0], step=CORRECT)


def apart(message: str) -> tuple[str, str]:
    """The cause in DuckDB's message, and what follows it."""
    cause, *rest = LISTS.split(KIND.sub("", one_line(message)), maxsplit=1)
    return cause.rstrip(".!"), POINTER.split("".join(rest), maxsplit=1)[0]


def name_in(pattern: re.Pattern[str], cause: str) -> str | None:
    """The name that a pattern finds."""
    found = pattern.search(cause)
    return None if found is None else next(one for one in found.groups() if one is not None)


def missing(kind: str, name: str, candidates: Iterable[str], *, step: str) -> QueryError:
    """`QueryError` for a name that nothing goes by, with the nearest one of these texts."""
    cause, near = f"there is no {kind} {name}", nearest(name, candidates)
    if near is None:
        return QueryError(cause, step=step)
    return QueryError(f"{cause}; did you mean {as_written(near)}?", step=step, joint=" If not, ")


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The name in these texts that is most like this one; None without one."""
    names = [quotes or word for text in candidates for quotes, word in NAME.findall(text)]
    others = [one for one in names if one.lower() != name.lower()]
    near = [one for one in others if one.lower() == f"input_{name}".lower()]  # beside a column of results
    near = (
        near
        or difflib.get_close_matches(name, others, n=1)
        or [one for one in others if name.lower() in words_of(one)]
    )
    return near[0] if near else None


def words_of(name: str) -> list[str]:
    """Words of a name, which holds spaces and signs too."""
    return re.findall(r"\w+", name.lower())


def as_written(name: str) -> str:
    """A name as SQL writes it: in quotes unless it is a plain word."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else quoted(name)


def views_in(sql: str) -> list[str]:
    """Views that a query names anywhere, in a text too, in the order of their first mention."""
    return list(dict.fromkeys(word for word in re.findall(r"\w+", sql.lower()) if word in VIEWS))


def columns_shown_by(sql: str) -> str:
    """Command that shows the columns of the views that a query names."""
    first, *others = views_in(sql) or ["results", "inputs", "jobs"]
    more = f" (or {', '.join(others)})" if others else ""
    return f'the columns are shown by: conserve sql "describe {first}"{more}'


def one_line(text: str) -> str:
    """DuckDB's message on one line, without the lines that point at the mistake."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip(" ^"))
