"""Options that several commands take."""

from typing import Annotated

import typer

from conserve.cli.context import job_ids

JOB = typer.Argument(
    metavar="JOB", help="A job's or its batch's id, the beginning of one, or last.", autocompletion=job_ids
)
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
LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="text|json", help="What is said beside the data: sentences, or a JSON object a line."
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", min=0, max=65535, help="Answer /metrics for Prometheus; 0 takes a free port."
    ),
]
MetricsHost = Annotated[
    str | None, typer.Option(metavar="HOST", help="Address that /metrics is answered at (127.0.0.1).")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Send a trace of each row to this OpenTelemetry collector."),
]
