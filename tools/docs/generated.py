"""The generated files of docs/, and the function that makes each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.docs import commands, python
from tools.docs.charts import CHARTS, draw

DOCS = Path(__file__).parents[2] / "docs"

FILES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "commands.md": commands.page,
    DOCS / "reference" / "python.md": python.page,
    **{DOCS / "benchmarks" / name: partial(draw, DOCS, chart) for name, chart in CHARTS.items()},
}
