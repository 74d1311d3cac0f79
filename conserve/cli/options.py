"""Options that several commands take."""

from typing import Annotated

import typer

Rebind = Annotated[
    bool, typer.Option("--rebind", help="Answer jobs with this model that another one has begun.")
]
Utility = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Of several jobs' rows, choose so many for the prefix they share, the rest by age (0 to 1).",
    ),
]
