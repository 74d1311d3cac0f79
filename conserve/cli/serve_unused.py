"""Flags of `conserve serve` that nothing would read: those of a process that it does not start."""

from collections.abc import Sequence

import typer

from conserve.cli import output
from conserve.errors import SettingsError

HARVESTERS = ("utility", "share")
TELEMETRY = ("metrics_port", "metrics_host", "otlp_endpoint")  # of the harvester, too
BATCHES = ("max_file", "max_requests")
GUARDS = ("open_metrics", "max_body", "max_connections")


def given(ctx: typer.Context, names: Sequence[str]) -> list[str]:
    """Those of these flags that stand on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def refuse_unused(ctx: typer.Context, *, harvest: bool, batches: bool) -> None:
    """Raise for flags of the harvester, or of files and batches, where they are switched off.

    Those of telemetry are told only: a deployment may have them always.
    """
    for wanted, names, whose, switch in (
        (harvest, HARVESTERS, "the harvester", "--no-harvest"),
        (batches, BATCHES, "files and batches", "--no-batches"),
    ):
        flags = [] if wanted else given(ctx, names)
        if flags:
            are, them = ("is", "it") if len(flags) == 1 else ("are", "them")
            raise SettingsError(f"{' and '.join(flags)} {are} for {whose}; leave {them} out with {switch}")
    if not harvest and (flags := given(ctx, TELEMETRY)):
        output.say(f"no harvester runs (--no-harvest), so nothing is served or sent by {' and '.join(flags)}")


def not_printed(ctx: typer.Context) -> list[str]:
    """Say which flags the command of `--print-flags` goes without."""
    flags = given(ctx, [*GUARDS, *HARVESTERS, *TELEMETRY, *BATCHES])
    return [f"the printed command has no {' and '.join(flags)}: only conserve serve has"] if flags else []
