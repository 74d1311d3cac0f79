"""Rehearsal on an untried vLLM: do rows that leave an iteration have the tokens of rows that stay?

Names and signatures may all be there (`trial`) and mean something else. A small random model is run with and
without rows that leave, in a process of its own (`preemption.rehearsal`), since an engine may crash, hang or keep
memory. On a GPU a second process compiles the model, since rows leave between pieces and CUDA graphs there. That
takes some ten seconds, or a minute on a GPU, so a verdict is kept for the installed versions on this machine. What
kept a process from one, such as a full GPU, is told and not kept. Without a verdict no row leaves.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conserve import __version__
from conserve.engine.runtime.start_cache import keep, kept_in
from conserve.engine.vllm.compat.installed import InstalledEngine, installed_version
from conserve.variables import REHEARSED

WORDS = ("-m", "conserve.engine.vllm.preemption.rehearsal")
SAME, FAULT, FAILED = "rehearsed: same", "rehearsed: fault: ", "rehearsed: failed: "
"""Beginnings of the line that the process prints: a verdict, or the cause for which there is none."""
LAUNCHERS = ("VLLM_DP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")  # of processes to wait for
CHOICES = ("VLLM_USE_V2_MODEL_RUNNER",)  # variables that decide what runs
EAGER, COMPILED = "eager", "compiled"  # ways to run a model
REHEARSAL_S = 240.0  # of one way; it takes some 12 s of processor time, and a minute on a busy machine
REHEARSING = "trying an iteration that rows leave"
SAME_TOKENS = "rows that leave an iteration have the same tokens"
NEVER = "no iteration that rows leave has been tried with this version; run: conserve doctor"


def is_known(engine: InstalledEngine) -> bool:
    """True if there is an outcome for this vLLM."""
    return fault_of(engine) != NEVER


def fault_of(engine: InstalledEngine) -> str | None:
    """Why no row may leave an iteration of this vLLM; None if their tokens were the same."""
    told = os.environ.get(REHEARSED)
    if told is None:
        told = kept_in(_file(), type_=str).get(_key(engine), NEVER)
    return told or None


def ways(engine: InstalledEngine) -> Sequence[str]:
    """Ways to run a model in which rows must be seen to leave: those of an engine without flags, and eager mode."""
    return (EAGER,) if engine.computes_on_cpu else (EAGER, COMPILED)


def usual_time(engine: InstalledEngine) -> str:
    """Time that a rehearsal takes, for the user."""
    return "in some ten seconds" if engine.computes_on_cpu else "in a minute or two"


def rehearse(engine: InstalledEngine) -> None:
    """Have rows leave. The outcome is for this process and those that it starts; a verdict is kept for others."""
    said = next((one for one in map(_said, ways(engine)) if one != SAME), SAME)
    if said == SAME or said.startswith(FAULT):
        fault = said.removeprefix(SAME).removeprefix(FAULT)
        keep(_file(), _key(engine), fault, type_=str)
    else:
        fault = f"{REHEARSING} failed ({said.removeprefix(FAILED)}); run: conserve doctor"
    os.environ[REHEARSED] = fault


def _said(way: str) -> str:
    """The line that the process of this way prints, or how it ended without one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    try:
        ended = subprocess.run(
            [sys.executable, *WORDS, way],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=REHEARSAL_S,
            env={**environment, REHEARSED: ""},  # there rows leave
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {REHEARSAL_S:g} s"
    for line in ended.stdout.decode(errors="replace").splitlines():
        if line == SAME or line.startswith((FAULT, FAILED)):
            return line
    if ended.returncode < 0:
        return f"its process was ended by {signal.Signals(-ended.returncode).name}"
    return f"its process ended with code {ended.returncode}"


def _file() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("conserve") / "rehearsals.json"


def _key(engine: InstalledEngine) -> str:
    """Key of a verdict: versions, the machine, variables that choose among vLLM's parts, ways beside eager mode."""
    chosen = [f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ]
    versions = [f"{engine.distribution} {engine.version}", f"torch {installed_version('torch')}"]
    return ", ".join([*versions, f"conserve {__version__}", platform.node(), *chosen, *ways(engine)[1:]])
