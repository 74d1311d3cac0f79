"""Options that several commands take."""

from typing import Annotated

import typer

Rebind = Annotated[
    bool, typer.Option("--rebind", help="Answer jobs with this model that another one has begun.")
]
Share = Annotated[
    str | None,
    typer.Option(
        metavar="WEIGHTS",
        help="Share tokens by weights of priorities, e.g. 10=3,0=1, or jobs for all jobs alike.",
    ),
]
Utility = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Of several jobs' rows, choose so many for the prefix they share, the rest by age (0 to 1).",
    ),
]
