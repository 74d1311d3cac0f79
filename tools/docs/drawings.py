"""Drawings of mechanisms: boxes, lanes and arrows from a few lines of data, as SVG."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from conserve.bench.pages import svg

LETTER = 7.4  # pixels of a letter in a box, about
SMALL = 6.8  # pixels of a letter beside an arrow
LINE = 16.0  # from line to line of words
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}.name{font-weight:600}"
    "rect{stroke-width:1.2}.box{fill:#f6f8fa;stroke:#8c959f}.ours{fill:#ddf4ff;stroke:#0969da}"
    ".live{fill:#fff1e5;stroke:#bf5b17}.kept{fill:#dafbe1;stroke:#1a7f37}.mark{fill:#ffebe9;stroke:#cf222e}"
    ".lane{fill:none;stroke:#d0d7de;stroke-dasharray:5 4}.arrow{fill:none;stroke:#57606a;stroke-width:1.4}"
    ".head{fill:#57606a}.rule{stroke:#cf222e;stroke-dasharray:4 3}.axis{stroke:#8c959f}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9da7b3}"
    ".box{fill:#21262d;stroke:#6e7681}.ours{fill:#0c2d6b;stroke:#4493f8}.live{fill:#4a2507;stroke:#e0823d}"
    ".kept{fill:#0f3d1f;stroke:#3fb950}.mark{fill:#5c1a1b;stroke:#f85149}.lane{stroke:#3d444d}"
    ".arrow{stroke:#9da7b3}.head{fill:#9da7b3}.axis{stroke:#6e7681}}"
)
HEAD = svg.element(
    "defs",
    svg.element(
        "marker",
        svg.element("path", d="M0,0 L9,4.5 L0,9 z", class_="head"),
        id="head",
        markerUnits="userSpaceOnUse",
        markerWidth=9.0,
        markerHeight=9.0,
        refX=8.5,
        refY=4.5,
        orient="auto",
    ),
)


class Rect(NamedTuple):
    """A part's place in a drawing."""

    x: float
    y: float
    w: float
    h: float

    def meets(self, other: "Rect") -> bool:
        """True if the two share more than an edge."""
        return (
            self.x < other.x + other.w
            and other.x < self.x + self.w
            and self.y < other.y + other.h
            and other.y < self.y + self.h
        )


class Box(NamedTuple):
    """A box with words in its middle; arrows name it by its first line, or by `name`."""

    x: float
    y: float
    w: float
    h: float
    words: str = ""
    kind: str = "box"
    name: str = ""


class Lane(NamedTuple):
    """A dashed frame around boxes, with its name in its upper left corner."""

    x: float
    y: float
    w: float
    h: float
    words: str


class Words(NamedTuple):
    """Words that belong to no box."""

    x: float
    y: float
    words: str
    kind: str = "small"
    anchor: str = "start"


class Rule(NamedTuple):
    """A line between two points: `rule` is dashed, `axis` is not."""

    x: float
    y: float
    to_x: float
    to_y: float
    kind: str = "rule"


class Arrow(NamedTuple):
    """An arrow from box to box.

    It is straight where the boxes face each other, moved by `shift` pixels across its way. Else it goes across
    first and then up or down. Its words stand above it or at its right; with `other` below it or at its left.
    """

    start: str
    end: str
    words: str = ""
    shift: float = 0.0
    other: bool = False


Part = Box | Lane | Words | Rule | Arrow


class Drawing(NamedTuple):
    """A drawing: its text alternative, its size, its parts."""

    label: str
    width: float
    height: float
    parts: Sequence[Part]


def draw(drawing: Drawing) -> str:
    """The drawing as SVG: lanes first, then arrows, then boxes and words."""
    named = boxes(drawing)
    shapes = [svg.element("style", STYLE), HEAD]
    for kinds in (Lane, Rule, Arrow, Box, Words):
        for part in drawing.parts:
            if isinstance(part, kinds):
                shapes += shape(part, named)
    return svg.picture("".join(shapes), drawing.width, drawing.height, drawing.label) + "\n"


def boxes(drawing: Drawing) -> dict[str, Box]:
    """Boxes by the names that arrows call them."""
    found: dict[str, Box] = {}
    for part in drawing.parts:
        if isinstance(part, Box):
            name = part.name or part.words.partition("\n")[0]
            if name in found:
                raise ValueError(f"two boxes are called {name!r}; give one of them another name")
            found[name] = part
    return found


def shape(part: Part, named: dict[str, Box]) -> Iterator[str]:
    """The SVG of a part."""
    if isinstance(part, Box):
        yield svg.element("rect", x=part.x, y=part.y, width=part.w, height=part.h, rx=4.0, class_=part.kind)
        yield from lines(middle(part), "", "middle")
    elif isinstance(part, Lane):
        yield svg.element("rect", x=part.x, y=part.y, width=part.w, height=part.h, rx=6.0, class_="lane")
        yield svg.text(part.words, part.x + 8, part.y + 17, "name")
    elif isinstance(part, Words):
        yield from lines(part, part.kind, part.anchor)
    elif isinstance(part, Rule):
        yield svg.element("line", x1=part.x, y1=part.y, x2=part.to_x, y2=part.to_y, class_=part.kind)
    else:
        points = way(named[part.start], named[part.end], part.shift)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield svg.element("polyline", points=path, class_="arrow", marker_end="url(#head)")
        if part.words:
            beside = told(part, points)
            yield from lines(beside, "small", beside.anchor)


def lines(words: Words, kind: str, anchor: str) -> Iterator[str]:
    """Each line of words as a text."""
    for number, line in enumerate(words.words.split("\n")):
        yield svg.text(line, words.x, words.y + LINE * number, kind, anchor)


def middle(box: Box) -> Words:
    """A box's words in its middle."""
    count = box.words.count("\n") + 1
    return Words(box.x + box.w / 2, box.y + box.h / 2 + 4.5 - LINE * (count - 1) / 2, box.words, "", "middle")


def way(start: Box, end: Box, shift: float) -> list[tuple[float, float]]:
    """Points of an arrow from box to box."""
    top, bottom = max(start.y, end.y), min(start.y + start.h, end.y + end.h)
    left, right = max(start.x, end.x), min(start.x + start.w, end.x + end.w)
    if bottom > top:
        y = (top + bottom) / 2 + shift
        ahead = end.x > start.x
        return [(start.x + start.w, y), (end.x, y)] if ahead else [(start.x, y), (end.x + end.w, y)]
    if right > left:
        x = (left + right) / 2 + shift
        below = end.y > start.y
        return [(x, start.y + start.h), (x, end.y)] if below else [(x, start.y), (x, end.y + end.h)]
    y, x = start.y + start.h / 2 + shift, end.x + end.w / 2
    begin = start.x + start.w if end.x > start.x else start.x
    return [(begin, y), (x, y), (x, end.y if end.y > start.y else end.y + end.h)]


def told(arrow: Arrow, points: Sequence[tuple[float, float]]) -> Words:
    """An arrow's words, beside the middle of its first stretch."""
    (x0, y0), (x1, y1) = points[:2]
    count = arrow.words.count("\n") + 1
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    if y0 == y1:
        return Words(x, y + 16 if arrow.other else y - 6 - LINE * (count - 1), arrow.words, anchor="middle")
    return Words(
        x - 7 if arrow.other else x + 7,
        y + 4 - LINE * (count - 1) / 2,
        arrow.words,
        anchor="end" if arrow.other else "start",
    )


def room(words: Words) -> Rect:
    """The place that words take, about."""
    rows = words.words.split("\n")
    w = max(map(len, rows)) * (SMALL if words.kind == "small" else LETTER)
    x = {"start": words.x, "middle": words.x - w / 2, "end": words.x - w}[words.anchor]
    return Rect(x, words.y - 10, w, LINE * len(rows) - 3)


def faults(drawing: Drawing) -> list[str]:
    """Faults that make a drawing hard to read: words wider than their box, parts that overlap or lie outside."""
    named = boxes(drawing)
    solid = {name: Rect(*box[:4]) for name, box in named.items()}
    found = []
    for name, box in named.items():
        within = room(middle(box))
        if box.words and (within.w > box.w - 6 or within.h > box.h):
            found.append(f"the words of {name!r} need {within.w:.0f} x {within.h:.0f} pixels")
    arrows = [part for part in drawing.parts if isinstance(part, Arrow)]
    for part in drawing.parts:
        if isinstance(part, Words):
            solid[part.words] = room(part)
    for arrow in arrows:
        if arrow.words:
            solid[told_by(arrow)] = room(told(arrow, way(named[arrow.start], named[arrow.end], arrow.shift)))
    places = list(solid.items())
    for number, (name, place) in enumerate(places):
        if (
            place.x < 0
            or place.y < 0
            or place.x + place.w > drawing.width
            or place.y + place.h > drawing.height
        ):
            found.append(f"{name!r} lies outside")
        found += [f"{name!r} meets {other!r}" for other, there in places[number + 1 :] if place.meets(there)]
    for arrow in arrows:
        others = {name: at for name, at in solid.items() if name not in (arrow.start, arrow.end)}
        found += [
            f"{told_by(arrow)!r} crosses {name!r}" for name in others if crosses(arrow, named, others[name])
        ]
    return found


def told_by(arrow: Arrow) -> str:
    """An arrow's name in a fault."""
    return f"{arrow.start} -> {arrow.end}: {arrow.words}"


def crosses(arrow: Arrow, named: dict[str, Box], place: Rect) -> bool:
    """True if an arrow's line goes through this place."""
    points = way(named[arrow.start], named[arrow.end], arrow.shift)
    return any(
        Rect(min(x0, x1), min(y0, y1), abs(x1 - x0) or 1.0, abs(y1 - y0) or 1.0).meets(place)
        for (x0, y0), (x1, y1) in pairwise(points)
    )
