"""Sentences of errors for a reader of Python: arguments are named where the command line has flags."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from conserve.errors import ConserveError

CALL = re.compile(r"conserve (?:jobs|(pause|resume|cancel|retry) (\w[\w.-]*))")
COMMAND = (
    r"(?<=: )conserve [^;]*"
    r"|(?<=run: )(?:(?!; |, or ).)*"  # of any program
    r"|(?<=; )(?:uv )?\S*(?:pip|python[\d.]*) (?:(?!; |, or ).)*"  # a second one
)
FLAG = r"(?<![^\s(])--([a-z]+(?:-[a-z]+)*)(?![\w-])"  # alone, and not within a name or in quotes
QUOTED = r"""("(?:[^"\\]|\\.)*"|'[^']*'(?:"'"'[^']*')*)"""  # as `installation.quoted` writes it
COMMAND_OR_FLAG = re.compile(f"({COMMAND})|{FLAG}(?: {QUOTED})?")
OTHERWISE = {
    "param": "params",
    "tag": "tags",
    "with": "the argument files",
    "memory": "the setting sql_memory",
    "timeout": "the setting sql_timeout_s",
    "sql": "duckdb.sql()",
    "home": "the path of conserve.open()",
}
"""Arguments that have other names than their flags."""


def in_python(sentence: str) -> str:
    """Sentence with the names of arguments for flags, and calls for commands that have one.

    A command would ask the store of the command line, which need not be the caller's.
    """
    return COMMAND_OR_FLAG.sub(
        lambda found: called(found[1]) if found[1] else argument(found[2], found[3]),
        sentence,
    )


def argument(flag: str, value: str | None) -> str:
    """The argument for a flag, with its value as Python writes it if the sentence quotes one."""
    name = OTHERWISE.get(flag, flag.replace("-", "_"))
    if value is None:
        return name
    literal = value if value[0] == '"' and "\\" not in value else repr(*shlex.split(value))
    return f"{name[:-1]}{literal})" if name.endswith("()") else f"{name} {literal}"


def called(command: str) -> str:
    """The call that does the same as a command, or the command."""
    found = CALL.fullmatch(command)
    if found is None:
        return command
    return f"store.job({found[2]!r}).{found[1]}()" if found[1] else "store.jobs()"


@contextmanager
def spoken() -> Iterator[None]:
    """Put the sentences of errors into the words of Python."""
    try:
        yield
    except ConserveError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
