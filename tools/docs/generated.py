"""The generated files of docs/, and the function that makes each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.docs.charts import CHARTS, draw
from tools.docs.commands import page

DOCS = Path(__file__).parents[2] / "docs"

FILES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "commands.md": page,
    **{DOCS / "benchmarks" / name: partial(draw, DOCS, chart) for name, chart in CHARTS.items()},
}
