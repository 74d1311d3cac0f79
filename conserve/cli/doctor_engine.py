"""Findings on the embedded engine: installation, library, model, cores, memory, number format."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from conserve.cli import output
from conserve.cli.doctor_finding import Finding
from conserve.cli.doctor_machine import shared_memory
from conserve.config import DEMO_MODEL, Settings
from conserve.errors import SettingsError
from conserve.units import GIB

if TYPE_CHECKING:
    from conserve.engine.vllm.compat.installed import EngineDescription
    from conserve.engine.vllm.launching.loading import LoadTrial


def installed_engine(found: "EngineDescription") -> Iterator[Finding]:
    """Version of the installed engine, and the problems that keep it from working."""
    name = f"{found.distribution} {found.version}" if found.distribution else "not installed"
    yield Finding("engine", f"{name}: newer than what was tried ({found.tried})" if found.untried else name)
    yield Finding("device", found.device or "none")
    for problem in found.problems:
        yield Finding("engine", problem.cause, ok=False, fix=problem.fix)


def no_engine(found: "EngineDescription") -> Finding:
    """Installation without an engine, as in the image of harvesters and APIs, where no model is asked for."""
    command = found.install.removeprefix("run: ")
    return Finding(
        "engine", f"none: harvesting from servers, the API and all other commands work; an engine: {command}"
    )


def engine(settings: Settings, found: "EngineDescription") -> Iterator[Finding]:
    """Model, cores, memory and number format; loads nothing."""
    yield model(settings)
    if found.device == "cpu":
        yield cores()
        yield memory()
        yield number_format(settings)
    if (shared := shared_memory()) is not None:
        yield shared


def library(found: "EngineDescription", loaded: "LoadTrial") -> Finding:
    """Result of loading the engine's library, and the seconds it took."""
    from conserve.installation import pip

    again = f"{pip('install')} --force-reinstall --no-deps {found.distribution}=={found.version}"
    first = "run it with nothing beside it" if loaded.gave_up else "install what the cause names"
    fix = f"{first}, or install the engine anew: {again}"
    done = "loads and is tried" if found.untried else "loads"
    loads = f"{done} in {output.duration(loaded.seconds)}, on {loaded.device}"
    return Finding.judged("library", loaded.problem or loads, fix, ok=loaded.problem is None)


def internals(found: "EngineDescription", loaded: "LoadTrial") -> Iterator[Finding]:
    """Outcome of the self-test: names of vLLM that ConServe uses, and the parts that do without."""
    from conserve.engine.vllm.compat.rehearsal import SAME_TOKENS

    if loaded.names is None:
        return
    fix = f"install a tried version; {found.install}"
    for fault in loaded.faults:
        yield Finding("internals", fault, ok=False, fix=fix)
    if not loaded.faults:
        same = f", and {SAME_TOKENS}" if found.untried else ""
        yield Finding("internals", f"all {loaded.names} names of vLLM that ConServe uses are there{same}")


def model(settings: Settings) -> Finding:
    """Model that `conserve run` would load."""
    path = Path(settings.engine_model).expanduser()
    if path.is_absolute() and not (path / "config.json").is_file():
        return Finding(
            "model", f"{path} is no model folder", ok=False, fix="set CONSERVE_MODEL, or give --model"
        )
    return Finding("model", settings.engine_model)


def cores() -> Finding:
    """Cores that the engine computes on, and their limit."""
    from conserve.engine.runtime.machine import BINDING, RESERVED, cores, cpu_model

    found = cores()
    limits = [f"{found.online} in the machine", f"{found.allowed} by affinity"]
    limits += [f"{found.quota:g} by control group"] if found.quota is not None else []
    bound = os.environ.get(BINDING)
    how = f"bound by {BINDING}={bound}" if bound else f"{output.count(found.usable, 'thread')} compute"
    if not bound and found.usable > 1 and not found.bounded_by_quota and RESERVED not in os.environ:
        how += ", fewer in conserve serve"
    return Finding("cores", f"{cpu_model()}: {', '.join(limits)}; {how}")


def memory() -> Finding:
    """Memory that the engine may take, and its share for the KV cache."""
    from conserve.engine.runtime.machine import memory_bytes, memory_limit
    from conserve.engine.vllm.launching.flags import kv_bytes

    whole, free = memory_bytes()
    limit = ", by control group" if memory_limit() is not None else ""
    kv = f"up to {kv_bytes(free) / GIB:.1f} GiB of KV cache"
    return Finding("memory", f"{whole / GIB:.1f} GiB{limit}, {free / GIB:.1f} free; {kv}")


def number_format(settings: Settings) -> Finding:
    """Number format of the engine, and the measured speeds that decided it."""
    from conserve.engine.runtime.vllm_flags import spelled_out
    from conserve.engine.vllm.launching.number_format import names_format, read_config, recall
    from conserve.engine.vllm.model.demo_model import converted

    try:
        named_by_flags = names_format(spelled_out(shlex.split(settings.engine_args)))
    except SettingsError as error:
        return Finding("format", str(error), ok=False, fix="correct CONSERVE_ENGINE_ARGS")
    if named_by_flags:
        return Finding("format", f"as CONSERVE_ENGINE_ARGS says: {settings.engine_args}")
    named = settings.engine_model
    model = converted(settings.models_folder) if named == DEMO_MODEL else Path(named)
    config = read_config(str(model.expanduser())) if model and model.expanduser().is_dir() else None
    if config and config.get("quantization_config"):
        return Finding("format", "vLLM's choice")
    chosen = recall(config) if config else None
    if chosen is None:
        return Finding("format", f"measured when the engine first starts with {settings.engine_model}")
    figures = "; ".join(
        f"{name}: prefill {speed.prefill:,.0f}, decode {speed.decode:,.0f} GFLOP/s"
        for name, speed in chosen.speeds.items()
    )
    return Finding("format", f"{chosen.name} ({figures})")
