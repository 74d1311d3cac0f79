"""`conserve doctor`: what is installed and set up, and the fix for what is missing."""

import os
import platform
import re
import shlex
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from conserve import __version__
from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.config import DEMO_MODEL, Settings, settings_files
from conserve.errors import ConserveError

EXAMPLE = "conserve doctor"

EXAMPLE = """
conserve doctor
conserve doctor --json
"""

GIB = 1 << 30
LITTLE_DISK_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `fix` is the next command where it is not well."""

    name: str
    value: str
    ok: bool = True
    fix: str | None = None


def doctor(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of findings.")] = False,
) -> None:
    """Check the installation, the engine, the device and the store; exits 1 if something needs mending."""
    context: Context = ctx.obj
    settings = context.settings()
    findings = [*installation(), *engine(settings), *store(settings)]
    if as_json:
        output.data_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            mark = output.coloured("ok ", "green") if finding.ok else output.coloured("fix", "red")
            output.data(f"{mark} {finding.name:<10} {finding.value}")
            if finding.fix:
                output.data(f"    {'':<10} -> {finding.fix}")
    raise typer.Exit(exits.DONE if all(finding.ok for finding in findings) else exits.FAILED)


def installation() -> list[Finding]:
    """ConServe itself and where its settings come from."""
    files = settings_files(os.environ, Path.cwd())
    return [
        Finding("conserve", f"{__version__}, Python {platform.python_version()}, {platform.machine()}"),
        Finding("settings", ", ".join(str(file) for file in files) or "defaults and CONSERVE_* variables"),
    ]


def engine(settings: Settings) -> list[Finding]:
    """The embedded engine, or the server used instead of it."""
    from conserve.engine.vllm.compat import describe_engine

    if settings.endpoint is not None:
        return [Finding("endpoint", settings.endpoint)]
    found = describe_engine()
    name = f"{found.distribution} {found.version}" if found.distribution else "not installed"
    findings = [Finding("engine", name), Finding("device", found.device or "none")]
    findings += [Finding("engine", p.cause, ok=False, fix=p.fix) for p in found.problems]
    findings.append(model(settings))
    if found.device == "cpu":
        findings += [cores(), memory()]
        findings += [] if found.problems else [number_format(settings)]
    return findings


def cores() -> Finding:
    """The cores that the engine computes on, and what limits them."""
    from conserve.engine.runtime.machine import cores, cpu_model
    from conserve.engine.vllm.environment import BINDING

    found = cores()
    limits = [f"{found.online} in the machine", f"{found.allowed} by affinity"]
    limits += [f"{found.quota:g} by control group"] if found.quota is not None else []
    bound = os.environ.get(BINDING)
    how = f"bound by {BINDING}={bound}" if bound else f"{output.count(found.usable, 'thread')} compute"
    return Finding("cores", f"{cpu_model()}: {', '.join(limits)}; {how}")


def memory() -> Finding:
    """The memory that the engine may take, and what of it would be KV cache."""
    from conserve.engine.runtime.machine import memory_bytes, memory_limit
    from conserve.engine.vllm.flags import kv_bytes

    whole, free = memory_bytes()
    limit = ", by control group" if memory_limit() is not None else ""
    kv = f"up to {kv_bytes(free) / GIB:.1f} GiB of KV cache"
    return Finding("memory", f"{whole / GIB:.1f} GiB{limit}, {free / GIB:.1f} free; {kv}")


def number_format(settings: Settings) -> Finding:
    """The format that the engine computes in, and the speeds that decided; measured now if they never were."""
    from conserve.engine.vllm.demo_model import converted
    from conserve.engine.vllm.number_format import format_of, names_format

    flags = shlex.split(settings.engine_args)
    if names_format(flags):
        return Finding("format", f"as CONSERVE_ENGINE_ARGS says: {settings.engine_args}")
    model = converted(settings.models_folder) if settings.model == DEMO_MODEL else Path(settings.model)
    if model is None or not model.expanduser().is_dir():
        return Finding("format", f"measured when the engine first starts with {settings.model}")
    chosen = format_of(str(model.expanduser()))
    if chosen is None:
        return Finding("format", "vLLM's choice")
    figures = "; ".join(
        f"{name}: prefill {speed.prefill:,.0f}, decode {speed.decode:,.0f} GFLOP/s"
        for name, speed in chosen.speeds.items()
    )
    return Finding("format", f"{chosen.name} ({figures})")


def model(settings: Settings) -> Finding:
    """The model that `conserve run` would load."""
    path = Path(settings.model).expanduser()
    if path.is_absolute() and not (path / "config.json").is_file():
        return Finding(
            "model", f"{path} is no model folder", ok=False, fix="set CONSERVE_MODEL, or give --model"
        )
    return Finding("model", settings.model)


def where(settings: Settings) -> str:
    """The store's place, without its password."""
    return re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", settings.store) if settings.store else str(settings.home)


def store(settings: Settings) -> list[Finding]:
    """The store: whether it can be written, what is in it, and the room around it."""
    from conserve.store.database import reserve_space
    from conserve.store.readings import read_jobs
    from conserve.store.store import Store

    try:
        opened = Store.open(settings)
        try:
            with opened.write() as tx:
                reserve_space(tx)
        finally:
            opened.close()
        jobs = read_jobs(settings, now=time.time())
    except ConserveError as error:
        return [
            Finding("store", str(error), ok=False, fix="set CONSERVE_HOME to a folder that can be written")
        ]
    unfinished = sum(not job.state.final for job in jobs)
    free = shutil.disk_usage(settings.home).free
    return [
        Finding("store", f"{where(settings)}: {output.count(len(jobs), 'job')}, {unfinished} unfinished"),
        Finding(
            "disk",
            f"{free / GIB:.1f} GiB free",
            ok=free >= LITTLE_DISK_BYTES,
            fix=None
            if free >= LITTLE_DISK_BYTES
            else "free some space, or set CONSERVE_HOME to another disk",
        ),
    ]
