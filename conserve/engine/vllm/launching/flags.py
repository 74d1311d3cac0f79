"""Flags of vLLM: the user's, over defaults that suit batch work on this machine."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from conserve.engine.runtime.machine import BINDING, RESERVED, memory_headroom
from conserve.engine.runtime.vllm_flags import names_of, value_of
from conserve.engine.vllm.compat.versions import internal
from conserve.engine.vllm.launching.number_format import (
    FLOAT32,
    MAMBA2,
    Chosen,
    format_of,
    keeps,
    names_format,
    read_config,
)
from conserve.errors import SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

CLI_ARGS = "vllm.entrypoints.common.cli_args"
KV_BYTES_MAX = 4 << 30  # zeroing takes a second per GiB; more only helps thousands of rows in flight
KV_BYTES_MIN = 256 << 20
PIPELINE = "--pipeline-parallel-size"
ENGINES = "--data-parallel-size"
AHEAD = ("--async-scheduling", "--no-async-scheduling")
PROCESS_BYTES = 2 << 30  # three Python processes with torch, and activations


def parse_flags(model: str, flags: Sequence[str], *, served: bool = False) -> AsyncEngineArgs:
    """The engine's arguments; raises `SettingsError` for a flag that vLLM does not take. Imports vLLM.

    With `served`, flags of the server alone are taken too, such as `--tool-call-parser`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if "--model" in names_of(flags):
        raise SettingsError("--model is no engine flag: name the model itself")
    add_flags = internal(f"{CLI_ARGS}.make_arg_parser") if served else AsyncEngineArgs.add_cli_args
    parser = add_flags(FlexibleArgumentParser(prog="", add_help=False))
    have_refused(parser)
    defaults = [*_common_defaults(), *(cpu_defaults(model, flags) if current_platform.is_cpu() else ())]
    try:
        first = [model] if served else []  # the server's parser would take another word for it
        parsed = parser.parse_args([*first, *defaults, *flags, "--model", model])
        return AsyncEngineArgs.from_cli_args(parsed)
    except SettingsError:
        raise
    except (SystemExit, Exception) as error:
        _refuse(str(error))


def configured(arguments: Any, *, served: bool) -> VllmConfig:
    """The engine's configuration, with the sizes of an iteration that vLLM gives a server or offline work.

    Without either vLLM takes an accelerator for a small one. Offline work on a CPU keeps those sizes, by which it
    was measured.
    """
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    offline = None if current_platform.is_cpu() else UsageContext.LLM_CLASS
    config: VllmConfig = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER if served else offline)
    if served and current_platform.is_cpu():
        reserve_cores(config)
    return config


def reserve_cores(config: VllmConfig) -> None:
    """Have a server on a CPU leave as many cores free as vLLM's own would, unless the user said how many.

    vLLM leaves one to the engine core, which spins while it waits, and one more where there is a KV connector, for
    the one that needs it. Ours does not. Of two cores none would be left then: the worker's threads and the engine
    core take turns on them, and a decode step takes a quarter longer (docs/adr/0037). Where the user or the control
    group binds the threads, none is reserved.
    """
    if RESERVED in os.environ or os.environ.get(BINDING, "auto") != "auto":
        return
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    from conserve.engine.vllm.settings import CONNECTOR

    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector == CONNECTOR:
        alone = copy(config)
        alone.kv_transfer_config, alone.parallel_config = None, copy(config.parallel_config)
        alone.parallel_config.data_parallel_rank_local = 0  # the first engine's cores stand for each one's
        os.environ[RESERVED] = str(OMPProcessManager(alone).reserve_cpu_num)


def names_scheduling(flags: Sequence[str]) -> bool:
    """True if the user says whether iterations are scheduled ahead."""
    return not set(names_of(flags)).isdisjoint(AHEAD)


def ahead_under_v1(config: VllmConfig) -> bool:
    """True if iterations are scheduled ahead under the V1 model runner, where rows cannot leave them."""
    return bool(config.scheduler_config.async_scheduling and not config.use_v2_model_runner)


def engines_of(flags: Sequence[str]) -> int:
    """Number of data parallel engines by the flags; 1 for a word that is no number, which vLLM refuses."""
    text = value_of(flags, ENGINES) or ""
    return max(1, int(text)) if text.isdecimal() else 1


def require_exchange(config: VllmConfig) -> None:
    """Raise `SettingsError` for experts on several engines that exchange no tokens, as vLLM's on a CPU."""
    from vllm.platforms import current_platform

    engines = config.parallel_config.data_parallel_size
    if engines == 1 or not config.model_config.is_moe or not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv:
        raise SettingsError(
            f"vLLM on a CPU cannot run a mixture of experts with --data-parallel-size {engines}: its engines "
            "exchange no tokens there; leave the flag out"
        )


def spans_machines(config: VllmConfig) -> bool:
    """True if workers may be on other machines, which shared memory does not reach."""
    parallel = config.parallel_config
    backend, nodes = getattr(parallel, "distributed_executor_backend", None), getattr(parallel, "nnodes", 1)
    return backend == "ray" or nodes > 1


def said_of_adapters(args: Any) -> str | None:
    """Warning about the base model beside LoRA adapters on a CPU, by vLLM's arguments; None where it is not needed.

    vLLM's kernels there look up the adapter of a token of the base model at index -1, which is the last slot: that
    has no weights until as many adapters as slots are in use.
    """
    from vllm.platforms import current_platform

    if not args.enable_lora or not current_platform.is_cpu():
        return None
    return (
        "vLLM on a CPU answers requests for the base model with the weights of an adapter while --max-loras "
        f"adapters are in use (now {args.max_loras}); set --max-loras above the number of adapters in use"
    )


def said_of_scheduling(flags: Sequence[str]) -> str | None:
    """Warning about promises on an accelerator that schedules no iteration ahead; None where it is not needed.

    Seen on the simulated one alone (docs/gpu/h200.md): the host's clock times each iteration there, and those with
    safepoints take longer than the latency model says.
    """
    from vllm.platforms import current_platform

    named = [name for name in names_of(flags) if name in AHEAD]
    if named[-1:] != [AHEAD[1]] or current_platform.is_cpu():
        return None
    return (
        f"with {AHEAD[1]} rows made latencies up to 2.2 times as long as promised on a simulated accelerator; "
        "leave it out, or measure: conserve bench"
    )


def have_refused(parser: ArgumentParser) -> None:
    """Have the parser raise `SettingsError` with a sentence; argparse prints its usage and exits."""
    setattr(parser, "error", _refuse)  # noqa: B010


def _refuse(message: str) -> NoReturn:
    sentence = message.strip().splitlines()[0] if message.strip() else "it cannot be read"
    raise SettingsError(f"vLLM does not take these engine flags: {sentence}")


def _common_defaults() -> list[str]:
    return ["--disable-log-stats", "--no-use-tqdm-on-load"]


def cpu_defaults(model: str, flags: Sequence[str], *, copies_bytes: int = 0) -> list[str]:
    """Engine flags for a CPU. The user's flags come after them and win.

    `copies_bytes` is the memory for copies of KV blocks, for which the engine's KV leaves room.
    """
    # Compiling takes a minute, gains 10-20 %, and changes greedy text on near-ties.
    # But an eager stage of a pipeline has no room there for what it gets from the one before it.
    defaults = [] if PIPELINE in names_of(flags) else ["--enforce-eager"]
    available = _available_bytes() // engines_of(flags) - copies_bytes
    weights = _weight_bytes(Path(model))
    chosen = None if names_format(flags) else format_of(model)
    if chosen is not None:
        name = affordable(chosen, available=available, weights=weights)
        weights *= 2 if name == FLOAT32 else 1
        defaults += ["--dtype", name]
    if not caches_prefixes(model):
        defaults += ["--no-enable-prefix-caching"]
    return [*defaults, "--kv-cache-memory-bytes", str(kv_bytes(available - weights))]


def caches_prefixes(model: str) -> bool:
    """False for a hybrid with Mamba 2: vLLM's CPU kernels keep no state at a prefix's end, and fail for it."""
    config = read_config(model)
    return config is None or not keeps(config, MAMBA2)


def affordable(chosen: Chosen, *, available: int, weights: int) -> str:
    """The chosen format, or the half-precision one if weights of twice the bytes would leave no room for KV."""
    others = [name for name in chosen.speeds if name != FLOAT32]
    if chosen.name != FLOAT32 or not others or available - 2 * weights - PROCESS_BYTES >= KV_BYTES_MIN:
        return chosen.name
    return others[0]


def kv_bytes(left: int) -> int:
    """Half of the bytes that are left beside the engine's processes, within bounds.

    vLLM's own choice is 92 % of the machine's memory, and it refuses to start if anything else runs.
    """
    return int(max(KV_BYTES_MIN, min(KV_BYTES_MAX, (left - PROCESS_BYTES) // 2)))


def _available_bytes() -> int:
    """Memory that a CPU worker may take, by the machine and by the control group."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    free = int(get_memory_node_info(0).available_memory)
    headroom = memory_headroom()
    return free if headroom is None else min(free, headroom)


def _weight_bytes(model: Path) -> int:
    if model.is_file():
        return model.stat().st_size
    weights: list[Any] = [*model.glob("*.safetensors")] or [*model.glob("*.bin")]
    return sum(path.stat().st_size for path in weights)
