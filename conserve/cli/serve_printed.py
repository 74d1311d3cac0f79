"""`conserve serve --print-flags`: the command of a `vllm serve` of the user's own, and what it goes without."""

import os
from collections.abc import Sequence

import typer

from conserve.cli import output
from conserve.cli.serve_notices import open_to_all
from conserve.cli.serve_unused import not_printed
from conserve.config import Settings
from conserve.engine.section import EngineSection
from conserve.engine.server_launch import ServerLaunch


def of_printed(ctx: typer.Context, host: str, settings: Settings) -> list[str]:
    """Say which keys the command of `--print-flags` takes, or that its server is open to all; and what it lacks."""
    if not settings.api_key:
        return [*open_to_all(host, settings), *not_printed(ctx)]
    return [
        "the printed command takes two keys from its shell: export VLLM_API_KEY, which clients send, and "
        "CONSERVE_HARVEST_KEY, which conserve harvest sends",
        *not_printed(ctx),
    ]


def print_command(
    settings: Settings, section: EngineSection, flags: list[str], notices: Sequence[str] = ()
) -> int:
    """Print the command of a vLLM with the plug-in, in a process that imports vLLM; returns the exit code."""
    import subprocess

    from conserve.engine.service import python
    from conserve.engine.vllm.compat.installed import require_engine
    from conserve.engine.vllm.launching.phases import IMPORTING

    require_engine()
    for notice in notices:
        output.say(notice)
    output.say(f"{IMPORTING}, which completes the flags for {settings.engine_model}")
    launch = ServerLaunch(
        model=settings.engine_model,
        models_folder=str(settings.models_folder),
        section=section,
        keyed=bool(settings.api_key),
        flags=flags,
    )
    command = python("conserve.engine.vllm.server.printed", *launch.words())
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(command, env=environment, check=False).returncode
