"""Rehearsal on an untried vLLM: do rows that leave an iteration have the tokens of rows that stay?

Names and signatures may all be there (`trial`) and mean something else. A small random model is run with and
without rows that leave, in a process of its own (`preemption.rehearsal`), since an engine may crash, hang or keep
memory. That takes some ten seconds, so the outcome is kept for the installed versions. Until there is one, no row
leaves.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from conserve import __version__
from conserve.engine.runtime.kept import keep, kept_in
from conserve.engine.vllm.compat.installed import InstalledEngine, installed_version

WORDS = ("-m", "conserve.engine.vllm.preemption.rehearsal")
REHEARSES = "CONSERVE_REHEARSES"  # in the environment of that process: there rows leave
FAULT = "fault: "  # begins the line that tells of one
REHEARSAL_S = 120.0  # it takes some 12 s of processor time
REHEARSING = "trying an iteration that rows leave"
SAME_TOKENS = "rows that leave an iteration have the same tokens"
NEVER = "no iteration that rows leave has been tried with this version; run: conserve doctor"

log = logging.getLogger(__name__)


def is_known(engine: InstalledEngine) -> bool:
    """True if the outcome for this vLLM is kept."""
    return _key(engine) in kept_in(_file(), type_=str)


def fault_of(engine: InstalledEngine) -> str | None:
    """Why no row may leave an iteration of this vLLM; None if their tokens were the same."""
    if REHEARSES in os.environ:
        return None
    return kept_in(_file(), type_=str).get(_key(engine), NEVER) or None


def rehearse(engine: InstalledEngine) -> None:
    """Have rows leave, and keep the outcome."""
    keep(_file(), _key(engine), _fault_found() or "", type_=str)


def _fault_found() -> str | None:
    environment = {**os.environ, REHEARSES: "1"}
    try:
        ended = subprocess.run(
            [sys.executable, *WORDS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=REHEARSAL_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"rows that leave an iteration had no tokens within {REHEARSAL_S:g} s"
    said = ended.stdout.decode(errors="replace").splitlines()
    told = next((line.removeprefix(FAULT) for line in said if line.startswith(FAULT)), None)
    if told is None and ended.returncode:
        complaint = ended.stderr.decode(errors="replace")
        log.info("the rehearsal failed:\n%s", complaint)
        cause = (complaint.strip().splitlines() or [f"its process ended with code {ended.returncode}"])[-1]
        return f"an iteration that rows leave fails ({cause})"
    return told


def _file() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("conserve") / "rehearsals.json"


def _key(engine: InstalledEngine) -> str:
    torch = installed_version("torch")
    return f"{engine.distribution} {engine.version}, torch {torch}, conserve {__version__}"
