"""The generated files of docs/ and deploy/, and the function that makes each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.deploy import chart, dashboard
from tools.docs import (
    charts,
    commands,
    dots,
    drawings,
    mechanisms,
    plots,
    points,
    python,
    queue_drawings,
    screen,
)

DOCS = Path(__file__).parents[2] / "docs"
POINTS = DOCS / "benchmarks" / "operating-points.md"

FILES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "commands.md": commands.page,
    DOCS / "reference" / "python.md": python.page,
    DOCS / "reference" / "chart.md": chart.page,
    chart.CHART / "files" / "dashboard.json": dashboard.page,
    DOCS / "how-to" / "top.svg": screen.picture,
    POINTS: partial(points.page, POINTS),
    **{
        DOCS / "benchmarks" / name: partial(charts.draw, DOCS, one)
        for name, one in {**charts.CHARTS, **plots.CHARTS}.items()
    },
    **{DOCS / "benchmarks" / name: partial(dots.draw, DOCS, one) for name, one in plots.PLOTS.items()},
    **{
        DOCS / "explanation" / name: partial(drawings.draw, one)
        for name, one in {**mechanisms.DRAWINGS, **queue_drawings.DRAWINGS}.items()
    },
}
