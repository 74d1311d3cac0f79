"""Bars, courses and short numbers of a terminal's cells. Pure."""

from collections.abc import Sequence

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
UNITS = (("G", 1e9), ("M", 1e6), ("k", 1e3))
EXACT = 99_999  # largest number that is written out


def bar(share: float, width: int) -> str:
    """Bar of so many cells, filled to an eighth of one; full only at a share of 1."""
    share = max(0.0, min(1.0, share))
    eighths = int(share * width * 8)
    return f"{'█' * (eighths // 8)}{EIGHTHS[eighths % 8] if eighths % 8 else ''}".ljust(width)


def course(values: Sequence[float], width: int, *, most: float | None = None) -> str:
    """The last values as a line of columns, right-aligned; 0 is the lowest column, `most` the highest."""
    seen = list(values)[-width:]
    top = max([most or 0.0, *seen])
    if top <= 0:
        return ("▁" * len(seen)).rjust(width)
    columns = (LEVELS[min(len(LEVELS) - 1, int(value / top * len(LEVELS)))] for value in seen)
    return "".join(columns).rjust(width)


def short(number: float) -> str:
    """Number of at most six cells: `1,480`, `123k`, `2.5M`."""
    if number <= EXACT:
        return f"{number:,.0f}"
    for unit, size in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 10 * size else f"{number / size:,.0f}{unit}"
    return f"{number:,.0f}"


def cut(text: str, width: int) -> str:
    """Text in exactly so many cells; the end of a longer one is left out."""
    text = text.replace("\n", " ")
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"
