"""Output: data on stdout, everything else on stderr, colour only on a terminal."""

import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from conserve.errors import ConserveError
from conserve.units import count as count
from conserve.units import duration as duration

STYLE = re.compile(r"\x1b\[[0-9;]*m")
LAST_S = 253_402_214_400.0  # of what a calendar holds, in any time zone
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
GAP = 2  # places between columns
LEAST = 4  # places of a cell that is shortened
NO_PLACE = ("Mn", "Me", "Cf")  # accents over the letter before, and signs that say how to join letters
STATE_COLOURS = {
    "running": "cyan",
    "queued": "blue",
    "paused": "yellow",
    "completed": "green",
    "failed": "red",
    "cancelled": "magenta",
    "expired": "magenta",
}
CODES = {
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
    "bright_black": 90,
}  # of ANSI


json_lines = False  # set once a command logs JSON (conserve.logs, which is imported then)


def colourful(stream: TextIO) -> bool:
    """True if colour and animation belong on this stream."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or json_lines
    return stream.isatty() and not plain


def say(message: str, *, level: str = "info", **fields: Any) -> None:
    """Print a message on stderr, with the user's `--home` in its commands; JSON logs have level and fields too."""
    if "conserve " in message:
        from conserve.cli.suggestions import at_home  # which other messages need not wait for

        message = at_home(message)
    if json_lines:
        from conserve import logs

        logs.say(message, level=level, **fields)
    else:
        print(message, file=sys.stderr, flush=True)


def visible(text: str, stream: TextIO) -> str:
    """Text; for a terminal with its control characters spelled out, which are commands there."""
    if not stream.isatty():
        return text
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def say_trouble(message: str) -> None:
    """Print a sentence on what is wrong, as it is, on stderr; JSON logs have it as a warning."""
    say(message, level="warning")


def warn(message: str) -> None:
    """Print a warning on stderr."""
    say(message if json_lines else f"warning: {visible(message, sys.stderr)}", level="warning")


def say_error(error: ConserveError) -> int:
    """Print an error on stderr; returns its exit code."""
    said = f"{coloured('conserve:', 'red', sys.stderr)} {visible(str(error), sys.stderr)}"
    say(str(error) if json_lines else said, level="error", event=type(error).__name__)
    return error.exit_code


def data(text: str) -> None:
    """Print a line of data on stdout."""
    print(text, flush=True)


def data_json(value: Any) -> None:
    """Print a JSON document on stdout."""
    import json

    print(
        json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False, default=str),
        flush=True,
    )


def coloured(text: str, colour: str | None, stream: TextIO | None = None) -> str:
    """Text in a colour, if the stream shows colours."""
    if not colour or not colourful(stream or sys.stdout):
        return text
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m"


def state(name: str) -> str:
    """State of a job in its colour."""
    return coloured(name, STATE_COLOURS.get(name))


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    *,
    shorten: Sequence[int] = (),
) -> list[str]:
    """Lines of aligned columns; the columns numbered in `right` hold figures. Cells may carry colour codes.

    Cells of the columns numbered in `shorten`, which carry none, are shortened as far as a terminal is too narrow.
    """
    if shorten and (room := width()) is not None:
        rows = fit_columns(header, rows, shorten, room)
    plain = [[STYLE.sub("", cell) for cell in row] for row in rows]
    widths = [max(map(places, column)) for column in zip(header, *plain, strict=True)]

    def line(cells: Sequence[str], lengths: Sequence[int]) -> str:
        padded = []
        for number, (cell, length, width) in enumerate(zip(cells, lengths, widths, strict=True)):
            gap = " " * (width - length)
            padded.append(gap + cell if number in right else cell + gap)
        return (" " * GAP).join(padded).rstrip()

    head = line([coloured(name, "bright_black") for name in header], [*map(places, header)])
    return [head, *(line(row, [*map(places, bare)]) for row, bare in zip(rows, plain, strict=True))]


def fit_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], shorten: Sequence[int], room: int
) -> list[list[str]]:
    """Rows whose widest cells in these columns are shortened until a line has room, or no cell can be shorter.

    Cells that differ still do.
    """
    cells = [[STYLE.sub("", cell) for cell in column] for column in zip(header, *rows, strict=True)]
    widths = [max(map(places, column)) for column in cells]
    least = {number: fewest_places(cells[number], widths[number]) for number in shorten}
    while sum(widths) + GAP * (len(widths) - 1) > room:
        open_ = [number for number in shorten if widths[number] > least[number]]
        if not open_:
            break
        widths[max(open_, key=lambda number: widths[number])] -= 1
    return [
        [
            with_ellipsis(cell, widths[number]) if number in shorten else cell
            for number, cell in enumerate(row)
        ]
        for row in rows
    ]


def fewest_places(column: Sequence[str], width: int) -> int:
    """Fewest places of a column, its header first, in which cells that differ still do."""
    head, *cells = column
    least = max(LEAST, places(head))
    while least < width and len({with_ellipsis(cell, least) for cell in cells}) < len({*cells}):
        least += 1
    return least


def with_ellipsis(text: str, most: int) -> str:
    """Text of so many places at most, with an ellipsis in it if it has more; two thirds of it are the beginning."""
    for kept in range(len(text) - 1, 0, -1):
        if places(text) <= most:
            break
        begun, end = text[: kept - kept // 3], text[len(text) - kept // 3 :]
        if places(short := f"{begun}…{end}") <= most:
            return short
    return text


def width() -> int | None:
    """Places of a line on the terminal; None where stdout is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None if sys.stdout.isatty() else None
    except (OSError, ValueError):  # no terminal, or closed
        return None


def height(line: str) -> int:
    """Rows of the terminal that a line takes; one where stdout is none. The line may carry colour codes."""
    room = width()
    return 1 if room is None else max(1, -(-places(STYLE.sub("", line)) // room))


def places(text: str) -> int:
    """Places that a text takes on a terminal: two for a letter of Chinese, say, and none for an accent over one."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width  # which most tables do not need

    return sum(0 if category(c) in NO_PLACE else 2 if east_asian_width(c) in "FW" else 1 for c in text)


def moment(seconds: float | None) -> str:
    """Local time of a moment in s since 1970; a dash for None."""
    if seconds is None:
        return "-"
    return utc(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso(seconds: float | None) -> str | None:
    """Moment in s since 1970 as ISO 8601 in UTC, for JSON."""
    return None if seconds is None else utc(seconds).isoformat()


def utc(seconds: float) -> datetime:
    """A moment in s since 1970; the last that a calendar holds for one beyond it."""
    return datetime.fromtimestamp(min(seconds, LAST_S), UTC)
