"""Dot plots of the benchmark pages: a line for each row, an axis or more side by side, a mark for each figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from conserve.bench.pages import svg
from tools.docs.charts import LETTER, STYLE, WIDTH
from tools.docs.tables import Table, tables

TOP = 38.0  # pixels above the first row
STEP = 24.0  # from row to row
EDGE = 24.0  # pixels at the right, for half of a number
GAP = 26.0  # from axis to axis
FOOT = 24.0  # pixels of the axes' numbers
LEGEND = 22.0  # pixels of a line of the legend
SHAPES = {
    "a": "M{x0},{y} a4.5,4.5 0 1 0 9,0 a4.5,4.5 0 1 0 -9,0",
    "b": "M{x0},{y0} h9 v9 h-9 z",
    "c": "M{x},{y0} l5.5,9 h-11 z",
    "d": "M{x},{y0} l5,4.5 l-5,4.5 l-5,-4.5 z",
    "small": "M{x0},{y} m2,0 a2.5,2.5 0 1 0 5,0 a2.5,2.5 0 1 0 -5,0",
}
MARKS = (
    ".grid{stroke:#d8dee4}.row{stroke:#d8dee4;stroke-dasharray:1 3}.span{stroke:#8c959f}"
    ".a,.small{fill:#0969da}.b{fill:#bf5b17}.c{fill:#1a7f37}.d{fill:#8250df}.small{fill-opacity:.55}"
    "@media (prefers-color-scheme:dark){.grid,.row{stroke:#3d444d}.span{stroke:#6e7681}"
    ".a,.small{fill:#4493f8}.b{fill:#e0823d}.c{fill:#3fb950}.d{fill:#ab7df8}}"
)


class Axis(NamedTuple):
    """An axis: its heading, its ends unless the figures tell them, and the values of dashed lines across it."""

    heading: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    limits: Sequence[float] = ()
    unit: str = ""


class Dot(NamedTuple):
    """A figure: its value, its mark, and the text behind it."""

    value: float
    mark: str = "a"
    text: str = ""


class Row(NamedTuple):
    """A row: its name, its dots on each axis, and the value of a dashed stroke on each axis."""

    name: str
    dots: Sequence[Sequence[Dot]]
    limits: Sequence[float] = ()


class Plot(NamedTuple):
    """A dot plot of a page: its axes and rows from the page's tables, what its marks mean, and a note below."""

    page: str
    label: str
    axes: Callable[[list[Table]], Sequence[Axis]]
    rows: Callable[[list[Table]], Sequence[Row]]
    legend: Mapping[str, str] = {}
    note: str = ""


def draw(docs: Path, plot: Plot) -> str:
    """The plot as SVG, from the page in `docs`/benchmarks."""
    found = tables(docs / "benchmarks" / plot.page)
    axes, rows = plot.axes(found), plot.rows(found)
    left = LETTER * max(len(row.name) for row in rows) + 14
    width = (WIDTH - EDGE - left + GAP) / len(axes) - GAP
    bottom = TOP + STEP * len(rows)
    parts = [svg.element("style", STYLE + MARKS)]
    for number, row in enumerate(rows):
        parts.append(svg.text(row.name, left - 10, TOP + STEP * (number + 0.5) + 4, anchor="end"))
    for number, axis in enumerate(axes):
        start = left + number * (width + GAP)
        parts += column(axis, number, rows, start, start + width, bottom)
    parts += legend(plot.legend, left, bottom + FOOT)
    end = bottom + FOOT + LEGEND * len(entries(plot.legend, left))
    if plot.note:
        parts.append(svg.text(plot.note, left, end + 15, "figure"))
        end += LEGEND
    return svg.picture("".join(parts), WIDTH, end + 6, plot.label) + "\n"


def column(
    axis: Axis, number: int, rows: Sequence[Row], start: float, end: float, bottom: float
) -> Iterator[str]:
    """An axis with its numbers, and the dots of all rows on it."""
    spare = LETTER * max(len(dot.text) for row in rows for dot in row.dots[number])
    at = scale(axis, [dot.value for row in rows for dot in row.dots[number]], start, end - spare)
    yield svg.text(axis.heading, start, 20, "heading")
    label = LETTER * len(svg.figure(at.high) + axis.unit) + 16
    for tick in at.ticks(int((end - spare - start) / label)):
        x = at(tick)
        yield svg.element("line", x1=x, y1=TOP - 6, x2=x, y2=bottom, class_="grid")
        yield svg.text(f"{svg.figure(tick)}{axis.unit}", x, bottom + 16, "figure", "middle")
    for limit in axis.limits:
        yield svg.element("line", x1=at(limit), y1=TOP - 6, x2=at(limit), y2=bottom, class_="limit")
    for place, row in enumerate(rows):
        y = TOP + STEP * (place + 0.5)
        yield svg.element("line", x1=start, y1=y, x2=end, y2=y, class_="row")
        yield from marks(row, number, at, y)


def marks(row: Row, number: int, at: svg.Scale, y: float) -> Iterator[str]:
    """A row's dots on an axis, with a line from the least to the most."""
    dots = row.dots[number]
    across = [at(dot.value) for dot in dots]
    if across:
        yield svg.element("line", x1=min(across), y1=y, x2=max(across), y2=y, class_="span")
    if row.limits:
        x = at(row.limits[number])
        yield svg.element("line", x1=x, y1=y - 10, x2=x, y2=y + 10, class_="limit")
    for dot, x in zip(dots, across, strict=True):
        yield mark(dot.mark, x, y)
        if dot.text:
            yield svg.text(dot.text, x + 9, y + 4, "figure")


def mark(kind: str, x: float, y: float) -> str:
    """A mark of this kind with its middle here."""
    places = {"x": x, "y": y, "x0": x - 4.5, "y0": y - 4.5}
    path = SHAPES[kind].format_map({name: f"{value:.1f}" for name, value in places.items()})
    return svg.element("path", d=path, class_=kind)


def scale(axis: Axis, values: Sequence[float], start: float, end: float) -> svg.Scale:
    """The axis's scale: its own ends, else those of its figures and limits."""
    drawn = [*values, *axis.limits]
    chosen = (svg.logarithmic if axis.log else svg.linear)(drawn, start=start, end=end)
    low = chosen.low if axis.low is None else axis.low
    high = chosen.high if axis.high is None else axis.high
    return svg.Scale(low=low, high=high, start=start, end=end, log=axis.log)


def entries(told: Mapping[str, str], left: float) -> list[list[tuple[str, str, float]]]:
    """The legend's entries with their places, in as many lines as they need."""
    lines: list[list[tuple[str, str, float]]] = [[]] if told else []
    x = left
    for kind, words in told.items():
        room = 18 + LETTER * len(words) + 14
        if lines[-1] and x + room > WIDTH:
            lines.append([])
            x = left
        lines[-1].append((kind, words, x))
        x += room
    return lines


def legend(told: Mapping[str, str], left: float, top: float) -> Iterator[str]:
    """The marks and their meanings."""
    for number, shown in enumerate(entries(told, left)):
        y = top + LEGEND * (number + 0.5)
        for kind, words, x in shown:
            yield mark(kind, x + 5, y)
            yield svg.text(words, x + 16, y + 4)
