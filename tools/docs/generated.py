"""The generated files of docs/ and deploy/, and the function that makes each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.deploy import chart, dashboard
from tools.docs import commands, python, screen
from tools.docs.charts import CHARTS, draw

DOCS = Path(__file__).parents[2] / "docs"

FILES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "commands.md": commands.page,
    DOCS / "reference" / "python.md": python.page,
    DOCS / "reference" / "chart.md": chart.page,
    chart.CHART / "files" / "dashboard.json": dashboard.page,
    DOCS / "how-to" / "top.svg": screen.picture,
    **{DOCS / "benchmarks" / name: partial(draw, DOCS, chart) for name, chart in CHARTS.items()},
}
