"""Plan of the servers that `conserve bench` and `conserve tune` start, by settings and flags."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.api.running import engine_flags
from conserve.cli import output
from conserve.cli.bench_names import is_ours, section
from conserve.cli.serve import harvester_command, keyed, server_command
from conserve.cli.serve_flags import checkpointing
from conserve.config import Settings
from conserve.engine.policy.checkpointing import ADAPTIVE
from conserve.jobs.telemetry.otlp import DISABLED

if TYPE_CHECKING:
    from conserve.bench.presets import Preset
    from conserve.bench.servers.servers import ServersPlan
    from conserve.engine.service import ProcessCommand


def own_plan(
    settings: Settings,
    words: Sequence[str],
    names: Sequence[str],
    preset: "Preset",
    home: Path,
    kv_checkpoint: str = ADAPTIVE,
    *,
    seed: int,
) -> "ServersPlan":
    """Plan of servers for these policies, with a store of their own at `home`; `words` are flags of vLLM."""
    from conserve.bench.servers import rows
    from conserve.bench.servers.servers import ServersPlan

    flags = all_flags(settings, preset, words)
    # Never the user's queue, the place of its files, its metrics page or its traces.
    own = keyed(
        replace(settings, home=home.absolute(), store=None, data=None, metrics_port=None, otlp_endpoint=None)
    )
    return ServersPlan(
        settings=own,
        section=section(settings, names),
        flags=flags,
        connector=checkpointing(flags, kv_checkpoint, None) if any(map(is_ours, names)) else flags,
        preset=preset,
        rows=rows.make_rows(own, preset, seed),
        server=server_command,
        harvester=logged_harvester,
        say=output.say,
    )


def all_flags(settings: Settings, preset: "Preset", words: Sequence[str]) -> list[str]:
    """Flags of vLLM of a preset's server: the preset's, and those of the settings and these words, spelled out."""
    return [*preset.engine_flags, *engine_flags(settings, list(words))]


def logged_harvester(settings: Settings, url: str, *more: str) -> "ProcessCommand":
    """Command of a harvester whose words go to a file in its home: its rows are no job of the user's."""
    command = harvester_command(settings, url, *more)
    untraced = {**command.environment, DISABLED: "true"}  # whatever OpenTelemetry's own variables name
    return replace(command, log=settings.home / "harvester.log", environment=untraced)
