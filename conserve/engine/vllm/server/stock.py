"""Stock vLLM's server, as the yardstick of a comparison: this process becomes it, and nothing of ours stays in it.

The model's folder, number format and memory are chosen as for `conserve serve`, so that both compute alike. The
scheduler, its limits and everything else are vLLM's own, unless a flag names them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from conserve.engine.runtime.machine import cores
from conserve.engine.vllm.launching.environment import bind_threads
from conserve.engine.vllm.launching.flags import cpu_defaults
from conserve.engine.vllm.model.demo_model import DEMO_MODEL, resolve_model
from conserve.engine.vllm.server.process import without
from conserve.errors import ConserveError

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
OURS = "conserve"  # name of our plug-ins
FROZEN_S = 24 * 3600  # an iteration may be stopped in the middle while another server has its turn


def command(model: str, flags: Sequence[str], *, models_folder: Path) -> list[str]:
    """Command line of vLLM's own server with these flags; raises `ConserveError`."""
    from vllm.platforms import current_platform

    path = resolve_model(model, models_folder)
    defaults = ["--served-model-name", model, "--disable-uvicorn-access-log", "--no-use-tqdm-on-load"]
    defaults += cpu_defaults(path, flags) if current_platform.is_cpu() else []
    return [sys.executable, "-m", ENTRY, "--model", path, *without(defaults, flags), *flags]


def environment(model: str) -> dict[str, str]:
    """Variables of its process: no plug-in of ours, and no limit on how long it may be stopped."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    plugins = {entry.name for group in groups for entry in entry_points(group=group)} - {OURS}
    chosen = {
        "VLLM_PLUGINS": ",".join(sorted(plugins)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(FROZEN_S),
    }
    local = model == DEMO_MODEL or Path(model).exists()
    return chosen | ({"HF_HUB_OFFLINE": "1"} if local else {})


def main(words: Sequence[str]) -> None:
    """Become vLLM's server, or exit with an error. `words`: model, models' folder, flags."""
    model, models_folder, *flags = words
    try:
        bind_threads(cores())
        becomes = command(model, flags, models_folder=Path(models_folder))
    except ConserveError as error:
        print(f"conserve: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    sys.stdout.flush()
    os.execve(becomes[0], becomes, {**os.environ, **environment(model)})


if __name__ == "__main__":
    main(sys.argv[1:])
