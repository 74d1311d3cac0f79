"""Errors of mistakes in scorers: a SELECT by the cause, a function by its line in the user's file."""

import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

from conserve.errors import QueryError, SettingsError, one_line
from conserve.nightly.options import Options

CHECK = "correct it, and check with: conserve eval run FILE --check"


def in_select(where: str, error: QueryError) -> SettingsError:
    """The error for the mistake in a suite's SELECT."""
    step = None if error.step is None else CHECK
    return SettingsError(f"{where}.score: {error.cause}", step=step, joint=error.joint)


def in_function(
    options: Options,
    function: Callable[..., object],
    error: Exception,
    columns: Collection[str],
    *,
    item: str | None = None,
) -> SettingsError:
    """The error for that of a suite's function, for an item of the night or, without one, a made-up answer."""
    said = ": ".join(filter(None, (type(error).__name__, one_line(error, most=200))))
    cause = f"{options.where}.score: {place_of(options, function, error)}: {said}"
    if is_missing_key(error, columns):
        return SettingsError(f"{cause}; a row has: {', '.join(columns)}")
    if item is None:
        return SettingsError(cause, step=CHECK)
    return SettingsError(
        f"{cause}, of the item {one_line(item, most=60)}; return None where there is no score"
    )


def is_missing_key(error: Exception, columns: Collection[str]) -> bool:
    """True for the error of a key that no row has."""
    return isinstance(error, KeyError) and bool(error.args) and error.args[0] not in columns


def place_of(options: Options, function: Callable[..., object], error: Exception) -> str:
    """File of the user's and the line in it that an error comes from."""
    places = [place for place in frames(error.__traceback__) if is_users(place[0], options, function)]
    code = code_of(function)
    if places:
        file, line = places[-1]
    elif code is not None:  # called with arguments that it does not take
        file, line = code.co_filename, code.co_firstlineno
    else:
        return options.required("score", "")
    return f"{Path(file).name} line {line}"


def is_in_users_code(options: Options, function: Callable[..., object], error: Exception) -> bool:
    """True if no library raised an error, but the user's own code, or the call of the function."""
    return all(is_users(file, options, function) for file, _ in [*frames(error.__traceback__)][-1:])


def frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    """Yield file and line of each call below ConServe's own, the outermost first."""
    for frame, line in walk_tb(trace):
        if not frame.f_globals.get("__name__", "").startswith("conserve.nightly."):
            yield frame.f_code.co_filename, line


def is_users(file: str, options: Options, function: Callable[..., object]) -> bool:
    """True for the file of the function, and for the others beside nightly.toml."""
    code = code_of(function)
    path = Path(file)
    beside = path.is_relative_to(options.folder) and "site-packages" not in path.parts
    return beside or (code is not None and code.co_filename == file)


def code_of(function: Callable[..., object]) -> Any:
    """Code of a function; None of a class and the like."""
    return getattr(inspect.unwrap(function), "__code__", None)
