"""Options that several commands take."""

from typing import Annotated

import typer

Utility = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Of several jobs' rows, choose so many for the prefix they share, the rest by age (0 to 1).",
    ),
]
