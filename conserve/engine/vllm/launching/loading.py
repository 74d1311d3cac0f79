"""Trial of loading the engine's library, in a process of its own, since it may crash or hang.

`python -m conserve.engine.vllm.launching.loading` imports vLLM and its kernels, and prints the device that they
run on and the outcome of `compat.trial`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Self

from conserve.engine.vllm.compat import trial
from conserve.engine.vllm.compat.installed import installed_engine, untried_engine
from conserve.engine.vllm.compat.rehearsal import REHEARSAL_S, rehearse, ways
from conserve.engine.vllm.launching.environment import last_error, prepare_environment

LOAD_S = 180.0  # it takes 7 s of processor time, and a minute on a busy machine
NAMES = "names: "
FAULT = "fault: "
KERNELS = "_C::"  # prefix of vLLM's own operators
# Each platform has other modules, and vLLM warns of one that it cannot load.
LOAD_KERNELS = "from vllm.platforms import current_platform as here; here.import_kernels()"
DEVICE = "device: "
WORDS = ("-m", "conserve.engine.vllm.launching.loading")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrial:
    """Outcome of a trial: the device, or the problem that kept the library from loading."""

    seconds: float
    device: str | None = None
    names: int | None = None  # of vLLM that were looked for
    faults: tuple[str, ...] = ()  # parts of ConServe that do not fit this vLLM
    problem: str | None = None
    gave_up: bool = False  # it took too long, which says little about the installation


class Loading:
    """The process of a trial; leaving the context kills it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, *WORDS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def outcome(self) -> LoadTrial:
        """Wait for the process to end, at most until `LOAD_S` after its start, and longer for a rehearsal."""
        newer = untried_engine()
        most_s = LOAD_S + (REHEARSAL_S * len(ways(newer)) if newer is not None else 0.0)
        try:
            said, complaint = self._process.communicate(
                timeout=max(0.0, self._began + most_s - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            late = f"vLLM did not load within {most_s:g} s"
            return LoadTrial(seconds=most_s, problem=late, gave_up=True)
        seconds = time.monotonic() - self._began
        if self._process.returncode == 0:
            return told(said.decode(), seconds)
        cause = why(self._process.returncode, complaint.decode(errors="replace"))
        return LoadTrial(seconds=seconds, problem=f"vLLM does not load: {cause}")


def told(said: str, seconds: float) -> LoadTrial:
    """The outcome that the process printed."""
    lines = said.splitlines()

    def after(word: str) -> list[str]:
        return [line.removeprefix(word).strip() for line in lines if line.startswith(word)]

    names = next((int(count) for count in after(NAMES)), None)
    device = said.rpartition(DEVICE)[2].strip()
    return LoadTrial(seconds=seconds, device=device, names=names, faults=tuple(after(FAULT)))


def why(code: int, complaint: str) -> str:
    """One phrase on why a process failed, from its exit code and the end of its error output."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return last_error(complaint) or f"its process ended with code {code}"


def main() -> None:
    """Load the library as the engine does."""
    prepare_environment(offline=True)
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # it only logs its errors
    if not any(name.startswith(KERNELS) for name in torch._C._dispatch_get_all_op_names()):
        raise ImportError(f'its kernels are missing; run: python -c "{LOAD_KERNELS}"')
    if current_platform.is_cuda():
        torch.cuda.init()
    try_names()
    print(f"{DEVICE}{current_platform.get_device_name()}")


def try_names() -> None:
    """Print the outcome of the self-test, in which rows of an untried version leave an iteration anew."""
    engine = installed_engine()
    assert engine is not None
    if (to_try := trial.to_rehearse()) is not None:
        rehearse(to_try)
    for part, cause in (trial.lost_parts() or trial.first_causes(engine.version)).items():
        print(f"{FAULT}{part.value}: {cause}")
    print(f"{NAMES}{trial.count_of_names()}")


if __name__ == "__main__":
    main()
