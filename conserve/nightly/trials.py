"""Trials of scorers before a row is asked: a SELECT is bound, a function is called once with a made-up answer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from conserve.errors import QueryError
from conserve.nightly.mistakes import in_function, in_select, is_in_users_code
from conserve.nightly.options import Options
from conserve.nightly.samples import data_set, kept_inputs, size_of
from conserve.store.sql.input_columns import shown_names
from conserve.store.sql.input_parts import InputPart

MOST_BYTES = 64 << 20  # of a data set, whose rows are kept once more for a trial
MADE_UP = ""  # answer of the trial


def bound(options: Options, select: str, columns: Sequence[str]) -> list[str] | None:
    """Columns of a SELECT, bound over the types that the data set has at night; None where they are not known.

    Of a large data set names alone are looked up. Raises `SettingsError` for a mistake.
    """
    from conserve.store.sql.bind_mistakes import bound_columns, check_names

    try:
        with as_kept(options, columns) as parts:
            if parts is not None:
                return bound_columns(select, parts)
        check_names(select, columns)
    except QueryError as error:
        raise in_select(options.where, error) from error
    return None


def called_once(options: Options, function: Callable[..., object], columns: Sequence[str]) -> None:
    """Call a function with the first row and a made-up answer.

    Raises `SettingsError` for an error that any answer meets. Others pass, since a function may refuse an answer.
    """
    from conserve.store.sql.bind_mistakes import first_row

    with as_kept(options, columns) as parts:
        found = None if parts is None else first_row(parts)
    if found is None:
        return
    own = {alias: name for name, alias in shown_names(columns).items()}
    row = Row({own[alias]: value for alias, value in found.items()})
    try:
        function(MADE_UP, row)
    except ImportError as error:
        raise in_function(options, function, error, row) from error
    except (KeyError, NameError, AttributeError, TypeError) as error:
        if is_sure(error, row) and is_in_users_code(options, function, error):
            raise in_function(options, function, error, row) from error
    except (Exception, SystemExit):  # code of the user's may raise anything
        return


class Row(dict[str, Any]):
    """Row of a trial, which knows the columns that it was asked for and lacks."""

    def __init__(self, columns: dict[str, Any]) -> None:
        super().__init__(columns)
        self.lacking: list[object] = []

    def __missing__(self, name: object) -> Any:
        self.lacking.append(name)
        raise KeyError(name)


def is_sure(error: Exception, row: Row) -> bool:
    """True for an error that a real answer meets too; a pattern that an empty answer lacks gives None."""
    if isinstance(error, KeyError):
        return any(error.args[:1] == (name,) for name in row.lacking)
    if isinstance(error, AttributeError):
        return error.name is None or error.obj is not None
    # A `TypeError` holds no operands: Python's words alone tell that one of them is None.
    return not isinstance(error, UnboundLocalError) and "NoneType" not in str(error)


@contextmanager
def as_kept(options: Options, columns: Sequence[str]) -> Iterator[Sequence[InputPart] | None]:
    """Yield the rows that are asked as files of a job; None for a large data set or names that SQL changes."""
    changed = len({name.lower() for name in columns}) < len(columns)
    if changed or size_of(options.data, options.folder) > MOST_BYTES:
        yield None
        return
    with kept_inputs(data_set(options.suite, options.data, options.folder)) as parts:
        yield parts
